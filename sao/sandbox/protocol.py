"""What a sandbox is, whoever provides it: create, exec, read, write, entries, fork, diff, close.

A command that fails, hangs, floods or is killed for what it did is an `ExecResult`: the policy's doing, and part of the episode. A sandbox that could
not do its work is a `SandboxFailure`: the system's, typed and counted, never a reward.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

WORKSPACE = "/workspace"  # where a sandbox's files are, as its commands see it
MiB = 1 << 20


class FileAccess(Exception):
    """A path that cannot be read or written as asked; the sandbox itself is well, and the message may be shown to the policy."""


@dataclass(frozen=True)
class SandboxSpec:
    """The limits of one sandbox (`env.sandbox.*`), and what it may see.

    memory_mb: of all its processes together. disk_mb: of everything it can write, /tmp and /dev/shm included. processes: at once, threads included.
    cpu_s: of one process. timeout_s, output_kb: of one command, where `exec` does not say otherwise. network: the host's own, loopback included.
    read_only: host paths mounted where they are. environment: variables of every command. image: for docker and podman.
    ttl_s: seconds without a command after which an abandoned sandbox is closed.
    """

    memory_mb: int = 1024
    disk_mb: int = 256
    processes: int = 64
    cpu_s: int = 60
    timeout_s: float = 30.0
    output_kb: int = 64
    network: bool = False
    read_only: Sequence[str] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    image: str = ""
    ttl_s: float = 3600.0


@dataclass(frozen=True)
class ExecResult:
    """How a command ended.

    rc: its exit code, 128 + signal when a signal ended it. out: stdout and stderr as they came, at most `output_kb`: when more was written the middle is
    missing and says how much (`truncated`). killed_by: "" or what ended it: timeout, memory, disk, output, cpu, signal. seconds: wall clock.
    """

    rc: int
    out: bytes
    truncated: bool = False
    timed_out: bool = False
    killed_by: str = ""
    seconds: float = 0.0

    @property
    def text(self) -> str:
        return self.out.decode("utf-8", "replace")


@dataclass(frozen=True)
class Entry:
    """One name in a directory. kind: file, directory, symlink or other. size: bytes of a file."""

    name: str
    kind: str
    size: int


@dataclass(frozen=True)
class Capabilities:
    """What a level enforces on this machine. `degraded` names, in words, what it does not; empty for the full level."""

    backend: str
    memory: str  # how memory is bounded: cgroup, or rlimit and watchdog
    degraded: Sequence[str] = ()


class Sandbox(Protocol):
    """One sandbox. Paths are relative to the workspace, or absolute below it. Every method raises SandboxFailure when the sandbox is gone or cannot serve."""

    async def exec(
        self,
        command: str | Sequence[str],
        *,
        timeout_s: float | None = None,
        output_kb: int | None = None,
        stdin: bytes = b"",
        environment: Mapping[str, str] | None = None,
    ) -> ExecResult:
        """Run a shell script (str) or a program (argv) in the workspace, and wait for its end; whatever it leaves running ends with it.

        Each command is a fresh process tree: files stay, processes, variables and the working directory do not. Cancelling kills it.
        """
        ...

    async def read(self, path: str, limit: int = MiB) -> bytes:
        """A regular file, at most `limit` bytes of it. Raises FileAccess for a missing path, a link, a FIFO or a directory, whatever the sandbox planted there."""
        ...

    async def write(self, path: str, data: bytes, *, executable: bool = False) -> None:
        """Create or replace a file; directories on the way are made. Raises FileAccess where a link is on the way or the sandbox is full."""
        ...

    async def entries(self, path: str = ".") -> list[Entry]:
        """A directory by name, at most 10,000 entries. Raises FileAccess."""
        ...

    async def fork(self) -> Sandbox:
        """Another sandbox of the same spec with a copy of the workspace: a snapshot, when nothing is run in it."""
        ...

    async def diff(self, base: Sandbox) -> bytes:
        """What `base` lacks, as `git diff --binary` would say it, whatever repositories the workspaces hold; .git at the top is left out."""
        ...

    async def close(self) -> None:
        """Kill what runs and remove what it wrote. Once is enough; more does no harm."""
        ...
