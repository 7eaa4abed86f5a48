"""The demo's task for an hour with a kill every minute, kinds mixed, against three calm runs of the same length."""

from __future__ import annotations

import argparse
import random
import shutil
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
    orphans = 0
    while time.monotonic() - began < minutes * 60 or run.process.poll() is None:
        if run.process.poll() is not None:
            if run.process.returncode == 0:
                break
            orphans += len(gone_within(folder, 5))
            run = Run([f"resume={folder}"], folder, scripted=False, log=run.log)
        if time.monotonic() - began > next_kill and time.monotonic() - began < minutes * 60:
            kind = rng.choice(KINDS)
            if kind == "term":
                run.process.terminate()
                kills[kind] += 1
            else:
                kills[kind] += run.kill(kind)
            next_kill += every_s
        time.sleep(1)
    return {"kills": dict(kills), "orphans": orphans, "exit": run.process.returncode, "minutes": (time.monotonic() - began) / 60,
            "curve": curve(folder), "account": account(folder), "counters": counters(folder)}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=60)
    parser.add_argument("--every", type=float, default=60, help="seconds between kills")
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--calm", type=int, default=3, help="undisturbed runs, seeds 0, 1, ...")
    args = parser.parse_args()
    root = Path(tempfile.mkdtemp(prefix="sao-chaos-"))
    disturbed = chaos(root, args.steps, args.minutes, args.every, random.Random(0))
    calm = []
    for seed in range(args.calm):
        run = Run([*arguments(seed, args.steps), f"run.dir={root / f'calm{seed}'}"], root / f"calm{seed}", scripted=False, log=root / "calm.log")
        assert run.wait(4 * 3600) == 0, run.log.read_text()[-3000:]
        calm.append(curve(root / f"calm{seed}"))
    spread = max((max(c[-1] for c in calm) - min(c[-1] for c in calm)), 0.05) if calm else None
    within = (
        all(min(c[i] for c in calm) - spread <= value <= max(c[i] for c in calm) + spread for i, value in enumerate(disturbed["curve"]))
        if calm
        else None
    )
    bad = disturbed["account"]["lost"] + disturbed["account"]["doubled"]
    write_result(
        "chaos_hour", "prompts lost or trained twice in an hour of the demo's task with a kill every minute", bad, 0, higher_is_better=False,
        values=[bad], detail={**disturbed, "calm_curves": calm, "band": spread, "curve_within_band_of_calm": within},
    )  # fmt: skip
    shutil.rmtree(root)


if __name__ == "__main__":
    main()
