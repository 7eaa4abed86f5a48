"""Which process is which: a pid is used again, and the wall clock may jump."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import sys
from pathlib import Path

PR_SET_PDEATHSIG = 1


def started_ticks(pid: int) -> int | None:
    """When a process began, in clock ticks since the machine started; None when it is gone. Unlike a time of day, no change of the clock moves it."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    # The second field is the program's name in parentheses and may hold anything, parentheses and spaces included.
    return int(text.rpartition(")")[2].split()[19])


def identity() -> dict[str, int | None]:
    """This process: its pid and when it began."""
    return {"pid": os.getpid(), "started": started_ticks(os.getpid())}


def is_alive(identity: dict[str, int | None]) -> bool:
    """Whether the process of that `identity` still runs, and not another one under its pid."""
    pid = identity.get("pid")
    return pid is not None and identity.get("started") is not None and started_ticks(pid) == identity["started"]


def kernel_oom_kills() -> int:
    """Processes the kernel has killed for lack of memory since the machine (or its container's memory group) started; 0 where it does not say."""
    found = 0
    for path in ("/proc/vmstat", "/sys/fs/cgroup/memory.events"):
        try:
            lines = Path(path).read_text().splitlines()
        except OSError:
            continue
        found = max(found, *(int(line.split()[1]) for line in lines if line.startswith("oom_kill ")), 0)
    return found


def die_with_parent() -> None:
    """Called by a child: the kernel kills it when the thread that started it ends, and it ends at once if that has happened. Linux alone can do so.

    A pool's process otherwise waits for work for ever when its parent is killed: it holds both ends of the pipe it reads.
    """
    if sys.platform != "linux":
        return
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    parent = multiprocessing.parent_process()
    if parent is not None and os.getppid() != parent.pid:
        os._exit(1)
