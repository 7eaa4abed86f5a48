"""The demo's task for an hour with a kill every minute, kinds mixed, against three calm runs of the same length."""

from __future__ import annotations

import argparse
import json
import random
import shutil
import signal
import statistics
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

from common import ROOT, counters, read_jsonl, write_result

sys.path.insert(0, str(ROOT))
from tests.system.faults import Run, account, gone_within

IDS = ["chaos_hour"]
KINDS = ("driver", "engine-0", "worker-0", "learner", "term")
WINDOW = 10  # steps over which a reward curve is smoothed before it is compared
CALM_SEEDS = (0, 1, 2)
LEAST_MARGIN = 0.05


def arguments(seed: int, steps: int) -> list[str]:
    return ["experiment=demo", f"seed={seed}", f"train.steps={steps}", "eval.at_start=false", "run.progress=plain", "checkpoint.every=10",
            "logger.wandb=disabled", "logger.report=false", "launcher.restarts=1000"]  # fmt: skip


def curve(folder: Path) -> list[float]:
    """Mean reward of each surviving step, smoothed."""
    by_step = {r["step"]: r["reward/mean"] for r in read_jsonl(folder / "metrics.jsonl") if r["axis"] == "train"}
    raw = [by_step[step] for step in sorted(by_step)]
    return [statistics.fmean(raw[max(0, i - WINDOW + 1) : i + 1]) for i in range(len(raw))]


def chaos(root: Path, steps: int, minutes: float, every_s: float, rng: random.Random) -> dict[str, Any]:
    folder = root / "chaos"
    run = Run([*arguments(0, steps), f"run.dir={folder}"], folder, scripted=False, log=root / "chaos.log")
    began, next_kill = time.monotonic(), every_s
    kills: Counter[str] = Counter()
    orphans = own_failures = sittings = 0
    ended_by_us = False
    while run.process.poll() != 0:
        if run.process.poll() is not None:
            own_failures += not ended_by_us
            orphans += len(gone_within(folder, 5))
            if own_failures > 3:
                break
            run, ended_by_us = Run([f"resume={folder}"], folder, scripted=False, log=run.log), False
            sittings += 1
        if next_kill < time.monotonic() - began < minutes * 60:
            kind = rng.choice(KINDS)
            killed = run.kill("driver", signal.SIGTERM) if kind == "term" else run.kill(kind)
            ended_by_us |= killed and kind in ("driver", "term")
            kills[kind] += killed
            next_kill += every_s
        time.sleep(0.5)
    return {"kills": dict(kills), "sittings": 1 + sittings, "own_failures": own_failures, "orphans": orphans, "exit": run.process.returncode,
            "minutes": (time.monotonic() - began) / 60, "curve": curve(folder), "account": account(folder), "counters": counters(folder)}  # fmt: skip


def undisturbed(root: Path, seed: int, steps: int) -> list[float]:
    """The curve of a calm run, made when it is not there."""
    folder = root / f"calm{seed}"
    if not (folder / "ledger.json").exists():
        run = Run([*arguments(seed, steps), f"run.dir={folder}"], folder, scripted=False, log=root / "calm.log")
        assert run.wait(4 * 3600) == 0, run.log.read_text()[-3000:]
    return curve(folder)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=60)
    parser.add_argument("--every", type=float, default=60, help="seconds between kills")
    parser.add_argument("--steps", type=int, default=400, help="training steps; the disturbed run must still be under way when the hour ends")
    parser.add_argument("--keep", type=Path, help="keep the runs here, and use the finished ones that are there")
    args = parser.parse_args()
    root = args.keep or Path(tempfile.mkdtemp(prefix="sao-chaos-"))
    root.mkdir(parents=True, exist_ok=True)
    told = root / "chaos.json"
    if not told.exists():
        told.write_text(json.dumps(chaos(root, args.steps, args.minutes, args.every, random.Random(0))))
    disturbed = json.loads(told.read_text())
    calm = [undisturbed(root, seed, args.steps) for seed in CALM_SEEDS]
    low, high = ([choose(values) for values in zip(*calm, strict=True)] for choose in (min, max))
    margin = max(high[-1] - low[-1], LEAST_MARGIN)
    outside = [i for i, value in enumerate(disturbed["curve"]) if not low[i] - margin <= value <= high[i] + margin]
    found = disturbed["account"]
    bad = found["lost"] + found["doubled"]
    write_result(
        "chaos_hour", "prompts lost or trained twice in an hour of the demo's task with a kill every minute", bad, 0, higher_is_better=False,
        values=[bad], detail={**disturbed, "calm_curves": calm, "margin": margin, "steps_outside_the_band_of_calm": outside},
    )  # fmt: skip
    if args.keep is None:
        shutil.rmtree(root)


if __name__ == "__main__":
    main()
