"""SWE tasks made of packages of the index: how many are verified, an evaluation of 50 end to end, and what training gains on packages never trained on.

--only make    bring the task repository to 210 tasks; stops after --minutes, the same command goes on
--only tasks   verify every task once more, in sandboxes of their own -> swe_tasks_verified
--only eval    50 tasks, half with the gold patch and half with one that mends nothing, 8 at once, killed once and taken up again -> printed, in detail of swe_tasks_verified
--only gain    sao train experiment=swe_edit, then held-out tasks before and after -> swe_heldout_gain
"""

from __future__ import annotations

import argparse
import asyncio
import json
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
from common import ROOT, counters, read_jsonl, sao, write_result

IDS = ["swe_tasks_verified", "swe_heldout_gain"]
REPO = ROOT / "runs" / "swe-tasks"
WORK = ROOT / "runs" / "swe-bench"
TASKS, PACKAGES, EVALUATED, PARALLEL = 200, 5, 50, 8
NOTE = "diff --git a/note.txt b/note.txt\nnew file mode 100644\n--- /dev/null\n+++ b/note.txt\n@@ -0,0 +1 @@\n+I could not find it.\n"


def make(minutes: float) -> None:
    sao("env", "make", "swe", "--to", str(REPO), "--tasks", "210", "--minutes", str(minutes), timeout_s=60 * minutes + 300)


def verify(minutes: float) -> None:
    """Grade gold and nothing for every task, again; resumable, a line a task."""
    from sao.sandbox.client import Sandboxes
    from sao.swe.grading import grade, grade_untouched
    from sao.swe.repo import SweTask, read_repo

    tasks = read_repo(REPO)
    WORK.mkdir(parents=True, exist_ok=True)
    file = WORK / "verified.jsonl"
    known = {row["id"]: row for row in read_jsonl(file)} if file.exists() else {}
    until = time.monotonic() + 60 * minutes

    async def all_of_them() -> None:
        boxes = Sandboxes("bwrap")
        await boxes.start()
        gate = asyncio.Semaphore(2)

        async def one(task: SweTask) -> None:
            async with gate:
                if time.monotonic() > until:
                    return
                gold, untouched = await grade(task, task.gold, boxes.create), await grade_untouched(task, boxes.create)
                row = {"id": task.instance_id, "package": task.package, "gold": gold.verdict, "untouched": untouched.verdict, "seconds": gold.seconds}
                known[task.instance_id] = row
                with file.open("a") as out:
                    out.write(json.dumps(row) + "\n")

        try:
            await asyncio.gather(*(one(task) for name, task in tasks.items() if name not in known))
        finally:
            await boxes.end()

    asyncio.run(all_of_them())
    rows = [known[name] for name in tasks if name in known]
    good = [row for row in rows if (row["gold"], row["untouched"]) == ("resolved", "unresolved")]
    print(f"{len(rows)} of {len(tasks)} tasks graded again, {len(good)} as they were when they were made", flush=True)
    if len(rows) < len(tasks):
        return
    packages = Counter(row["package"] for row in good)
    end_to_end = WORK / "evaluation.json"
    write_result(
        "swe_tasks_verified",
        f"tasks made of packages of the index ({len(packages)} packages), gold resolves and the untouched repository does not: when they were made, twice, and once more since",
        len(good),
        TASKS,
        higher_is_better=True,
        values=[len(good)],
        detail={
            "by_package": dict(packages.most_common()),
            "packages_bar": PACKAGES,
            "changed_since_made": sorted(row["id"] for row in rows if row not in good),
            "kinds": Counter(task.mutation["kind"] for task in tasks.values()),
            "candidates": Counter(row["outcome"] for row in read_jsonl(REPO / "tried.jsonl")),
            "test_run_seconds_median": float(np.median([row["seconds"] for row in rows])),
            "evaluation": json.loads(end_to_end.read_text()) if end_to_end.exists() else "not run (--only eval)",
        },
    )


def evaluate() -> None:
    """50 predictions end to end through the command; the first start is killed when some verdicts are there."""
    from sao.swe.repo import read_repo

    tasks = list(read_repo(REPO).values())[:: max(1, len(read_repo(REPO)) // EVALUATED)][:EVALUATED]
    WORK.mkdir(parents=True, exist_ok=True)
    file, out = WORK / "predictions.jsonl", WORK / f"evaluation-{int(time.time())}"
    with file.open("w") as lines:
        for number, task in enumerate(tasks):
            patch = task.gold.decode() if number % 2 == 0 else NOTE
            lines.write(json.dumps({"instance_id": task.instance_id, "model_name_or_path": "half", "model_patch": patch}) + "\n")
    ids = ",".join(task.instance_id for task in tasks)
    command = [sys.executable, "-m", "sao.cli", "eval", "swebench", f"repo={REPO}", f"predictions={file}", f"ids={ids}", f"out={out}"]
    command.append(f"parallel={PARALLEL}")
    started = time.monotonic()
    process = subprocess.Popen(command, cwd=ROOT)
    while process.poll() is None and not (out / "verdicts.jsonl").exists():
        time.sleep(0.1)
    while process.poll() is None and len(read_jsonl(out / "verdicts.jsonl")) < EVALUATED // 5:
        time.sleep(0.1)
    process.send_signal(signal.SIGKILL)
    process.wait()
    kept = len(read_jsonl(out / "verdicts.jsonl"))
    subprocess.run(command, cwd=ROOT, check=True, timeout=480)
    report = json.loads((out / "report.json").read_text())
    names = ("resolved_instances", "unresolved_instances", "error_instances", "empty_instances", "tampered_instances", "reasons")
    record = {"tasks": len(tasks), "gold_among_them": (len(tasks) + 1) // 2, "verdicts_before_the_kill": kept, "parallel": PARALLEL}
    record |= {"seconds": time.monotonic() - started, **{name: report[name] for name in names}}
    (WORK / "evaluation.json").write_text(json.dumps(record, indent=1) + "\n")
    print(json.dumps(record, indent=1))


def gain() -> None:
    """Held-out resolve rate of the warm start and of what a run made of it, on the same tasks of packages never trained on."""
    run = WORK / "gain"
    if not (run / "checkpoints" / "final").exists():
        sao("train", "experiment=swe_edit", f"run.dir={run}", "run.progress=plain", f"env.args.repo={REPO}", timeout_s=3000)
    before, after = (records(run, name) for name in ("before", "after"))
    low, high = after["low"] - before["high"], after["high"] - before["low"]
    value = after["mean"] - before["mean"]
    write_result(
        "swe_heldout_gain",
        "held-out resolve rate of one-line bugs at temperature 1, gain by sao train experiment=swe_edit; packages held out",
        value,
        0.05,
        higher_is_better=True,
        values=[low, value, high],
        interval=(low, high),
        detail={
            "before": before,
            "after": after,
            "interval": "after.low - before.high to after.high - before.low, wider than one of pairs",
            "counters": counters(run),
        },
    )


def records(run: Path, name: str) -> dict[str, Any]:
    found = [r for r in read_jsonl(run / "eval.jsonl") if r["eval"] == name and r["temperature"] == 1.0]
    return {key: found[-1][key] for key in ("mean", "low", "high", "n", "failed", "truncated")}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=["make", "tasks", "eval", "gain"])
    parser.add_argument("--minutes", type=float, default=7.5, help="of make and of tasks, which go on where they were")
    args = parser.parse_args()
    for name, part in {"make": lambda: make(args.minutes), "eval": evaluate, "tasks": lambda: verify(args.minutes), "gain": gain}.items():
        if args.only in (None, name):
            part()


if __name__ == "__main__":
    main()
