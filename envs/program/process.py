"""One agent program as a process: started by a keeper of its own, its output capped, everything it started ended with it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from sao.errors import EnvironmentFailure

KEEPER = Path(__file__).with_name("keeper.py")
OUTPUT_BYTES = 256 * 1024  # of standard output that are kept, from its beginning
ERROR_BYTES = 2048  # of standard error that are kept, from its end
END_S = 5.0  # for the keeper to end what is left
# Of the worker's environment, what a program needs to run at all. Keys to anything else are none of its business.
PASSED = ("PYTHONPATH", "LANG", "LC_ALL", "LC_CTYPE", "TZ", "TMPDIR", "VIRTUAL_ENV", "LD_LIBRARY_PATH", "SSL_CERT_FILE", "SAO_RUN_MARK")


def search_path() -> str:
    """PATH of a program: `python` is the one that runs here."""
    return os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])


async def run_command(command: Sequence[str], directory: Path, variables: Mapping[str, str]) -> str:
    """Run a program in `directory` and return its standard output. Raises EnvironmentFailure with the end of its standard error when it exits non-zero.

    Cancelling ends the program and whatever it has started.
    """
    environment = (
        {name: os.environ[name] for name in PASSED if name in os.environ} | {"PATH": search_path(), "HOME": str(directory)} | dict(variables)
    )
    keeper = await asyncio.create_subprocess_exec(
        sys.executable,
        "-I",
        "-S",
        str(KEEPER),
        *command,
        cwd=directory,
        env=environment,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    assert keeper.stdout is not None and keeper.stderr is not None
    try:
        output, errors, code = await asyncio.gather(_head(keeper.stdout), _tail(keeper.stderr), keeper.wait())
    finally:
        await _end(keeper)
    if code:
        said = errors.decode(errors="replace").strip()
        raise EnvironmentFailure(f"{command[0]} ended with exit code {code}" + (f": {said}" if said else ""))
    return output.decode(errors="replace")


async def _end(keeper: asyncio.subprocess.Process) -> None:
    """Have the keeper end what is left; one that does not is ended itself, and its program with it."""
    if keeper.returncode is not None:
        return
    assert keeper.stdin is not None
    keeper.stdin.close()
    try:
        async with asyncio.timeout(END_S):
            await keeper.wait()
    except TimeoutError:
        with contextlib.suppress(ProcessLookupError):
            keeper.kill()


async def _head(stream: asyncio.StreamReader) -> bytes:
    kept = b""
    while part := await stream.read(65536):
        kept += part[: OUTPUT_BYTES - len(kept)]
    return kept


async def _tail(stream: asyncio.StreamReader) -> bytes:
    kept = b""
    while part := await stream.read(65536):
        kept = (kept + part)[-ERROR_BYTES:]
    return kept
