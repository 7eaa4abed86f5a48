"""sandboxd: the one process of a node that starts sandboxes, reaps them, and takes them with it when it ends.

It belongs to the process that started it and ends with that one, however it ends; a sandbox belongs to the process that asked for it and is closed when
that one is gone. Clients come and go, one connection a request; a client that hangs up cancels what it asked for.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import glob
import json
import logging
import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any, Protocol

from sao.errors import SandboxFailure, UserError
from sao.runtime.processes import is_alive
from sao.sandbox import kernel, levels
from sao.sandbox.box import Box
from sao.sandbox.containers import Containers
from sao.sandbox.protocol import Capabilities, Entry, ExecResult, FileAccess, SandboxSpec
from sao.sandbox.wire import pack, receive

log = logging.getLogger("sandboxd")

SOCKET, ALIVE, LOG = "socket", "alive", "sandboxd.log"
SWEEP_S = 1.0
IDLE_S = 600.0  # without a sandbox and without a request
ORPHANED_S = 60.0  # age at which a directory without a living daemon is removed
LOWEST_FD = 10  # below it are the numbers that a command's descriptors get


class Backend(Protocol):
    @property
    def capabilities(self) -> Capabilities: ...
    async def start(self) -> None: ...
    async def create(self, box_id: str, spec: SandboxSpec, owner: dict[str, int | None]) -> Any: ...
    async def close(self, box: Any) -> None: ...
    async def exec(self, box: Any, argv: list[str], timeout_s: float, output_bytes: int, stdin: bytes, environment: dict[str, str]) -> ExecResult: ...
    async def read(self, box: Any, path: str, limit: int) -> bytes: ...
    async def write(self, box: Any, path: str, data: bytes, executable: bool) -> None: ...
    async def entries(self, box: Any, path: str) -> list[Entry]: ...
    async def fork(self, base: Any, box: Any) -> None: ...
    async def diff(self, box: Any, base: Any, limit: int) -> bytes: ...


class Daemon:
    """The sandboxes of one node and the requests about them."""

    def __init__(self, backend: Backend) -> None:
        self.backend = backend
        self.boxes: dict[str, Box] = {}
        self.asked = time.monotonic()
        self.ended = asyncio.Event()
        self.requests: dict[str, Callable[[dict[str, Any], bytes], Awaitable[tuple[dict[str, Any], bytes]]]] = {
            "hello": self._hello,
            "create": self._create,
            "exec": self._exec,
            "read": self._read,
            "write": self._write,
            "list": self._list,
            "fork": self._fork,
            "diff": self._diff,
            "close": self._close,
            "end": self._end,
        }

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One connection."""
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            head, blob = await receive(reader)
            work = asyncio.create_task(self._answer(head, blob))
            gone = asyncio.create_task(reader.read(1))
            try:
                await asyncio.wait({work, gone}, return_when=asyncio.FIRST_COMPLETED)
                if not work.done():
                    work.cancel()
                writer.write(pack(*await work))
                await writer.drain()
            finally:
                gone.cancel()
        writer.close()

    async def _answer(self, head: dict[str, Any], blob: bytes) -> tuple[dict[str, Any], bytes]:
        self.asked = time.monotonic()
        try:
            return await self.requests[head.pop("ask")](head, blob)
        except FileAccess as error:
            return {"error": "file", "message": str(error)}, b""
        except SandboxFailure as error:
            return {"error": "sandbox", "message": str(error)}, b""
        except asyncio.CancelledError:
            return {"error": "sandbox", "message": "the sandbox was closed meanwhile"}, b""
        except Exception as error:
            log.exception("a request failed")
            return {"error": "sandbox", "message": f"sandboxd failed with {type(error).__name__}: {error}"}, b""

    def _box(self, head: dict[str, Any], key: str = "box") -> Box:
        box = self.boxes.get(head[key])
        if box is None:
            raise SandboxFailure(f"there is no sandbox {head[key]}; it was closed, or its daemon ended")
        box.used = time.monotonic()
        return box

    @contextlib.asynccontextmanager
    async def _busy(self, *boxes: Box) -> Any:
        """The boxes are in use by this task, which ends when one of them is closed."""
        task = asyncio.current_task()
        assert task is not None
        for box in boxes:
            box.tasks.add(task)
        try:
            yield
        finally:
            for box in boxes:
                box.tasks.discard(task)
                box.used = time.monotonic()

    async def _hello(self, head: dict[str, Any], blob: bytes) -> tuple[dict[str, Any], bytes]:
        return {"capabilities": asdict(self.backend.capabilities), "boxes": len(self.boxes), "pid": os.getpid()}, b""

    async def _new(self, spec: SandboxSpec, owner: dict[str, int | None]) -> Box:
        box: Box = await self.backend.create(secrets.token_hex(8), spec, owner)
        self.boxes[box.box_id] = box
        return box

    async def _create(self, head: dict[str, Any], blob: bytes) -> tuple[dict[str, Any], bytes]:
        known = {field.name for field in fields(SandboxSpec)}
        box = await self._new(SandboxSpec(**{name: value for name, value in head["spec"].items() if name in known}), head["owner"])
        return {"box": box.box_id}, b""

    async def _exec(self, head: dict[str, Any], blob: bytes) -> tuple[dict[str, Any], bytes]:
        box = self._box(head)
        argv, environment = head["argv"], head["environment"]
        if any("\0" in text for text in [*argv, *environment, *environment.values()]) or not argv:
            return _result(ExecResult(126, b"a command must have a name and no NUL byte\n"))
        async with self._busy(box):
            return _result(await self.backend.exec(box, argv, head["timeout_s"], head["output_bytes"], blob, environment))

    async def _read(self, head: dict[str, Any], blob: bytes) -> tuple[dict[str, Any], bytes]:
        return {}, await self.backend.read(self._box(head), head["path"], head["limit"])

    async def _write(self, head: dict[str, Any], blob: bytes) -> tuple[dict[str, Any], bytes]:
        await self.backend.write(self._box(head), head["path"], blob, head["executable"])
        return {}, b""

    async def _list(self, head: dict[str, Any], blob: bytes) -> tuple[dict[str, Any], bytes]:
        return {"entries": [asdict(entry) for entry in await self.backend.entries(self._box(head), head["path"])]}, b""

    async def _fork(self, head: dict[str, Any], blob: bytes) -> tuple[dict[str, Any], bytes]:
        base = self._box(head)
        box = await self._new(base.spec, head["owner"])
        try:
            async with self._busy(base, box):
                await self.backend.fork(base, box)
        except BaseException:
            await self.close(box)
            raise
        return {"box": box.box_id}, b""

    async def _diff(self, head: dict[str, Any], blob: bytes) -> tuple[dict[str, Any], bytes]:
        box, base = self._box(head), self._box(head, "base")
        async with self._busy(box, base):
            return {}, await self.backend.diff(box, base, head["limit"])

    async def _close(self, head: dict[str, Any], blob: bytes) -> tuple[dict[str, Any], bytes]:
        if head["box"] in self.boxes:
            await self.close(self.boxes[head["box"]])
        return {}, b""

    async def _end(self, head: dict[str, Any], blob: bytes) -> tuple[dict[str, Any], bytes]:
        self.ended.set()
        return {}, b""

    async def close(self, box: Box) -> None:
        """End what runs in it, and remove it. The caller's own task excepted, which may be one of its commands."""
        if self.boxes.pop(box.box_id, None) is None:
            return
        running = box.tasks - {asyncio.current_task()}
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        await self.backend.close(box)

    async def sweep(self) -> None:
        """Close what nobody will close: sandboxes whose owner is gone, and those nobody used for their time to live."""
        while True:
            await asyncio.sleep(SWEEP_S)
            now = time.monotonic()
            for box in list(self.boxes.values()):
                abandoned = not is_alive(box.owner)
                if abandoned or (not box.tasks and now - box.used > box.spec.ttl_s):
                    log.info("closing %s: %s", box.box_id, "its owner is gone" if abandoned else "unused for its time to live")
                    await self.close(box)
            if not self.boxes and now - self.asked > IDLE_S:
                self.ended.set()

    async def finish(self) -> None:
        for box in list(self.boxes.values()):
            await self.close(box)


def _result(result: ExecResult) -> tuple[dict[str, Any], bytes]:
    head = asdict(result)
    return head, head.pop("out")


async def _self_test(backend: Backend) -> None:
    """One sandbox and one command, before anybody relies on them."""
    box = await backend.create("self-test", SandboxSpec(disk_mb=8), {})
    try:
        result = await backend.exec(box, ["/bin/sh", "-c", "echo well > file && cat file"], 20.0, 4096, b"", {})
    finally:
        await backend.close(box)
    if result.rc or result.out != b"well\n":
        raise SandboxFailure(f"a first command failed with exit code {result.rc}: {result.text.strip()[-300:]}")


def _sweep_directories(mine: Path) -> None:
    """Remove what daemons that were killed have left behind."""
    for found in glob.glob(f"{mine.parent}/{mine.name.rpartition('-')[0]}-*"):
        path = Path(found)
        try:
            if path == mine or path.stat().st_uid != os.getuid() or time.time() - path.stat().st_mtime < ORPHANED_S:
                continue
            with open(path / ALIVE, "a") as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                subprocess.run(["/bin/rm", "-rf", found], stderr=subprocess.DEVNULL, check=False)
        except OSError:
            continue


async def run(backend: Backend, directory: Path, owner: dict[str, int | None], say: Callable[[dict[str, Any]], None]) -> None:
    """Serve until the owner ends, somebody says so, or nobody has asked for long."""
    daemon = Daemon(backend)
    loop = asyncio.get_running_loop()
    await backend.start()
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        loop.add_signal_handler(number, daemon.ended.set)
    pid = owner["pid"]
    assert pid is not None
    watched = os.pidfd_open(pid)
    if not is_alive(owner):
        return
    loop.add_reader(watched, daemon.ended.set)
    if not isinstance(backend, Containers):  # an engine needs an image, which comes with the first sandbox
        await _self_test(backend)
    with contextlib.suppress(FileNotFoundError):
        os.unlink(directory / SOCKET)
    os.umask(0o077)  # of the socket: whoever can connect can ask
    server = await asyncio.start_unix_server(daemon.serve, directory / SOCKET, backlog=1024)
    os.umask(0o022)
    sweeping = asyncio.create_task(daemon.sweep())
    say({"ready": True})
    ended = asyncio.create_task(daemon.ended.wait())
    await asyncio.wait({ended, sweeping}, return_when=asyncio.FIRST_COMPLETED)
    server.close()
    with contextlib.suppress(FileNotFoundError):
        os.unlink(directory / SOCKET)
    sweeping.cancel()
    await daemon.finish()


def main(arguments: str) -> None:
    """arguments: JSON with directory, backend and owner. Says one line of JSON on stdout: ready, or the error."""
    given = json.loads(arguments)
    directory, owner = Path(given["directory"]), given["owner"]
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s", stream=sys.stderr)
    while os.open(os.devnull, os.O_RDWR) < LOWEST_FD:
        continue
    answer = os.fdopen(os.dup(1), "w")
    os.dup2(LOWEST_FD, 1)

    def say(line: dict[str, Any]) -> None:
        answer.write(json.dumps(line) + "\n")
        answer.close()

    os.umask(0o022)
    directory.mkdir(exist_ok=True)
    directory.chmod(0o711)  # a uid of its own has to reach its workspace, and may not look around
    alive = os.open(directory / ALIVE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)  # locked for as long as this process lives
    try:
        fcntl.flock(alive, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        say({"ready": True})  # another got there first
        return
    left = [str(path) for path in directory.iterdir() if path.name not in (ALIVE, LOG)]  # of a daemon of the same name that was killed
    subprocess.run(["/bin/rm", "-rf", *left], check=False)
    _sweep_directories(directory)
    try:
        kernel.become_subreaper()
        backend = levels.make(given["backend"], str(directory))
        asyncio.run(run(backend, directory, owner, say))
    except (UserError, SandboxFailure, OSError) as error:
        if answer.closed:
            raise
        say({"error": str(error)[:500], "mend": levels.mend(given["backend"], str(error))})
        sys.exit(1)
    finally:
        subprocess.run(["/bin/rm", "-rf", str(directory)], check=False)
