"""What the adapter makes of a process that is not what it should be; verifiers itself is played by tests/conventions."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from sao.environments import verifiers
from sao.environments.verifiers import VerifiersEnvironment
from sao.errors import ConfigError, EnvironmentFailure


def program(folder: Path, text: str) -> str:
    """An executable that reads one request and then does `text`."""
    script = folder / "python"
    script.write_text(f"#!/bin/sh\nread request\n{text}\n")
    script.chmod(0o755)
    return str(script)


def test_an_interpreter_that_prints_of_its_own_is_refused_at_the_door(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"printed 'Welcome' of its own; name an interpreter itself as env\.args\.python"):
        VerifiersEnvironment.check_args(taskset="any", python=program(tmp_path, "echo Welcome"))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("echo Welcome; exec sleep 60", "said b'Welcome.*' in place of an answer and was ended"),
        ("echo '[1]'; exec sleep 60", "in place of an answer and was ended"),
        ("head -c 4096 /dev/zero; exec sleep 60", "gave an answer over 0 MiB and was ended"),
        ("exit 3", "that plays verifiers tasksets ended"),
    ],
)
def test_a_process_that_says_anything_else_fails_its_episodes_at_once(text: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verifiers, "MOST_BYTES", 1024)

    async def episode() -> None:
        try:
            async with asyncio.timeout(20):
                server = await verifiers._server(program(tmp_path, text))
                await server.ask("load")
        finally:
            await VerifiersEnvironment.shutdown()

    with pytest.raises(EnvironmentFailure, match=said):
        asyncio.run(episode())
