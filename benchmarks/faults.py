"""kill -9 at random points: the driver, an engine, a worker, the learner; scripted engine and real vLLM. The run completes and no prompt is lost or doubled."""

from __future__ import annotations

import argparse
import random
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from common import ROOT, write_result

sys.path.insert(0, str(ROOT))
from tests.system.faults import Run, account, gone_within, undisturbed, weights
from tests.system.scripted_run import options

IDS = ["faults_lost_or_doubled"]
STEPS = 150  # of a scripted run: enough for every kill to find it under way
KINDS = ("driver", "engine-0", "worker-0", "learner")
REAL = ["experiment=demo", "train.steps=30", "train.batch_size=32", "eval.at_start=false", "eval.at_end=false", "run.progress=plain",
        "checkpoint.every=5", "logger.wandb=disabled", "logger.report=false", "launcher.restarts=1000"]  # fmt: skip


def killed(kind: str, kills: int, rng: random.Random, root: Path, *, scripted: bool, steps: int) -> dict[str, Any]:
    """One run in which `kind` is killed `kills` times, at random moments; a driver's death is followed by a resume."""
    folder = root / f"{'scripted' if scripted else 'vllm'}-{kind}"
    arguments = [*(options(root, steps=steps) if scripted else REAL), f"run.dir={folder}"]
    run = Run(arguments, folder, scripted=scripted, log=root / f"{folder.name}.log")
    done = orphans = 0
    run.wait_for_step(1, 600)
    began = time.monotonic()
    while done < kills and run.process.poll() is None:
        time.sleep(rng.uniform(0.2, 4.0 if scripted else 20.0))
        if not run.kill(kind):
            continue
        done += 1
        if kind == "driver":
            run.wait()
            orphans += len(gone_within(folder, 5))
            run = Run([f"resume={folder}"], folder, scripted=scripted, log=run.log)
            run.wait_for_step(run.step() + rng.randint(0, 2), 600)
    code = run.wait(3600)
    left = len(gone_within(folder, 5))
    return {"kind": kind, "engine": "scripted" if scripted else "vllm", "kills": done, "exit": code, "orphans": orphans + left,
            "seconds": time.monotonic() - began, **account(folder)}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--scripted", type=int, default=10, help="kills of each kind on the scripted engine")
    parser.add_argument("--real", type=int, default=2, help="kills of each kind on vLLM")
    args = parser.parse_args()
    root, rng = Path(tempfile.mkdtemp(prefix="sao-faults-")), random.Random(0)
    calm = undisturbed(root, STEPS)
    cells = []
    for scripted, kills in ((True, args.scripted), (False, args.real)):
        for kind in KINDS if kills else ():
            cell = killed(kind, kills, rng, root, scripted=scripted, steps=STEPS)
            if scripted:
                cell["bit_equal"] = weights(root / f"scripted-{kind}") == weights(calm)
            print(
                {k: cell[k] for k in ("kind", "engine", "kills", "exit", "closes", "lost", "doubled", "orphans")}, cell.get("bit_equal"), flush=True
            )
            cells.append(cell)
    bad = sum(c["kills"] < (args.scripted if c["engine"] == "scripted" else args.real) for c in cells)
    bad += sum(c["lost"] + c["doubled"] + c["orphans"] + (c["exit"] != 0) + (not c["closes"]) + (not c.get("bit_equal", True)) for c in cells)
    write_result(
        "faults_lost_or_doubled", "prompts lost or trained twice, orphans, failed runs and unequal weights after kill -9 of each part", bad, 0,
        higher_is_better=False, values=[bad], detail={"cells": cells},
    )  # fmt: skip
    shutil.rmtree(root)


if __name__ == "__main__":
    main()
