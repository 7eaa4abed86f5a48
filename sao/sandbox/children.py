"""Starting commands, hearing of their end and taking what they print: all on sandboxd's one thread.

The one thread matters: a sandbox dies with the thread that started it (PR_SET_PDEATHSIG), and this one lives as long as the daemon.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import signal
from collections.abc import Mapping, Sequence

F_ADD_SEALS, SEALS = 1033, 0x0F  # linux/fcntl.h: seal, shrink, grow, write
CHUNK = 1 << 16
PER_TURN = 8  # chunks of one command before others have their turn


class Children:
    """The daemon's children, orphans it inherits as a subreaper included: all are reaped, those it started are waited for."""

    def __init__(self) -> None:
        self._waiting: dict[int, asyncio.Future[int]] = {}

    def watch(self) -> None:
        asyncio.get_running_loop().add_signal_handler(signal.SIGCHLD, self._reap)

    def spawn(self, argv: Sequence[str], descriptors: Mapping[int, int]) -> tuple[int, asyncio.Future[int]]:
        """Start a program with an empty environment and just these descriptors, {its: ours}; ours must all be above its. Returns pid and exit code.

        Raises OSError (E2BIG for a command line that is too long).
        """
        actions = [(os.POSIX_SPAWN_DUP2, ours, its) for its, ours in descriptors.items()]
        pid = os.posix_spawn(argv[0], list(argv), {}, file_actions=actions, setsid=True, setsigmask=(), setsigdef=(signal.SIGPIPE, signal.SIGINT))
        self._waiting[pid] = asyncio.get_running_loop().create_future()
        return pid, self._waiting[pid]

    @property
    def known(self) -> set[int]:
        """Those it started and that have not ended: every other child is an orphan."""
        return set(self._waiting)

    def _reap(self) -> None:
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            ended = self._waiting.pop(pid, None)
            if ended is not None and not ended.done():
                ended.set_result(os.waitstatus_to_exitcode(status))


class Output:
    """What a command prints, read as it comes and kept to `cap` bytes: the first half and the last. Beyond `flood` bytes the verdict `over` is "output".

    Takes over `descriptor`.
    """

    def __init__(self, descriptor: int, cap: int, flood: int, over: asyncio.Future[str]) -> None:
        self._descriptor, self._cap, self._flood, self._over = descriptor, cap, flood, over
        self._head, self._tail = bytearray(), bytearray()
        self.total = 0
        self.ended = asyncio.Event()
        os.set_blocking(descriptor, False)
        asyncio.get_running_loop().add_reader(descriptor, self._read)

    def _read(self) -> None:
        for _ in range(PER_TURN):
            try:
                chunk = os.read(self._descriptor, CHUNK)
            except BlockingIOError:
                return
            if not chunk:
                self.close()
                return
            self._keep(chunk)

    def _keep(self, chunk: bytes) -> None:
        self.total += len(chunk)
        room = self._cap // 2 - len(self._head)
        if room > 0:
            self._head += chunk[:room]
            chunk = chunk[room:]
        self._tail += chunk
        keep = self._cap - self._cap // 2
        if len(self._tail) > 2 * keep + CHUNK:
            del self._tail[:-keep]
        if self.total > self._flood and not self._over.done():
            self._over.set_result("output")

    @property
    def truncated(self) -> bool:
        return self.total > self._cap

    def text(self) -> bytes:
        if not self.truncated:
            return bytes(self._head + self._tail)
        keep = self._cap - self._cap // 2
        missing = self.total - len(self._head) - keep
        return bytes(self._head) + f"\n[... {missing} bytes not shown ...]\n".encode() + bytes(self._tail[-keep:])

    def close(self) -> None:
        if not self.ended.is_set():
            asyncio.get_running_loop().remove_reader(self._descriptor)
            os.close(self._descriptor)
            self.ended.set()


def input_file(data: bytes) -> int:
    """A descriptor that reads `data`, and that whoever holds it cannot make grow."""
    if not data:
        return os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
    descriptor = os.memfd_create("stdin", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    with open(os.dup(descriptor), "wb") as file:
        file.write(data)
    os.lseek(descriptor, 0, os.SEEK_SET)
    fcntl.fcntl(descriptor, F_ADD_SEALS, SEALS)
    return descriptor


def kill(pid: int) -> None:
    """pid: a child that was not reaped, so the number cannot be another's."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
