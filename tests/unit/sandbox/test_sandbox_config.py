"""What is refused before anything starts, with the mend; and a sandbox as an episode has it."""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
import sys

import pytest

from sao.config import EnvConfig, SandboxConfig
from sao.errors import ConfigError, SandboxFailure
from sao.runtime import doctor
from sao.sandbox import bwrap, confined, episode, kernel, levels
from sao.sandbox.client import Sandboxes, Unavailable
from sao.sandbox.episode import check_limits, check_sandboxes, sandbox_for

HERE = "tests.unit.sandbox.test_sandbox_config"
needs_bwrap = pytest.mark.skipif(shutil.which("bwrap") is None, reason="needs bubblewrap")


class Plain:
    async def reset(self, context): ...
    async def step(self, action): ...
    def tools(self): ...
    async def close(self): ...


class Shell(Plain):
    sandbox = True


def env(target="Shell", **sandbox):
    return EnvConfig(name="mine", target=f"{HERE}:{target}", sandbox=SandboxConfig(**sandbox))


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"backend": "bubblewrap"}, r"env.sandbox.backend=bubblewrap is not one of bwrap, landlock"),
        ({"memory_mb": 8}, r"env.sandbox.memory_mb=8 must be at least 32"),
        ({"timeout_s": 0.0}, r"env.sandbox.timeout_s=0.0 must be positive"),
        ({"timeout_s": float("nan")}, r"env.sandbox.timeout_s=nan must be positive"),
        ({"backend": "subprocess"}, r"env.sandbox.unsafe=true"),
        ({"unsafe": True}, r"no effect with env.sandbox.backend=bwrap"),
        ({"read_only": ["data"]}, r"env.sandbox.read_only: data is not an absolute path"),
        ({"backend": "docker"}, r"needs env.sandbox.image"),
        ({"image": "x"}, r"env.sandbox.image has no effect with env.sandbox.backend=bwrap"),
    ],
)
def test_values_that_make_no_sense_are_refused(given, said):
    with pytest.raises(ConfigError, match=said):
        check_limits(SandboxConfig(**given))


def test_limits_of_an_environment_without_commands_are_refused():
    check_sandboxes([env("Plain")])
    with pytest.raises(ConfigError, match=r"env=mine: env.sandbox is set, but Plain runs no commands"):
        check_sandboxes([env("Plain", memory_mb=64)])


@pytest.mark.parametrize(
    ("missing", "said"),
    [
        ("bwrap", "apt-get install bubblewrap, or choose a weaker level, env.sandbox.backend=landlock"),
        ("setpriv", "apt-get install util-linux, or choose a weaker level"),
    ],
)
def test_a_missing_program_is_named_with_its_package(missing, said, tmp_path, monkeypatch):
    real = bwrap.tool
    monkeypatch.setattr(bwrap, "tool", lambda name: name if name == missing else f"/usr/bin/{real(name)}")
    with pytest.raises(SandboxFailure, match=f"needs {missing}, which this machine lacks") as failure:
        levels.make("bwrap", str(tmp_path))
    assert said in levels.mend("bwrap", str(failure.value))


def test_forbidden_namespaces_are_named_with_their_settings(tmp_path, monkeypatch):
    def forbidden():
        raise PermissionError(1, "unshare: Operation not permitted")

    monkeypatch.setattr(bwrap, "tool", lambda name: f"/usr/bin/{name}")
    monkeypatch.setattr(kernel, "own_mounts", forbidden)
    with pytest.raises(OSError, match="unshare") as failure:
        levels.make("bwrap", str(tmp_path))
    assert "unprivileged_userns_clone=1" in levels.mend("bwrap", str(failure.value))
    assert not levels.make("subprocess", str(tmp_path)).sized  # says so and watches the disk instead


def test_no_landlock_is_no_reason_to_take_less(tmp_path, monkeypatch):
    monkeypatch.setattr(kernel, "landlock_abi", lambda: 0)
    with pytest.raises(SandboxFailure, match="this kernel has no Landlock"):
        levels.make("landlock", str(tmp_path))


def test_a_run_that_cannot_have_its_sandbox_is_refused_with_the_mend(monkeypatch):
    async def unavailable(self):
        raise Unavailable("env.sandbox.backend=bwrap needs bwrap, which this machine lacks", "apt-get install bubblewrap")

    monkeypatch.setattr(Sandboxes, "start", unavailable)
    with pytest.raises(
        ConfigError, match=r"env=mine wants a sandbox and env.sandbox.backend=bwrap has none here: .* lacks; apt-get install bubblewrap"
    ):
        check_sandboxes([env()])
    findings = doctor.check_sandbox()
    assert [(finding.level, finding.mend) for finding in findings] == [("note", "apt-get install bubblewrap")] * 2


def test_weaker_levels_say_what_they_lack():
    assert "confined" in " ".join(confined.Confined(0, own_uid=False).degraded)
    assert any("signal" in lack for lack in confined.Confined(4, own_uid=False).degraded)
    assert len(confined.Confined(6, own_uid=True).degraded) == 1 and not bwrap.Bubblewrap(True).degraded


@needs_bwrap
def test_an_episode_has_a_sandbox_of_its_own_while_it_lasts():
    check_sandboxes([env(read_only=[os.path.dirname(__file__)], memory_mb=128)])
    config = SandboxConfig(read_only=[os.path.dirname(__file__)], memory_mb=128)

    async def episode_of(target):
        async with sandbox_for(target, config) as sandbox:
            if sandbox is None:
                return None
            assert (await sandbox.exec(["head", "-c", "5", __file__])).out == b'"""Wh'
            assert (await sandbox.exec(["/bin/no-such-program"])).rc in (126, 127)
            assert (await sandbox.exec(["echo", "x" * 3_000_000])).rc == 126
            assert (await sandbox.exec(["echo", "a\0b"])).rc == 126
            assert (await sandbox.exec("echo $A; exit 7", environment={"A": "b c"})).out == b"b c\n"
        with pytest.raises(SandboxFailure, match="there is no sandbox"):
            await sandbox.exec("true")
        return sandbox

    assert asyncio.run(episode_of(Plain)) is None and asyncio.run(episode_of(Shell)) is not None
    asyncio.run(Sandboxes("bwrap").end())


@needs_bwrap
def test_the_levels_of_this_machine_are_tried_for_real():
    found = {name: mend for name, _, mend in episode.probe()}
    assert list(found) == ["bwrap", "landlock"] and found["bwrap"] == ""


def test_the_daemon_needs_only_the_standard_library():
    code = "import sys, sao.sandbox.daemon; print([m for m in ('numpy', 'torch', 'ray', 'hydra', 'psutil') if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"
