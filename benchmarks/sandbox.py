"""Sandboxes: how long one takes to start, alone and beside a training run with 200 of them alive, and how many attacks succeed.

A start is the whole way of a client: a new sandbox and the end of its first command, /bin/true.
`--only idle|training|attacks` measures one of the three.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from common import ROOT, counters, write_result

from sao.sandbox.client import RemoteSandbox, Sandboxes
from sao.sandbox.protocol import SandboxSpec

IDS = ["sandbox_start_ms_median", "sandbox_start_ms_p95_training", "sandbox_attacks_succeeded"]
IDLE_STARTS = 500
ALIVE = 200
TRAINING_STARTS = 400  # after the 200 are there, each replacing one of them
BETWEEN_S = 0.1
TRAINING = ["experiment=demo", "train.steps=100000", "run.progress=plain", "logger.report=false", "eval.at_end=false"]
ATTACKS = "tests/integration/test_sandbox_attacks.py"


async def start(sandboxes: Sandboxes) -> tuple[RemoteSandbox, float]:
    """A sandbox, and the milliseconds until its first command had ended."""
    began = time.perf_counter()
    sandbox = await sandboxes.create(SandboxSpec())
    result = await sandbox.exec(["/bin/true"])
    took = (time.perf_counter() - began) * 1000
    assert result.rc == 0, result
    return sandbox, took


async def with_daemon(measure: Callable[[Sandboxes], Awaitable[Any]]) -> Any:
    sandboxes = Sandboxes("bwrap", key=f"benchmark {os.getpid()}")
    await sandboxes.start()
    try:
        return await measure(sandboxes)
    finally:
        await sandboxes.end()


async def idle_starts(sandboxes: Sandboxes) -> list[float]:
    taken = []
    for _ in range(IDLE_STARTS):
        sandbox, took = await start(sandboxes)
        taken.append(took)
        await sandbox.close()
    return taken


async def starts_among_many(sandboxes: Sandboxes) -> list[float]:
    """With ALIVE sandboxes that each run a command, one is replaced every BETWEEN_S."""
    alive: list[tuple[RemoteSandbox, asyncio.Task[Any]]] = []

    async def add() -> float:
        sandbox, took = await start(sandboxes)
        alive.append((sandbox, asyncio.create_task(sandbox.exec(["/bin/sleep", "600"], timeout_s=600.0))))
        return took

    for _ in range(ALIVE):
        await add()
    taken = []
    for _ in range(TRAINING_STARTS):
        due = asyncio.create_task(asyncio.sleep(BETWEEN_S))
        taken.append(await add())
        sandbox, task = alive.pop(0)
        await sandbox.close()
        await asyncio.gather(task, return_exceptions=True)
        await due
    return taken


def p95(values: list[float]) -> float:
    return sorted(values)[int(0.95 * len(values))]


def measure_idle() -> None:
    taken = asyncio.run(with_daemon(idle_starts))
    write_result(
        "sandbox_start_ms_median",
        "milliseconds until a new bubblewrap sandbox has run its first command, idle machine, median",
        statistics.median(taken),
        10.0,
        higher_is_better=False,
        values=taken,
        detail={"p95": p95(taken), "starts": len(taken), "load_1m": os.getloadavg()[0]},
    )


def measure_training() -> None:
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        training = subprocess.Popen([sys.executable, "-m", "sao.cli", "train", *TRAINING, f"run.dir={run}"], cwd=ROOT)
        try:
            before = wait_for_steps(run, 3, training)
            taken = asyncio.run(with_daemon(starts_among_many))
            after = steps(run)
            assert training.poll() is None, "the training run ended"
        finally:
            training.terminate()
            training.wait(120)
        found = counters(run)
    write_result(
        "sandbox_start_ms_p95_training",
        f"the same beside a training run of the demo with {ALIVE} sandboxes alive, 95th percentile",
        p95(taken),
        50.0,
        higher_is_better=False,
        values=taken,
        detail={"median": statistics.median(taken), "starts": len(taken), "alive": ALIVE, "steps_meanwhile": after - before, "run": found},
    )


def steps(run: Path) -> int:
    metrics = run / "metrics.jsonl"
    lines = metrics.read_text().splitlines() if metrics.exists() else []
    return sum(json.loads(line).get("axis") == "train" for line in lines if line.endswith("}"))


def wait_for_steps(run: Path, wanted: int, training: subprocess.Popen[bytes]) -> int:
    deadline = time.monotonic() + 600
    while (done := steps(run)) < wanted:
        if training.poll() is not None or time.monotonic() > deadline:
            raise SystemExit("the training run did not get going")
        time.sleep(0.5)
    return done


def measure_attacks() -> None:
    """The tests are the attacks; one that fails has succeeded."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        subprocess.run([sys.executable, "-m", "pytest", ATTACKS, "-m", "", f"--junitxml={report}"], cwd=ROOT, check=False)
        cases = list(ElementTree.parse(report).getroot().iter("testcase"))
    succeeded = [case.get("name") for case in cases if case.find("failure") is not None or case.find("error") is not None]
    skipped = [case.get("name") for case in cases if case.find("skipped") is not None]
    tried = len(cases) - len(skipped)
    if not tried:
        raise SystemExit("no attack was tried; is bubblewrap installed?")
    write_result(
        "sandbox_attacks_succeeded",
        f"attacks on the bubblewrap and Landlock levels that got anywhere, of {tried} tests; 1,000 sandboxes in a row leave no process among them",
        float(len(succeeded)),
        0.0,
        higher_is_better=False,
        values=[float(case.get("name") in succeeded) for case in cases],
        detail={"tried": [case.get("name") for case in cases], "succeeded": succeeded, "skipped": skipped},
    )


def main() -> None:
    parts = {"idle": measure_idle, "training": measure_training, "attacks": measure_attacks}
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", choices=parts, help="one of the three")
    only = parser.parse_args().only
    for name, measure in parts.items():
        if only in (None, name):
            measure()


if __name__ == "__main__":
    main()
