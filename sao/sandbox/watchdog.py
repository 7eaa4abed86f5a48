"""What no resource limit bounds by itself: the memory of all processes of a command together and, outside a sized file system, the disk.

One look at /proc serves every command that runs. The time between looks follows their cost, so that they take a twentieth of one core at most.
"""

from __future__ import annotations

import asyncio
import math
import os
import stat
import time
from collections import defaultdict
from dataclasses import dataclass

from sao.sandbox.box import Box
from sao.sandbox.protocol import MiB

SHORTEST_S, LONGEST_S = 0.05, 0.5
SHARE = 20  # seconds between looks for each second a look takes
PAGE = os.sysconf("SC_PAGE_SIZE")


@dataclass(eq=False)
class Watched:
    """One command that runs: its first process, and the verdict, which ends the wait for it."""

    box: Box
    pid: int
    over: asyncio.Future[str]


class Watchdog:
    def __init__(self, *, memory: bool, disk: bool) -> None:
        """memory: no cgroup bounds it. disk: workspaces lie in plain directories."""
        self.memory, self.disk = memory, disk
        self._tasks, self._counted = 0, -math.inf
        self._watched: set[Watched] = set()
        self._wake = asyncio.Event()

    def add(self, watched: Watched) -> None:
        self._watched.add(watched)
        self._wake.set()

    def remove(self, watched: Watched) -> None:
        self._watched.discard(watched)

    def user_tasks(self) -> int:
        """Threads of this user, counted again once a second: a run starts hundreds after its first sandbox."""
        if time.monotonic() - self._counted > 1.0:
            self._tasks, self._counted = count_tasks(), time.monotonic()
        return self._tasks

    async def run(self) -> None:
        pause = SHORTEST_S
        while True:
            if not self._watched:
                self._wake.clear()
                await self._wake.wait()
            await asyncio.sleep(pause)  # first: most commands have ended by then
            started = time.monotonic()
            self._look()
            pause = min(LONGEST_S, max(SHORTEST_S, SHARE * (time.monotonic() - started)))

    def _look(self) -> None:
        resident = resident_below({watched.pid for watched in self._watched}) if self.memory else {}
        for watched in self._watched:
            spec = watched.box.spec
            if resident.get(watched.pid, 0) > spec.memory_mb * MiB:
                verdict = "memory"
            elif self.disk and written(watched.box.root, spec.disk_mb * MiB) > spec.disk_mb * MiB:
                verdict = "disk"
            else:
                continue
            if not watched.over.done():
                watched.over.set_result(verdict)


def _processes() -> dict[int, tuple[int, int]]:
    """Every process: its parent, and its resident bytes."""
    found = {}
    for name in os.listdir("/proc"):
        if not name.isdigit():
            continue
        try:
            with open(f"/proc/{name}/stat", "rb") as file:
                fields = file.read().rpartition(b")")[2].split()
        except OSError:
            continue
        found[int(name)] = int(fields[1]), int(fields[21]) * PAGE
    return found


def resident_below(roots: set[int]) -> dict[int, int]:
    """Resident bytes of each root's process tree. Daemons are in it: their new parent is the sandbox's own first process."""
    processes = _processes()
    children: dict[int, list[int]] = defaultdict(list)
    for pid, (parent, _) in processes.items():
        children[parent].append(pid)
    totals = {}
    for root in roots:
        total, pending = 0, [root]
        while pending:
            pid = pending.pop()
            total += processes.get(pid, (0, 0))[1]
            pending += children[pid]
        totals[root] = total
    return totals


def count_tasks() -> int:
    """Threads of this user, which is what RLIMIT_NPROC counts."""
    uid, total = os.getuid(), 0
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                if os.stat(f"/proc/{name}").st_uid == uid:
                    total += os.stat(f"/proc/{name}/task").st_nlink - 2
            except OSError:
                continue
    return total


def written(root: str, enough: int) -> int:
    """Bytes on disk below `root`, a directory counted as a block; stops once there are more than `enough`. Follows no link."""
    total, pending = 0, [root]
    while pending and total <= enough:
        try:
            entries = list(os.scandir(pending.pop()))
        except OSError:
            continue
        for entry in entries:
            try:
                about = entry.stat(follow_symlinks=False)
            except OSError:
                continue
            total += max(about.st_blocks * 512, 4096)
            if stat.S_ISDIR(about.st_mode):
                pending.append(entry.path)
    return total
