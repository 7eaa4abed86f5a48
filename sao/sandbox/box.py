"""One sandbox as sandboxd keeps it: where it lives on the host, under which uid, and for whom."""

from __future__ import annotations

import asyncio
import os
import time
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sao.errors import SandboxFailure
from sao.sandbox import kernel
from sao.sandbox.protocol import WORKSPACE, SandboxSpec

SECCOMP_FD, STATUS_FD = 3, 4  # what a level's first program finds there: the filter to load, and where to say that the command began
FIRST_UID = 200_000
SLOTS = 4096  # sandboxes of one node at once


@dataclass
class Box:
    """`root` is one sized file system: work, tmp and shm are all a sandbox can write. uid: of its processes; None: ours, as everything runs under it."""

    box_id: str
    spec: SandboxSpec
    owner: dict[str, int | None]
    root: str
    uid: int | None
    used: float = field(default_factory=time.monotonic)
    tasks: set[asyncio.Task[Any]] = field(default_factory=set)  # requests that are about it

    @property
    def work(self) -> str:
        return f"{self.root}/work"

    @property
    def tmp(self) -> str:
        return f"{self.root}/tmp"

    @property
    def shm(self) -> str:
        return f"{self.root}/shm"

    @property
    def passwd(self) -> str:
        return f"{self.root}/etc/passwd"

    @property
    def group(self) -> str:
        return f"{self.root}/etc/group"

    def make(self, *, sized: bool) -> None:
        """Create the directories. sized: on a tmpfs of `disk_mb` and so many inodes that names alone cannot fill the memory; needs a mount namespace of ours."""
        os.mkdir(self.root, 0o711)
        if sized:
            kernel.mount_tmpfs(self.root, self.spec.disk_mb + 1, 4096 + 128 * self.spec.disk_mb)
        uid = os.getuid() if self.uid is None else self.uid
        for path, mode in ((self.work, 0o755), (self.tmp, 0o1777), (self.shm, 0o1777), (f"{self.root}/etc", 0o755)):
            os.mkdir(path)
            os.chmod(path, mode)
        if self.uid is not None:
            os.chown(self.work, uid, uid)
        Path(self.passwd).write_text(f"sandbox:x:{uid}:{uid}::{WORKSPACE}:/bin/sh\n")
        Path(self.group).write_text(f"sandbox:x:{uid}:\n")


class Slots:
    """uids for sandboxes. One that was given back comes round last, so that whatever still dies under it is gone."""

    def __init__(self, first: int) -> None:
        self._free = deque(range(first, first + SLOTS))

    def take(self) -> int:
        if not self._free:
            raise SandboxFailure(f"all {SLOTS} sandboxes of this node are in use")
        return self._free.popleft()

    def give_back(self, uid: int) -> None:
        self._free.append(uid)


def first_uid(uid_map: str, pid: int) -> int | None:
    """The first of SLOTS uids that no other daemon of this machine uses; None where this user namespace maps too few. uid_map: of /proc/self.

    A process limit counts per uid, so two daemons must not share any: each takes the range that its pid names.
    """
    mapped = max((int(first) + int(count) for first, _, count in (line.split() for line in uid_map.splitlines())), default=0)
    ranges = (min(mapped, 2**32 - 1) - FIRST_UID) // SLOTS
    if ranges > 0:
        return FIRST_UID + pid % ranges * SLOTS
    return mapped - SLOTS if mapped >= 65536 else None
