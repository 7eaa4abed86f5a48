"""OpenEnv against a real server of openenv-core, which runs in an interpreter of its own (`make conventions` makes .venv/openenv)."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from sao.agents.observations import check_tools
from sao.config_load import compose
from sao.environment import Action, Context, Task
from sao.environments.openenv import OpenEnvEnvironment
from sao.errors import ConfigError, EnvironmentFailure
from sao.tasks.source import check_arguments
from tests.play_kit import call, make, play

pytestmark = pytest.mark.conventions
ROOT = Path(__file__).resolve().parents[2]
SERVER = Path(__file__).with_name("openenv_server.py")
PYTHON = Path(os.environ.get("SAO_OPENENV_PYTHON", ROOT / ".venv/openenv/bin/python"))


@pytest.fixture(scope="module")
def server() -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    process = subprocess.Popen([PYTHON, SERVER, str(port)], env={k: v for k, v in os.environ.items() if k != "PYTHONPATH"})
    url = f"http://127.0.0.1:{port}"
    deadline = time.monotonic() + 300
    while True:
        try:
            urllib.request.urlopen(f"{url}/line/health", timeout=5).close()
            break
        except OSError:
            assert process.poll() is None and time.monotonic() < deadline, f"the OpenEnv server did not start; is openenv-core in {PYTHON}?"
            time.sleep(0.1)
    yield url, process
    process.kill()
    process.wait()


@pytest.fixture
def echo(server) -> str:
    return f"{server[0]}/echo"


@pytest.fixture
def line(server) -> str:
    return f"{server[0]}/line"


def test_a_text_is_the_only_field_of_an_action(echo):
    opening, tools, results = play(make(OpenEnvEnvironment, url=echo, goal="Talk.", system="Be brief.", reset={"word": "hey"}), ["a", "bye", "c"])
    assert [m["content"] for m in opening] == ["Be brief.", "Talk.\nseed 7 hey"] and tools == []
    assert [(r.observation[0]["content"], r.reward, r.terminated) for r in results] == [("you said a", 0.5, False), ("you said bye", 0.5, True)]


def test_the_columns_of_a_row_reach_reset(echo):
    payload = {"word": "tea", "prompt": "x", "_messages": [{"role": "user", "content": "x"}]}
    assert play(make(OpenEnvEnvironment, payload, url=echo), [])[0][-1]["content"] == "x\nseed 7 tea"


def test_an_action_of_several_fields_is_a_tool(line):
    answers = [call("act", direction="right", steps=5), "go left", call("act", direction="up"), call("act", direction="left", steps=3)]
    opening, tools, results = play(make(OpenEnvEnvironment, url=line), answers)
    assert opening[-1]["content"] == '{"position": 0, "goal": 2}'
    function = check_tools(tools, "tools")[0]["function"]
    assert function["description"] == "Move on the line." and function["parameters"]["required"] == ["direction"]
    assert function["parameters"]["properties"]["direction"]["enum"] == ["left", "right"]
    assert results[1].observation == [{"role": "user", "content": "error: act by calling the tool act"}]
    assert results[2].observation[0]["content"].startswith("error: the environment did not accept") and results[2].info["refused"] == 2
    assert results[3].observation[0] == {"role": "tool", "name": "act", "content": '{"position": 2, "goal": 2}', "tool_call_id": "call_0"}
    assert [r.reward for r in results] == [0, 0, 0, 1] and results[3].terminated


def test_sessions_are_apart_and_never_more_than_at_once(echo):
    async def episodes() -> list[str]:
        async def one(seed: int) -> str:
            environment = OpenEnvEnvironment(Task(f"t-{seed}", "e", {}, seed), url=echo, at_once=2)
            opening = await environment.reset(Context(seed=seed))
            await environment.step(Action("x"))
            assert (await environment.state())["step_count"] == 1
            await environment.close()
            return str(opening[-1]["content"])

        return await asyncio.gather(*map(one, range(6)))

    assert asyncio.run(episodes()) == [f"seed {seed}" for seed in range(6)]


def test_a_server_without_room_is_a_typed_failure(echo):
    async def episodes() -> None:
        environments = [OpenEnvEnvironment(Task(f"t-{i}", "e", {}, i), url=echo, at_once=3) for i in range(3)]
        try:
            with pytest.raises(EnvironmentFailure, match="CAPACITY_REACHED"):
                for environment in environments:
                    await environment.reset(Context())
        finally:
            for environment in environments:
                await environment.close()

    asyncio.run(episodes())


@pytest.mark.parametrize(
    ("said", "args", "match"),
    [
        ("raise", {}, r"could not step: broken inside \(EXECUTION_ERROR\)"),
        ("sleep", {"timeout_s": 0.2}, "did not answer step within env.args.timeout_s=0.2"),
    ],
)
def test_a_step_that_fails_or_hangs_is_typed_and_the_session_ends(echo, said, args, match):
    began = time.monotonic()
    with pytest.raises(EnvironmentFailure, match=match):
        play(make(OpenEnvEnvironment, url=echo, **args), [said])
    assert time.monotonic() - began < 4


def test_an_unknown_observation_field_is_named(echo):
    with pytest.raises(EnvironmentFailure, match=r"has no field 'board' .*it has text"):
        play(make(OpenEnvEnvironment, url=echo, observation="board"), [])


@pytest.mark.parametrize(
    ("args", "match"),
    [
        (["env.args.url=http://127.0.0.1:9"], "no OpenEnv server answers there .*start it first"),
        (["env.args.url=localhost"], "write http://host:port"),
        (["env.args.url=http://127.0.0.1:9", "env.args.at_once=0"], "must be at least 1"),
        ([], "missing a required argument: 'url'"),
    ],
)
def test_mistakes_are_refused_at_the_door(args, match):
    config = compose(["env=openenv", "model.path=m", *args])
    with pytest.raises(ConfigError, match=match):
        check_arguments(config.env, config.reward)


def test_a_server_that_dies_is_a_typed_failure(server, echo):
    process = server[1]
    with pytest.raises(EnvironmentFailure, match=r"ended the session while step was asked|is gone"):
        play(make(OpenEnvEnvironment, url=echo), ["exit"])
    process.wait(10)
    with pytest.raises(EnvironmentFailure, match="did not open a session"):
        play(make(OpenEnvEnvironment, url=echo), ["a"])
