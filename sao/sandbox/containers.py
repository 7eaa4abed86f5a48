"""Docker and podman: a container a sandbox, `exec` a command. What confines is the engine's; this adapter asks it for no capability, no network and limits.

The image decides what a command finds; the workspace lies in the container's own layer, so that what an image has elsewhere can be changed too.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import posixpath
import shutil
import time
from collections.abc import Mapping, Sequence
from typing import Any

from sao.errors import SandboxFailure
from sao.runtime.processes import identity, is_alive
from sao.sandbox.box import Box
from sao.sandbox.children import Output
from sao.sandbox.files import components
from sao.sandbox.local import FLOOD, SETTLE_S
from sao.sandbox.protocol import WORKSPACE, Capabilities, Entry, ExecResult, FileAccess, SandboxSpec

LABEL = "sao.daemon"
ENGINE_LIMIT_S = 60.0
NO_DISK_LIMIT = "the disk a container writes is bounded only where the engine's storage driver does it"
NO_DIFF = "workspaces cannot be compared (`diff`); run git inside"
ENGINE_FAILED = 125  # docker-run(1), podman-run(1): the error is the engine's own
READ = '[ -f "$1" ] && [ ! -L "$1" ] || exit 66; exec head -c "$2" -- "$1"'
WRITE = 'mkdir -p -- "$(dirname -- "$1")" && cat > "$1.$$" && chmod "$2" "$1.$$" && mv -fT -- "$1.$$" "$1"'
LIST = 'cd -- "$1" || exit 66; for name in .* *; do stat -c "%f %s %n" -- "$name" 2>/dev/null; done'
KINDS = {0o100000: "file", 0o040000: "directory", 0o120000: "symlink"}


class Containers:
    """The engine behind one command-line client. `box.root` is the container's name."""

    def __init__(self, engine: str) -> None:
        """Raises SandboxFailure when the client is not installed."""
        path = shutil.which(engine)
        if path is None:
            raise SandboxFailure(f"env.sandbox.backend={engine} needs {engine}, which this machine lacks")
        self.engine, self.path = engine, path
        mine = identity()
        self.label = f"{LABEL}={mine['pid']}.{mine['started']}"
        self.forks: dict[str, str] = {}  # container -> the image it was made from, its own

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(self.engine, "the engine's cgroup", (NO_DISK_LIMIT, NO_DIFF))

    async def start(self) -> None:
        """Remove the containers of daemons that are gone. Raises SandboxFailure when no engine answers."""
        rc, said = await self._run(["ps", "--all", "--filter", f"label={LABEL}", "--format", f'{{{{.ID}}}} {{{{.Label "{LABEL}"}}}}'])
        if rc:
            raise SandboxFailure(f"no engine answers {self.engine}: {said.decode(errors='replace').strip()[-200:]}")
        for line in said.decode().splitlines():
            container, _, owner = line.partition(" ")
            pid, _, started = owner.partition(".")
            if not is_alive({"pid": int(pid), "started": int(started)}):
                await self._run(["rm", "--force", "--volumes", container])

    def run_arguments(self, name: str, spec: SandboxSpec, image: str) -> list[str]:
        """What starts the container that commands are executed in; it ends by itself after the sandbox's time to live."""
        memory = f"{spec.memory_mb}m"
        arguments = ["run", "--detach", "--rm", "--init", "--pull", "never", "--name", name, "--label", self.label, "--hostname", "sandbox"]
        arguments += ["--network", "bridge" if spec.network else "none", "--cap-drop", "ALL", "--security-opt", "no-new-privileges"]
        arguments += ["--memory", memory, "--memory-swap", memory, "--pids-limit", str(spec.processes + 4), "--oom-score-adj", "1000"]
        arguments += ["--shm-size", f"{spec.disk_mb}m", "--tmpfs", f"/tmp:size={spec.disk_mb}m,mode=1777", "--workdir", WORKSPACE]
        arguments += ["--ulimit", "core=0", "--ulimit", "nofile=512", "--ulimit", f"cpu={spec.cpu_s}:{spec.cpu_s + 1}"]
        for path in spec.read_only:
            arguments += ["--volume", f"{path}:{path}:ro"]
        for variable, value in spec.environment.items():
            arguments += ["--env", f"{variable}={value}"]
        return [*arguments, "--entrypoint", "sleep", image, str(int(spec.ttl_s))]

    async def create(self, box_id: str, spec: SandboxSpec, owner: dict[str, int | None]) -> Box:
        return await self._create(box_id, spec, owner, spec.image)

    async def _create(self, box_id: str, spec: SandboxSpec, owner: dict[str, int | None], image: str) -> Box:
        if not image:
            raise SandboxFailure(f"env.sandbox.backend={self.engine} needs env.sandbox.image")
        box = Box(box_id, spec, owner, f"sao-{box_id}", None)
        rc, said = await self._run(self.run_arguments(box.root, spec, image))
        if rc:
            raise SandboxFailure(f"{self.engine} did not start a container of {image}: {said.decode(errors='replace').strip()[-300:]}")
        return box

    async def close(self, box: Box) -> None:
        await self._run(["rm", "--force", "--volumes", box.root])
        image = self.forks.pop(box.box_id, None)
        if image:
            await self._run(["rmi", "--force", image])

    async def exec(
        self, box: Box, argv: Sequence[str], timeout_s: float, output_bytes: int, stdin: bytes, environment: Mapping[str, str]
    ) -> ExecResult:
        started = time.monotonic()
        variables = [part for name, value in environment.items() for part in ("--env", f"{name}={value}")]
        over: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        out_read, out_write = os.pipe2(os.O_CLOEXEC)
        output = Output(out_read, output_bytes, max(FLOOD, 2 * output_bytes), over)
        arguments = ["exec", "--interactive", *variables, "--workdir", WORKSPACE, box.root, *argv]
        try:
            try:
                process = await asyncio.create_subprocess_exec(
                    self.path, *arguments, stdin=asyncio.subprocess.PIPE, stdout=out_write, stderr=out_write
                )
            except OSError as error:
                return ExecResult(126, f"{error.strerror}\n".encode())
            finally:
                os.close(out_write)
            ended = asyncio.ensure_future(process.communicate(stdin))
            try:
                pending: set[asyncio.Future[Any]] = {ended, over}
                await asyncio.wait(pending, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
                verdict = "" if ended.done() else over.result() if over.done() else "timeout"
            finally:
                await asyncio.shield(self._end_all(box))
                if not ended.done():
                    process.kill()
            await ended
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(output.ended.wait(), SETTLE_S)
        finally:
            output.close()
        rc = process.returncode if process.returncode is not None and process.returncode >= 0 else 137
        if not verdict and rc == ENGINE_FAILED:
            raise SandboxFailure(f"{self.engine} exec failed: {output.text().decode(errors='replace').strip()[-300:]}")
        killed_by = verdict or ("signal" if 128 < rc < 160 else "")
        return ExecResult(rc, output.text(), output.truncated, verdict == "timeout", killed_by, time.monotonic() - started)

    async def read(self, box: Box, path: str, limit: int) -> bytes:
        rc, data = await self._inside(box, READ, _absolute(path), str(limit))
        if rc:
            raise FileAccess(f"{path} is not a regular file that can be read")
        return data

    async def write(self, box: Box, path: str, data: bytes, executable: bool) -> None:
        rc, said = await self._inside(box, WRITE, _absolute(path), "755" if executable else "644", stdin=data)
        if rc:
            raise FileAccess(f"{path} cannot be written: {said.decode(errors='replace').strip()[-200:]}")

    async def entries(self, box: Box, path: str) -> list[Entry]:
        rc, said = await self._inside(box, LIST, _absolute(path))
        if rc:
            raise FileAccess(f"{path} is not a directory")
        found = []
        for line in said.decode(errors="replace").splitlines():
            mode, _, rest = line.partition(" ")
            size, _, name = rest.partition(" ")
            if name not in (".", ".."):
                found.append(Entry(name, KINDS.get(int(mode, 16) & 0o170000, "other"), int(size)))
        return sorted(found, key=lambda entry: entry.name)

    async def fork(self, base: Box, box: Box) -> None:
        """Replace the fresh container of `box` by one of an image of `base`."""
        image = f"sao-fork-{box.box_id}"
        rc, said = await self._run(["commit", "--pause", base.root, image])
        if rc:
            raise SandboxFailure(f"{self.engine} commit failed: {said.decode(errors='replace').strip()[-300:]}")
        self.forks[box.box_id] = image
        await self._run(["rm", "--force", "--volumes", box.root])
        await self._create(box.box_id, box.spec, box.owner, image)

    async def diff(self, box: Box, base: Box, limit: int) -> bytes:
        raise FileAccess(NO_DIFF)

    async def _end_all(self, box: Box) -> None:
        """Every process of the container but its first."""
        await self._run(["exec", "--user", "0", box.root, "sh", "-c", "kill -9 -1"])

    async def _inside(self, box: Box, script: str, *arguments: str, stdin: bytes = b"") -> tuple[int, bytes]:
        return await self._run(["exec", "--interactive", box.root, "sh", "-c", script, "sh", *arguments], stdin)

    async def _run(self, arguments: Sequence[str], stdin: bytes = b"") -> tuple[int, bytes]:
        """The client's exit code, and its stdout or, when it failed, its stderr. Raises SandboxFailure when it does not answer."""
        process = await asyncio.create_subprocess_exec(
            self.path, *arguments, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
        )
        try:
            async with asyncio.timeout(ENGINE_LIMIT_S):
                out, err = await process.communicate(stdin)
        except TimeoutError:
            process.kill()
            await process.wait()
            raise SandboxFailure(f"{self.engine} {arguments[0]} did not end within {ENGINE_LIMIT_S:g} s") from None
        return process.returncode or 0, err if process.returncode else out


def _absolute(path: str) -> str:
    return posixpath.join(WORKSPACE, *components(path))
