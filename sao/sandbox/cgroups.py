"""Memory and process limits by cgroup v2, where this process may write to one that has the controllers; a container often may not."""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from sao.sandbox.protocol import MiB, SandboxSpec

CONTROLLERS = {"memory", "pids"}


@dataclass(frozen=True)
class Group:
    path: Path

    def enter(self, chain: Sequence[str]) -> list[str]:
        """The chain, begun by a shell that puts itself into the group: nothing of it ever runs outside."""
        return ["/bin/sh", "-c", 'echo $$ > "$0" && exec "$@"', str(self.path / "cgroup.procs"), *chain]

    def remove(self) -> bool:
        """Kill what is left and remove the group. Whether the kernel had killed one of its processes for memory."""
        try:
            events = dict(line.split() for line in (self.path / "memory.events").read_text().splitlines())
        except OSError:
            events = {}
        with contextlib.suppress(OSError):
            (self.path / "cgroup.kill").write_text("1")
        with contextlib.suppress(OSError):  # still dying: removed by the next sweep
            self.path.rmdir()
        return int(events.get("oom_kill", 0)) > 0


class Cgroups:
    """Groups below `base`, whose children have the controllers."""

    def __init__(self, base: Path) -> None:
        self.base = base

    def make(self, spec: SandboxSpec) -> Group:
        """Raises OSError."""
        group = Group(self.base / f"sao-{secrets.token_hex(8)}")
        group.path.mkdir()
        (group.path / "memory.max").write_text(str(spec.memory_mb * MiB))
        (group.path / "pids.max").write_text(str(spec.processes + 3))  # bwrap's two and setpriv's moment
        for name, value in (("memory.swap.max", "0"), ("memory.oom.group", "1")):
            with contextlib.suppress(OSError):
                (group.path / name).write_text(value)
        return group

    def sweep(self) -> None:
        """Remove groups whose processes had not quite ended."""
        for path in self.base.glob("sao-*"):
            with contextlib.suppress(OSError):
                path.rmdir()


def writable(mounts: str, membership: str) -> tuple[Cgroups | None, str]:
    """Groups below our own cgroup, or None and why. mounts, membership: /proc/self/mountinfo and /proc/self/cgroup."""
    roots = [line.split()[4] for line in mounts.splitlines() if " - cgroup2 " in line]
    own = next((line[3:] for line in membership.splitlines() if line.startswith("0::")), None)
    if not roots or own is None:
        return None, "no cgroup v2 is mounted"
    base = Path(roots[0]) / own.lstrip("/")
    try:
        missing = CONTROLLERS - set((base / "cgroup.controllers").read_text().split())
        if missing:
            return None, f"cgroup v2 has no {' and '.join(sorted(missing))} controller here"
        if not set((base / "cgroup.subtree_control").read_text().split()) >= CONTROLLERS:
            (base / "cgroup.subtree_control").write_text("+memory +pids")
        probe = base / f"sao-{os.getpid()}"
        probe.mkdir()
        probe.rmdir()
    except OSError as error:
        return None, f"cgroup v2 cannot be written ({error.strerror})"
    return Cgroups(base), "cgroup v2"
