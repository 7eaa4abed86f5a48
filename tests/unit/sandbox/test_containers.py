"""The adapters' contract with docker and podman: what they are asked, and what their answers become. With an engine, see the last test."""

from __future__ import annotations

import asyncio
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from sao.errors import SandboxFailure
from sao.sandbox.containers import Containers
from sao.sandbox.protocol import FileAccess, SandboxSpec

SPEC = SandboxSpec(memory_mb=300, disk_mb=20, processes=9, cpu_s=7, image="python:3.12-slim", read_only=["/data"], environment={"A": "b c"}, ttl_s=99)


@pytest.fixture(params=["docker", "podman"])
def engine(request, tmp_path, monkeypatch):
    fake = tmp_path / "bin" / request.param
    fake.parent.mkdir()
    fake.write_text(Path(__file__).with_name("fake_engine.py").read_text().replace("/usr/bin/env python3", sys.executable, 1))
    fake.chmod(0o755)
    (tmp_path / "work").mkdir()
    monkeypatch.setenv("PATH", f"{fake.parent}:/usr/bin:/bin")
    monkeypatch.setenv("FAKE_LOG", str(tmp_path / "log"))
    monkeypatch.setenv("FAKE_WORK", str(tmp_path / "work"))
    return Containers(request.param)


def asked(tmp_path):
    return [json.loads(line) for line in (tmp_path / "log").read_text().splitlines()]


def test_a_container_has_no_rights_no_network_and_limits(engine, tmp_path):
    box = asyncio.run(engine.create("ab12", SPEC, {}))
    (run,) = asked(tmp_path)
    assert run == [
        "run", "--detach", "--rm", "--init", "--pull", "never", "--name", "sao-ab12", "--label", engine.label, "--hostname", "sandbox",
        "--network", "none", "--cap-drop", "ALL", "--security-opt", "no-new-privileges", "--memory", "300m", "--memory-swap", "300m",
        "--pids-limit", "13", "--oom-score-adj", "1000", "--shm-size", "20m", "--tmpfs", "/tmp:size=20m,mode=1777", "--workdir", "/workspace",
        "--ulimit", "core=0", "--ulimit", "nofile=512", "--ulimit", "cpu=7:8", "--volume", "/data:/data:ro", "--env", "A=b c",
        "--entrypoint", "sleep", "python:3.12-slim", "99",
    ]  # fmt: skip
    assert box.root == "sao-ab12" and "bridge" in engine.run_arguments("x", SandboxSpec(network=True), "i")


def test_commands_files_and_their_refusals(engine, tmp_path):
    async def use():
        box = await engine.create("ab12", SPEC, {})
        result = await engine.exec(box, ["/bin/sh", "-c", "cat; echo $0 >&2; exit 3"], 10, 4096, b"input ", {"X": "y"})
        assert (result.rc, result.out, result.killed_by) == (3, b"input /bin/sh\n", "")
        timed = await engine.exec(box, ["/bin/sh", "-c", "exec sleep 30"], 0.2, 4096, b"", {})
        assert timed.timed_out and timed.killed_by == "timeout" and timed.rc == 137 and timed.seconds < 10
        await engine.write(box, "a/b", b"data\n", True)
        assert await engine.read(box, "a/b", 3) == b"dat" and [(e.name, e.kind, e.size) for e in await engine.entries(box, "a")] == [("b", "file", 5)]
        for refused in (engine.read(box, "none", 9), engine.read(box, "../x", 9), engine.entries(box, "none"), engine.diff(box, box, 9)):
            with pytest.raises(FileAccess):
                await refused
        fork = await engine.create("cd34", SPEC, {})
        await engine.fork(box, fork)
        await engine.close(fork)

    asyncio.run(use())
    calls = asked(tmp_path)
    assert ["exec", "--interactive", "--env", "X=y", "--workdir", "/workspace", "sao-ab12", "/bin/sh", "-c", "cat; echo $0 >&2; exit 3"] in calls
    assert calls.count(["exec", "--user", "0", "sao-ab12", "sh", "-c", "kill -9 -1"]) == 2
    assert ["commit", "--pause", "sao-ab12", "sao-fork-cd34"] in calls and calls[-2:] == [
        ["rm", "--force", "--volumes", "sao-cd34"],
        ["rmi", "--force", "sao-fork-cd34"],
    ]


def test_containers_of_dead_daemons_are_removed_at_the_start(engine, tmp_path):
    asyncio.run(engine.start())
    assert asked(tmp_path)[-1] == ["rm", "--force", "--volumes", "abandoned"]


def test_what_is_missing_is_named(engine, monkeypatch):
    monkeypatch.setenv("FAKE_DOWN", "1")
    with pytest.raises(SandboxFailure, match="no engine answers"):
        asyncio.run(engine.start())
    with pytest.raises(SandboxFailure, match="did not start a container of missing:image: Unable to find"):
        asyncio.run(engine.create("ab12", SandboxSpec(image="missing:image"), {}))
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(SandboxFailure, match="needs docker, which this machine lacks"):
        Containers("docker")


def live(engine):
    path = shutil.which(engine)
    return path is not None and subprocess.run([path, "image", "inspect", "alpine"], capture_output=True).returncode == 0


@pytest.mark.parametrize(
    "name", [pytest.param(e, marks=pytest.mark.skipif(not live(e), reason=f"no {e} with an alpine image")) for e in ("docker", "podman")]
)
def test_a_real_engine(name):
    async def use():
        engine = Containers(name)
        await engine.start()
        box = await engine.create("live", SandboxSpec(image="alpine", ttl_s=120), {})
        try:
            assert (await engine.exec(box, ["sh", "-c", "(setsid sleep 99 &) ; id; cat"], 20, 4096, b"input", {})).rc == 0
            await engine.write(box, "a/b", b"data", False)
            assert await engine.read(box, "a/b", 9) == b"data"
            assert (await engine.exec(box, ["wget", "-T", "2", "http://169.254.169.254"], 20, 4096, b"", {})).rc
        finally:
            await engine.close(box)

    asyncio.run(use())
