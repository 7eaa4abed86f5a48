"""A sweep hands on what asks it to stop, waits for the run's own end, and begins no other run after it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from sao import multirun

RUN = """
import signal, sys, time
asked = []
for number in (signal.SIGINT, signal.SIGTERM):
    signal.signal(number, lambda number, frame: asked.append(number))
print("ready", flush=True)
while not asked:
    time.sleep(0.02)
time.sleep(0.5)
print("checkpoint written", len(asked), flush=True)
sys.exit(130)
"""
SWEEP = "import sys; from sao.multirun import run_cell; sys.exit(run_cell([sys.executable, '-c', sys.argv[1]]))"


@pytest.mark.parametrize(("number", "group"), [(signal.SIGINT, True), (signal.SIGINT, False), (signal.SIGTERM, False)])
def test_a_run_is_asked_once_and_its_end_is_waited_for(number, group):
    sweep = subprocess.Popen([sys.executable, "-c", SWEEP, RUN], stdout=subprocess.PIPE, text=True, start_new_session=True)
    assert sweep.stdout is not None and sweep.stdout.readline() == "ready\n"
    (os.killpg if group else os.kill)(sweep.pid, number)
    assert sweep.communicate(timeout=20)[0] == "checkpoint written 1\n"
    assert sweep.returncode == 130


def test_a_run_that_a_signal_ended_was_stopped_too():
    end = "import os, signal; signal.signal(signal.SIGTERM, signal.SIG_DFL); os.kill(os.getpid(), signal.SIGTERM)"
    assert multirun.run_cell([sys.executable, "-c", end]) == 130
    assert multirun.run_cell([sys.executable, "-c", "raise SystemExit(3)"]) == 3


@pytest.mark.parametrize(("codes", "began", "returned"), [([0, 0, 0], 3, 0), ([0, 1, 0], 3, 1), ([0, 130], 2, 130)])
def test_the_runs_after_a_stopped_one_are_not_begun(monkeypatch, capsys, codes, began, returned):
    happened: list[str] = []
    left = list(codes)
    monkeypatch.setattr(multirun.sweeper, "start", lambda: happened.append("sweeper"))
    monkeypatch.setattr(multirun, "run_cell", lambda command: happened.append(command[-2]) or left.pop(0))
    assert multirun.run_sweep(["experiment=demo", "train.steps=1,2,3"]) == returned
    assert happened == ["sweeper", *(f"train.steps={i + 1}" for i in range(began))]
    said = capsys.readouterr().out
    assert ("stopped in run 2 of 3" in said) is (returned == 130) and (f"{codes.count(0)} of 3 runs ended well" in said) is (returned != 130)
