"""From the start of an installed `sao train` (warm start cached) to the first actor update acknowledged by an engine; run it on a quiet machine."""

from __future__ import annotations

import statistics
import tempfile
from pathlib import Path

from common import counters, read_jsonl, sao, write_result

IDS = ["first_step_seconds"]
REPEATS = 3


def main() -> None:
    sao("warmstart", "experiment=demo")
    times, counted = [], []
    with tempfile.TemporaryDirectory(prefix="sao-bench-") as root:
        for repeat in range(REPEATS):
            folder = Path(root) / f"run{repeat}"
            sao("train", "experiment=demo", "train.steps=2", "eval.at_end=false", f"run.dir={folder}", "run.progress=plain")
            times.append(next(r["perf/first_update_s"] for r in read_jsonl(folder / "metrics.jsonl") if "perf/first_update_s" in r))
            counted.append(counters(folder))
    write_result(
        "first_step_seconds",
        "from the start of `sao train` (warm start cached) to the first actor update acknowledged by an engine, median of 3",
        statistics.median(times),
        60,
        higher_is_better=False,
        values=times,
        detail={"seconds": times, "counters": counted},
    )


if __name__ == "__main__":
    main()
