"""Starting runs, killing parts of them, and looking at what is left; shared by the fault tests and `benchmarks/faults.py`."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import psutil

from sao.report.store import read_columns, stored_steps
from sao.runtime.processes import is_alive
from tests.system.scripted_run import WITHOUT, options

ROOT = Path(__file__).resolve().parents[2]
FOLDER_MARK = "SAO_TEST_FOLDER"  # in the environment of everything a run of these tests starts


class Run:
    """One `sao train` as a process of its own."""

    def __init__(self, arguments: list[str], folder: Path, *, scripted: bool, log: Path, without: str = "") -> None:
        """without: a guard to leave out (`tests.system.scripted_run.GUARDS`), to see that its absence shows."""
        module = "tests.system.scripted_run" if scripted else "sao.cli"
        self.folder = folder
        self.log = log
        command = [sys.executable, "-m", module, "train", *arguments]
        environment = os.environ | {FOLDER_MARK: str(folder), WITHOUT: without, "PYTHONPATH": str(ROOT)}
        with open(log, "a") as out:
            self.process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=out, stderr=subprocess.STDOUT)

    def pid(self, actor: str) -> int | None:
        """The pid `actors.json` names, when that process lives."""
        try:
            entry = json.loads((self.folder / "actors.json").read_text())[actor]
            return entry["pid"] if is_alive(entry) else None
        except (OSError, ValueError, KeyError):
            return None

    def kill(self, actor: str, number: signal.Signals = signal.SIGKILL) -> bool:
        """Kill an actor, or the driver; false when it was not there."""
        pid = self.process.pid if actor == "driver" else self.pid(actor)
        if pid is None:
            return False
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            return False
        return True

    def step(self) -> int:
        """Batches trained so far, by metrics.jsonl."""
        try:
            lines = (self.folder / "metrics.jsonl").read_text().splitlines()
        except OSError:
            return 0
        rows = [json.loads(line) for line in lines if line.endswith("}")]
        return max((int(row["step"]) + 1 for row in rows if row["axis"] == "train"), default=0)

    def wait_for_step(self, step: int, timeout_s: float = 300) -> None:
        deadline = time.monotonic() + timeout_s
        while self.step() < step:
            if self.process.poll() is not None or time.monotonic() > deadline:
                raise AssertionError(f"the run stands at step {self.step()}, not {step}:\n{self.log.read_text()[-3000:]}")
            time.sleep(0.1)

    def wait(self, timeout_s: float = 600) -> int:
        return self.process.wait(timeout_s)


def undisturbed(root: Path, steps: int) -> Path:
    """The folder of a scripted run to compare others with, made to its end in `root`."""
    folder = root / "calm"
    run = Run([*options(root, steps=steps), f"run.dir={folder}"], folder, scripted=True, log=root / "calm.log")
    assert run.wait() == 0, run.log.read_text()[-3000:]
    return folder


def marked_processes(folder: Path) -> list[int]:
    """Living processes that runs in `folder` have started."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.status() != psutil.STATUS_ZOMBIE and process.environ().get(FOLDER_MARK) == str(folder):
                found.append(process.pid)
        except psutil.Error:
            continue
    return found


def gone_within(folder: Path, seconds: float) -> list[int]:
    """Processes still there after so long; empty is good."""
    deadline = time.monotonic() + seconds
    while (left := marked_processes(folder)) and time.monotonic() < deadline:
        time.sleep(0.1)
    return left


def end(folder: Path) -> None:
    """Kill whatever runs in `folder` have left."""
    for pid in marked_processes(folder):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def account(folder: Path) -> dict[str, Any]:
    """What the surviving lineage trained: prompts trained twice (an episode, or a task under two episodes), steps without a file, the ledger's own word."""
    table = read_columns(folder, columns=("episode_ordinal", "task_id", "segment"))
    rows = [(o, t) for o, t, s in zip(*(table[name].to_pylist() for name in table.column_names), strict=True) if s <= 0]
    ordinals, tasks = Counter(ordinal for ordinal, _ in rows), Counter(task for _, task in set(rows))
    ledger = json.loads((folder / "ledger.json").read_text())
    steps = stored_steps(folder)
    prompts = ledger["prompts"]
    return {
        "closes": ledger["closes"],
        "doubled": sum(count > 1 for counts in (ordinals, tasks) for count in counts.values()),
        "lost": prompts["submitted"] - prompts["trained"] - sum(prompts["dropped"].values()),
        "trained": prompts["trained"],
        "trained_by_store": len(ordinals),
        "dropped": prompts["dropped"],
        "retried": prompts["retried"],
        "steps": len(steps),
        "steps_missing": len(set(range(max(steps, default=-1) + 1)) - set(steps)),
        "tokens": ledger["tokens"],
    }


def weights(folder: Path) -> bytes:
    return b"".join((folder / "checkpoints" / "final" / part / "model.safetensors").read_bytes() for part in ("policy", "critic"))
