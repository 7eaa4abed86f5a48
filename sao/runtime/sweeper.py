"""Ends what a run leaves behind, however its driver dies.

A driver that is killed with SIGKILL cannot clean up, and some of Ray's processes outlive it. So a small process of its own session waits for the
driver's end and then kills every process that carries the run's mark in its environment; whatever the driver starts inherits the mark.

Run as a script, this file imports nothing but the standard library: it has to be up before Ray is.
"""

import os
import select
import signal
import subprocess
import sys
import time
import uuid

MARK = "SAO_RUN_MARK"
PATIENCE_S = 5.0


_mark = ""  # this process's own; one in its environment is that of whoever started it


def start() -> None:
    """Mark whatever this process will start, and have its end watched; once is enough."""
    global _mark
    if _mark:
        return
    _mark = mark = uuid.uuid4().hex
    os.environ[MARK] = mark
    subprocess.Popen(
        [sys.executable, "-S", os.path.abspath(__file__), str(os.getpid()), mark],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        start_new_session=True,
    )


def marked(mark: str) -> list[int]:
    """Processes that carry the mark, this one excepted. What `environ` shows is what a process was started with."""
    wanted, found = f"{MARK}={mark}".encode(), []
    for name in os.listdir("/proc"):
        if not name.isdigit() or int(name) == os.getpid():
            continue
        try:
            with open(f"/proc/{name}/environ", "rb") as file:
                if wanted in file.read().split(b"\0"):
                    found.append(int(name))
        except OSError:
            continue
    return found


def sweep(mark: str) -> None:
    """Kill until nothing is left; a process may start another while it is looked for."""
    deadline = time.monotonic() + PATIENCE_S
    while (left := marked(mark)) and time.monotonic() < deadline:
        for pid in left:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        time.sleep(0.05)


def wait_for_end(pid: int) -> None:
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    while not poll.poll():
        continue


if __name__ == "__main__":
    for ignored in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(ignored, signal.SIG_IGN)
    wait_for_end(int(sys.argv[1]))
    sweep(sys.argv[2])
