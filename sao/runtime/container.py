"""What a memory group (a container, a SLURM job) leaves to its processes; psutil reports the whole machine."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path("/sys/fs/cgroup")
MEMBERSHIP = Path("/proc/self/cgroup")


class MemoryGroup(NamedTuple):
    """limit: bytes the group may use. room: bytes of it still free, file cache that the kernel would give up included."""

    limit: int
    room: int


def memory_groups(root: Path = ROOT, membership: Path = MEMBERSHIP) -> Iterator[MemoryGroup]:
    """The groups this process lives in that have a limit (cgroup versions 1 and 2), from its own outwards; none on a bare machine."""
    try:
        lines = membership.read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            yield from _limits(root, path, ("memory.max", "memory.current", "inactive_file"))
        elif "memory" in controllers.split(","):
            yield from _limits(root / "memory", path, ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"))


def _limits(root: Path, path: str, names: tuple[str, str, str]) -> Iterator[MemoryGroup]:
    """A container may not see its own path but only the root, where its own files then lie: what cannot be read is passed over."""
    limit_name, used_name, cache_name = names
    own = root / path.lstrip("/")
    for folder in [own, *own.parents]:
        if not folder.is_relative_to(root):
            return
        try:
            limit, used = int((folder / limit_name).read_text()), int((folder / used_name).read_text())
            statistics = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
        except (OSError, ValueError):  # ValueError: the word `max`
            continue
        yield MemoryGroup(limit, max(0, limit - used + int(statistics.get(cache_name, 0))))
