"""What asks sandboxd: any process of the node, any thread, any event loop."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from sao.errors import SandboxFailure
from sao.runtime.processes import identity
from sao.runtime.sweeper import MARK
from sao.sandbox.protocol import Capabilities, Entry, ExecResult, FileAccess, MiB, Sandbox, SandboxSpec
from sao.sandbox.wire import pack, receive

START_LIMIT_S = 60.0
ANSWER_LIMIT_S = 90.0  # beyond the time a command may take
DIFF_LIMIT = 16 * MiB
BOOTSTRAP = "import sys; given, sys.path[:] = sys.argv[1], sys.argv[2:]; from sao.sandbox.daemon import main; main(given)"
SHELL = "/bin/bash" if os.path.exists("/bin/bash") else "/bin/sh"


class Unavailable(SandboxFailure):
    """sandboxd cannot give what was asked for on this node. problem: why; mend: what to do about it."""

    def __init__(self, problem: str, mend: str) -> None:
        super().__init__(problem, mend)
        self.problem, self.mend = problem, mend

    def __str__(self) -> str:
        return f"{self.problem}; {self.mend}"


class Sandboxes:
    """Sandboxes of one backend on this node. Processes of one run share a daemon; the one that started it is its owner, so that it ends with the run."""

    def __init__(self, backend: str, key: str = "") -> None:
        """key: whose daemon; by default the run's, or this process's own outside a run."""
        key = key or os.environ.get(MARK, "") or f"process {os.getpid()}"
        name = hashlib.sha256(f"{key} {backend}".encode()).hexdigest()[:16]
        self.backend = backend
        self.directory = Path(tempfile.gettempdir()) / f"sao-sandbox-{os.getuid()}-{name}"

    async def start(self) -> Capabilities:
        """Start the daemon unless it runs, and say what it enforces. Raises Unavailable with the mend."""
        try:
            answer, _ = await self.ask({"ask": "hello"}, limit_s=START_LIMIT_S)
        except _NoDaemon:
            await asyncio.to_thread(self._start)
            answer, _ = await self.ask({"ask": "hello"}, limit_s=START_LIMIT_S)
        return Capabilities(**answer["capabilities"])

    async def create(self, spec: SandboxSpec) -> RemoteSandbox:
        request = {"ask": "create", "spec": asdict(spec), "owner": identity()}
        try:
            answer, _ = await self.ask(request)
        except _NoDaemon:
            await self.start()
            answer, _ = await self.ask(request)
        return RemoteSandbox(self, answer["box"], spec)

    async def end(self) -> None:
        """End the daemon and every sandbox of it."""
        with contextlib.suppress(SandboxFailure):
            await self.ask({"ask": "end"})

    async def ask(self, head: dict[str, Any], blob: bytes = b"", *, limit_s: float = ANSWER_LIMIT_S) -> tuple[dict[str, Any], bytes]:
        """One request. Raises SandboxFailure, FileAccess."""
        try:
            reader, writer = await asyncio.open_unix_connection(self.directory / "socket")
        except OSError as error:
            raise _NoDaemon(f"sandboxd does not run ({error.strerror})") from error
        try:
            async with asyncio.timeout(limit_s):
                writer.write(pack(head, blob))
                answer, data = await receive(reader)
        except TimeoutError:
            raise SandboxFailure(f"sandboxd did not answer {head['ask']} within {limit_s:g} s") from None
        except (asyncio.IncompleteReadError, ConnectionError) as error:
            raise SandboxFailure(f"sandboxd ended during {head['ask']}") from error
        finally:
            writer.close()
        if "error" in answer:
            raise (FileAccess if answer["error"] == "file" else SandboxFailure)(answer["message"])
        return answer, data

    def _start(self) -> None:
        given = json.dumps({"directory": str(self.directory), "backend": self.backend, "owner": identity()})
        search = [entry or os.getcwd() for entry in sys.path]
        with contextlib.suppress(FileExistsError):
            self.directory.mkdir(mode=0o700)
        if self.directory.stat().st_uid != os.getuid():
            raise Unavailable(f"{self.directory} belongs to another user", "remove it or set TMPDIR")
        with open(self.directory / "sandboxd.log", "ab") as said:
            process = subprocess.Popen(
                [sys.executable, "-c", BOOTSTRAP, given, *search],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=said,
                start_new_session=True,
            )
        assert process.stdout is not None
        _daemons.append(process)
        with process.stdout as stdout:
            line = stdout.readline()
        answer = json.loads(line) if line else {"error": "sandboxd ended while it started", "mend": f"see {self.directory}/sandboxd.log"}
        if "error" in answer:
            raise Unavailable(answer["error"], answer["mend"])


_daemons: list[subprocess.Popen[bytes]] = []  # kept, since whoever forgets a child cannot reap it


class _NoDaemon(SandboxFailure):
    """Nobody listens."""


class RemoteSandbox:
    """A `Sandbox` of this node's daemon; any process of the run may hold one."""

    def __init__(self, sandboxes: Sandboxes, box: str, spec: SandboxSpec) -> None:
        self.sandboxes, self.box, self.spec = sandboxes, box, spec

    async def exec(
        self,
        command: str | Sequence[str],
        *,
        timeout_s: float | None = None,
        output_kb: int | None = None,
        stdin: bytes = b"",
        environment: Mapping[str, str] | None = None,
    ) -> ExecResult:
        timeout_s = self.spec.timeout_s if timeout_s is None else timeout_s
        request = {
            "ask": "exec",
            "box": self.box,
            "argv": [SHELL, "-c", command] if isinstance(command, str) else list(command),
            "timeout_s": timeout_s,
            "output_bytes": (self.spec.output_kb if output_kb is None else output_kb) * 1024,
            "environment": dict(environment or {}),
        }
        answer, out = await self.sandboxes.ask(request, stdin, limit_s=timeout_s + ANSWER_LIMIT_S)
        return ExecResult(out=out, **answer)

    async def read(self, path: str, limit: int = MiB) -> bytes:
        _, data = await self._ask("read", path=path, limit=limit)
        return data

    async def write(self, path: str, data: bytes, *, executable: bool = False) -> None:
        await self._ask("write", data, path=path, executable=executable)

    async def entries(self, path: str = ".") -> list[Entry]:
        answer, _ = await self._ask("list", path=path)
        return [Entry(**entry) for entry in answer["entries"]]

    async def fork(self) -> RemoteSandbox:
        answer, _ = await self._ask("fork", owner=identity())
        return RemoteSandbox(self.sandboxes, answer["box"], self.spec)

    async def diff(self, base: Sandbox, limit: int = DIFF_LIMIT) -> bytes:
        if not isinstance(base, RemoteSandbox) or base.sandboxes.directory != self.sandboxes.directory:
            raise SandboxFailure("only sandboxes of the same daemon can be compared")
        _, patch = await self._ask("diff", base=base.box, limit=limit)
        return patch

    async def close(self) -> None:
        with contextlib.suppress(_NoDaemon):
            await self._ask("close")

    async def _ask(self, what: str, blob: bytes = b"", **about: Any) -> tuple[dict[str, Any], bytes]:
        return await self.sandboxes.ask({"ask": what, "box": self.box, **about}, blob)
