"""A run on real vLLM, then steps of it computed again from the run folder: every recorded number must come out the same to the last bit.

Also the other way round: with one bit of one recorded value flipped, and one of a checkpoint's weights, the replay must find and name exactly that.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from common import ROOT, counters, sao, write_result

from sao.report.store import read_trajectories, step_path, write_file

IDS = ["replay_bit_equal"]
RUN = [
    "experiment=demo", "train.steps=10", "critic.critic_only_steps=2", "checkpoint.every=5", "checkpoint.keep=3", "eval.at_start=false", "eval.at_end=false",
    "logger.wandb=disabled", "run.progress=plain",
]  # fmt: skip
MIDDLE = 8  # three steps after a checkpoint
STEPS = (
    4,
    MIDDLE,
    9,
    11,
)  # 4: from the initial weights to the first checkpoint; 9: from checkpoint to checkpoint; 11: the last, and the final export


def replayed(run: Path, step: int) -> dict[str, Any]:
    """What `sao replay --json` says, in a process of its own."""
    done = subprocess.run(
        [sys.executable, "-m", "sao.cli", "replay", str(run), "--step", str(step), "--json"], cwd=ROOT, capture_output=True, text=True, timeout=900
    )
    if done.returncode not in (0, 1):
        raise SystemExit(done.stderr)
    told: dict[str, Any] = json.loads(done.stdout)
    assert (done.returncode == 0) == told["bit_equal"]
    return told


def flip_value(run: Path) -> str:
    """Flip the last bit of one recorded value of the middle step; returns the place."""
    stored = read_trajectories(run, [MIDDLE])
    chosen = stored[len(stored) // 2]
    record = chosen.records[0]
    assert record is not None
    values = record.values.copy()
    at = int(np.flatnonzero(chosen.trajectory.segments[0].action_mask)[3])
    values.view(np.uint32)[at] ^= 1
    records = [r if r is not record else replace(record, values=values) for episode in stored for r in episode.records if r is not None]
    write_file(step_path(run, MIDDLE), MIDDLE, [episode.trajectory for episode in stored], records, chosen.trained_at_version)
    return f"values of episode {record.episode_id}, segment 0, token {at}"


def flip_weight(run: Path) -> str:
    """Flip the last bit of one weight in the checkpoint after step 4, which the flipped value does not reach; returns the place."""
    import torch
    from safetensors.torch import load_file, save_file

    path = run / "checkpoints" / "step-000005" / "policy" / "model.safetensors"
    tensors = load_file(path)
    name = sorted(name for name in tensors if tensors[name].ndim == 2)[0]
    tensors[name].view(torch.int32)[0, 1] ^= 1
    save_file(tensors, path, metadata={"format": "pt"})
    return f"policy weights of {name}, element 1"


def main() -> None:
    with tempfile.TemporaryDirectory(prefix="sao-bench-") as root:
        run = Path(root) / "run"
        sao("train", *RUN, f"run.dir={run}")
        found = {step: replayed(run, step) for step in STEPS}
        faults = {}
        for flip, step in ((flip_value, MIDDLE), (flip_weight, 4)):
            place = flip(run)
            told = replayed(run, step)
            first = told["first"] or {}
            named = f"{first.get('what')} of {first.get('where')}"
            faults[place] = {"found": not told["bit_equal"], "named": named, "right": named == place}
        equal = all(told["bit_equal"] for told in found.values()) and all(fault["right"] for fault in faults.values())
        steps = {
            str(step): {
                "start": told["start"],
                "rolled_forward": len(told["steps"]) - 1,
                "action_tokens": told["tokens"],
                "numbers_compared": sum(quantity["compared"] for quantity in told["quantities"].values()),
                "numbers_that_differ": sum(quantity["differ"] for quantity in told["quantities"].values()),
                "weights_of": told["weights"],
                "first_departure": told["first"],
                "notes": told["notes"],
            }
            for step, told in found.items()
        }
        write_result(
            "replay_bit_equal",
            "steps of a run on vLLM computed again from its folder, each from the nearest checkpoint: 1 when every recorded number, and the weights after it, "
            "are the same to the last bit and an injected flip of one bit is named",
            float(equal),
            1,
            higher_is_better=True,
            values=[float(told["bit_equal"]) for told in found.values()],
            detail={"middle_step": MIDDLE, "steps": steps, "injected_faults": faults, "counters": counters(run)},
        )


if __name__ == "__main__":
    main()
