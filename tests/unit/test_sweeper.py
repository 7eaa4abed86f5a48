"""Nothing a driver started outlives it by more than a moment, whichever way it dies."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest

DRIVER = """
import subprocess, sys, time
from sao.runtime import sweeper
{start}
detached = subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(60)"], start_new_session=True)
print(detached.pid, flush=True)
{end}
"""


def alive(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def orphan_of(start: str, end: str, kill: signal.Signals | None) -> int:
    driver = subprocess.Popen([sys.executable, "-c", DRIVER.format(start=start, end=end)], stdout=subprocess.PIPE, text=True)
    assert driver.stdout is not None
    orphan = int(driver.stdout.readline())
    if kill is not None:
        driver.send_signal(kill)
    driver.wait(20)
    return orphan


@pytest.mark.parametrize(
    ("end", "kill"),
    [("time.sleep(60)", signal.SIGKILL), ("time.sleep(60)", signal.SIGTERM), ("import os; os._exit(130)", None), ("raise SystemExit(0)", None)],
)
def test_a_detached_child_dies_with_its_driver(end, kill):
    orphan = orphan_of("sweeper.start()", end, kill)
    deadline = time.monotonic() + 5
    while alive(orphan) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not alive(orphan)


def test_without_the_sweeper_it_lives_on():
    orphan = orphan_of("", "time.sleep(60)", signal.SIGKILL)
    time.sleep(0.5)
    assert alive(orphan)
    os.kill(orphan, signal.SIGKILL)
