"""The demo's task through the gateway, over three seeds: the same warm start, an agent of the official openai client that brings its own tool."""

from __future__ import annotations

import argparse
import shutil
import statistics
import tempfile
from pathlib import Path
from typing import Any

import demo
from common import read_jsonl, sao, write_result

IDS = ["gateway_demo_accuracy"]


def run(folder: Path, seed: int, *overrides: str) -> dict[str, Any]:
    """One run, or what is already in its folder, from the warm start that the demo of this seed has."""
    if not (folder / "ledger.json").exists():
        start = ["model.warmstart=false", "model.factory=", f"model.path={demo.warm_start(seed)}"]
        sao("train", "experiment=gateway_demo", f"seed={seed}", *start, f"run.dir={folder}", "run.progress=plain", *overrides)
    steps = [record for record in read_jsonl(folder / "metrics.jsonl") if record["axis"] == "train"]
    gateway = {
        key: statistics.fmean(step.get(key, 0.0) for step in steps) for key in sorted({key for step in steps for key in step if "gateway/" in key})
    }
    return demo.read(folder, seed, overrides) | {"gateway": gateway}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--keep", type=Path, help="keep the run folders here, and use the finished ones that are there")
    parser.add_argument("--seeds", type=int, nargs="+", default=list(demo.SEEDS))
    parser.add_argument("--smoke", action="store_true", help="four steps of one seed, and no result: does it run at all?")
    args = parser.parse_args()
    root = args.keep or Path(tempfile.mkdtemp(prefix="sao-bench-"))
    if args.smoke:
        found = run(root / "smoke", 0, "train.steps=4", "critic.critic_only_steps=1", "eval.tasks=32")
        print(found["before"], found["after"], found["gateway"], found["counters"], sep="\n")
        return
    runs = [run(root / f"seed{seed}", seed) for seed in args.seeds]
    after = [found["after"]["t1"]["mean"] for found in runs]
    write_result(
        IDS[0], "held-out accuracy at temperature 1 after training an unmodified openai-client agent through the gateway, median of 3 seeds",
        statistics.median(after), 0.9, higher_is_better=True, values=after, detail={"runs": runs},
    )  # fmt: skip
    if args.keep is None:
        shutil.rmtree(root)


if __name__ == "__main__":
    main()
