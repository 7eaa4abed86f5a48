"""Sandboxes made of processes of this machine: the work that bwrap, landlock and subprocess share."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import re
import signal
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from sao.errors import SandboxFailure
from sao.sandbox import files, kernel
from sao.sandbox.box import SECCOMP_FD, STATUS_FD, Box, Slots
from sao.sandbox.cgroups import Cgroups
from sao.sandbox.children import Children, Output, input_file, kill
from sao.sandbox.protocol import Capabilities, Entry, ExecResult, FileAccess, MiB, SandboxSpec
from sao.sandbox.stragglers import end_stragglers
from sao.sandbox.watchdog import Watchdog, Watched

FLOOD = 16 << 20  # bytes a command may print before it is killed for it
SETTLE_S = 2.0  # between a command's end and that of the last process that holds its output
HELPER_LIMIT_S = 60.0
# With the attributes of a repository of its own, so that neither .git, attributes nor hooks of the workspaces, a and b, have a say.
DIFF = """set -e
export GIT_DIR="$PWD/own" HOME=/nonexistent GIT_CONFIG_NOSYSTEM=1 GIT_CONFIG_GLOBAL=/dev/null
if [ -n "$(find a b ! -type f ! -type d ! -type l -print -quit)" ]; then echo "it holds FIFOs, sockets or devices"; exit 3; fi
git init --quiet --bare "$GIT_DIR"
git config core.bare false
mkdir -p "$GIT_DIR/info"
echo '* -text -filter -ident !diff !eol !working-tree-encoding' > "$GIT_DIR/info/attributes"
GIT_WORK_TREE="$PWD" git diff --no-index --binary --no-renames --no-ext-diff --no-textconv --no-color --no-prefix a b || [ $? -eq 1 ]
"""
COPY = "cp -R -P --preserve=mode,timestamps,links a/. b/ && chown -hR {uid}:{uid} b/."


class Level(Protocol):
    """How strongly a command is confined."""

    @property
    def name(self) -> str: ...

    @property
    def degraded(self) -> Sequence[str]:
        """What it does not enforce, in words."""
        ...

    @property
    def kills_tree(self) -> bool:
        """Whether all that a command started ends with its first process."""
        ...

    def command(self, box: Box, argv: Sequence[str], environment: Mapping[str, str], *, address_space: bool, user_tasks: int) -> list[str]:
        """The program that runs `argv` in the sandbox. address_space: bound it per process. user_tasks: threads that run under the sandbox's uid anyway."""
        ...

    def helper(self, script: str, base: Box, box: Box, *, writes: bool) -> list[str]:
        """The program that runs a script of ours where `base` is the directory a, to read, and `box` the directory b, which it may write to if it `writes`."""
        ...

    def seccomp(self, spec: SandboxSpec) -> bytes | None:
        """The filter its program expects on SECCOMP_FD; None: it takes none."""
        ...

    def began(self, status: bytes) -> bool:
        """Whether what its program wrote to STATUS_FD says that the command itself ran."""
        ...


class LocalBackend:
    """Boxes in one directory of this node, commands started by this process."""

    def __init__(self, level: Level, directory: str, *, first_uid: int | None, sized: bool, cgroups: Cgroups | None) -> None:
        """first_uid: of the range from which each sandbox gets one; None: all run under ours.

        sized: workspaces are tmpfs of this process's own mount namespace; otherwise plain directories under a watchdog.
        """
        self.level, self.directory, self.sized, self.cgroups = level, Path(directory), sized, cgroups
        self.children = Children()
        self.watchdog = Watchdog(memory=cgroups is None, disk=not sized)
        self.slots = None if first_uid is None else Slots(first_uid)
        self._filters: dict[bytes, Path] = {}

    async def start(self) -> None:
        self.children.watch()
        self._watching = asyncio.create_task(self.watchdog.run())

    @property
    def capabilities(self) -> Capabilities:
        memory = "cgroup v2" if self.cgroups else "address space of each process, watchdog over their sum"
        return Capabilities(self.level.name, memory, tuple(self.level.degraded))

    async def create(self, box_id: str, spec: SandboxSpec, owner: dict[str, int | None]) -> Box:
        box = Box(box_id, spec, owner, str(self.directory / box_id), self.slots.take() if self.slots else None)
        try:
            box.make(sized=self.sized)
        except OSError as error:
            await self.close(box)
            raise SandboxFailure(f"no workspace for a sandbox in {self.directory}: {error}") from error
        return box

    async def close(self, box: Box) -> None:
        """Its commands have ended."""
        if self.sized:
            with contextlib.suppress(OSError):  # not mounted: `create` had failed
                kernel.unmount(box.root)
            with contextlib.suppress(OSError):
                os.rmdir(box.root)
        else:
            _, ended = self.children.spawn(["/bin/sh", "-c", 'chmod -R u+rwX "$0"; exec rm -rf "$0"', box.root], {})
            await ended
        if self.slots and box.uid is not None:
            self.slots.give_back(box.uid)

    async def exec(
        self, box: Box, argv: Sequence[str], timeout_s: float, output_bytes: int, stdin: bytes, environment: Mapping[str, str]
    ) -> ExecResult:
        user_tasks = 0 if box.uid is not None else self.watchdog.user_tasks()
        chain = self.level.command(box, argv, environment, address_space=self.cgroups is None, user_tasks=user_tasks)
        return await self._run(box, chain, timeout_s, output_bytes, stdin)

    async def read(self, box: Box, path: str, limit: int) -> bytes:
        return files.read(box.work, path, limit)

    async def write(self, box: Box, path: str, data: bytes, executable: bool) -> None:
        if len(data) > box.spec.disk_mb * MiB:
            raise FileAccess(f"{path}: {os.strerror(errno.ENOSPC)}")
        files.write(box.work, path, data, owner=box.uid, executable=executable)

    async def entries(self, box: Box, path: str) -> list[Entry]:
        return files.listing(box.work, path)

    async def fork(self, base: Box, box: Box) -> None:
        """Copy the workspace of `base` into that of `box`, which is new."""
        script = COPY.replace("{uid}", str(os.getuid() if box.uid is None else box.uid))
        result = await self._run(box, self.level.helper(script, base, box, writes=True), HELPER_LIMIT_S, 4096)
        if result.rc:
            raise SandboxFailure(f"a workspace could not be copied ({result.killed_by or result.rc}): {result.text.strip()[-300:]}")

    async def diff(self, box: Box, base: Box, limit: int) -> bytes:
        result = await self._run(box, self.level.helper(DIFF, base, box, writes=False), HELPER_LIMIT_S, limit)
        if result.truncated:
            raise FileAccess(f"the workspaces differ by more than {limit} bytes")
        if result.rc:
            raise FileAccess(f"the workspaces cannot be compared ({result.killed_by or result.rc}): {result.text.strip()[-300:]}")
        return _as_patch(result.out)

    def _filter(self, spec: SandboxSpec) -> int | None:
        """A fresh descriptor of the filter, since who reads it reads on from where the descriptor stands."""
        code = self.level.seccomp(spec)
        if code is None:
            return None
        if code not in self._filters:
            path = self.directory / f"filter-{len(self._filters)}.bpf"
            path.write_bytes(code)
            self._filters[code] = path
        return os.open(self._filters[code], os.O_RDONLY | os.O_CLOEXEC)

    async def _run(self, box: Box, chain: list[str], timeout_s: float, output_bytes: int, stdin: bytes = b"") -> ExecResult:
        """Start a chain and see it to its end. Raises SandboxFailure when it ended before the command had begun."""
        started = time.monotonic()
        over: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        group = self.cgroups.make(box.spec) if self.cgroups else None
        if group:
            chain = group.enter(chain)
        status_read, status_write = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        out_read, out_write = os.pipe2(os.O_CLOEXEC)
        output = Output(out_read, output_bytes, max(FLOOD, 2 * output_bytes), over)
        passed = {0: input_file(stdin), 1: out_write, 2: out_write, STATUS_FD: status_write}
        try:
            try:
                code = self._filter(box.spec)
                if code is not None:
                    passed[SECCOMP_FD] = code
                pid, ended = self.children.spawn(chain, passed)
            except OSError as error:
                if error.errno == errno.E2BIG:
                    return ExecResult(126, b"Argument list too long\n")
                raise SandboxFailure(f"{chain[0]} could not be started: {error.strerror}") from error
            finally:
                for descriptor in {*passed.values()}:
                    os.close(descriptor)
            verdict = await self._wait(box, pid, ended, over, timeout_s)
            await _settle(output)
            status = os.read(status_read, 4096) if verdict == "" else b""
        finally:
            output.close()
            os.close(status_read)
            out_of_memory = group.remove() if group else False
        code_ = ended.result()
        rc = 128 - code_ if code_ < 0 else code_
        if verdict == "" and not self.level.began(status):
            said = output.text().decode("utf-8", "replace").strip()[-300:]
            raise SandboxFailure(f"{self.level.name} did not start the command (exit code {rc}): {said}")
        verdict = verdict or ("memory" if out_of_memory else _cause(rc))
        return ExecResult(rc, output.text(), output.truncated, verdict == "timeout", verdict, time.monotonic() - started)

    async def _wait(self, box: Box, pid: int, ended: asyncio.Future[int], over: asyncio.Future[str], timeout_s: float) -> str:
        """Until the chain ended, in its own time ("") or killed, with the reason."""
        _die_first(pid)
        watched = Watched(box, pid, over)
        self.watchdog.add(watched)
        try:
            pending: set[asyncio.Future[Any]] = {ended, over}
            await asyncio.wait(pending, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
            verdict = "" if ended.done() else over.result() if over.done() else "timeout"
        finally:
            self.watchdog.remove(watched)
            if not self.level.kills_tree:
                end_stragglers(pid, box, self.children.known)
            if not ended.done():
                kill(pid)
        await asyncio.wait({ended}, timeout=SETTLE_S)
        if not ended.done():
            raise SandboxFailure(f"process {pid} of a sandbox does not end although it was killed ({verdict})")
        return verdict


def _as_patch(said: bytes) -> bytes:
    """What git says of two directories a and b, as it would of two states of one: both names in each header, and without the repository at the top.

    No line within a file's part begins like the next part does.
    """
    parts = []
    for part in re.split(rb"^(?=diff --git )", said, flags=re.MULTILINE):
        head, newline, rest = part.partition(b"\n")
        names = head.removeprefix(b"diff --git ")
        half = len(names) // 2
        before, after = re.sub(rb"^(\"?)b/", rb"\1a/", names[:half]), re.sub(rb"^(\"?)a/", rb"\1b/", names[half + 1 :])
        if part and not re.match(rb"\"?a/\.git/", before):
            parts.append(b"diff --git " + before + b" " + after + newline + rest)
    return b"".join(parts)


async def _settle(output: Output) -> None:
    """Until the last process that holds the output has ended, which the end of the first brings about."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(SETTLE_S):
            await output.ended.wait()


def _die_first(pid: int) -> None:
    """Should the machine run out of memory after all, let the kernel take a sandbox and not the trainer."""
    with contextlib.suppress(OSError):
        Path(f"/proc/{pid}/oom_score_adj").write_text("1000")


def _cause(rc: int) -> str:
    if rc == 128 + signal.SIGXCPU:
        return "cpu"
    if rc == 128 + signal.SIGXFSZ:
        return "disk"
    return "signal" if 128 < rc <= 128 + signal.SIGRTMAX else ""
