"""Programs in a real sandbox: what comes back to the policy, and that only the boxed answer earns anything."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import pytest

from sao.config import SandboxConfig
from sao.environment import Action, Context, Environment, StepResult, Task, ToolCall
from sao.envs.math_python.environment import SCHEMA, MathPythonEnvironment, boxed, said
from sao.envs.math_python.programs import PROGRAMS, worked
from sao.errors import ConfigError, EnvironmentFailure
from sao.sandbox.episode import sandbox_for
from sao.sandbox.protocol import ExecResult

PAYLOAD = {"question": "Find the remainder when 57^{831} is divided by 100.", "answer": "93"}


def build(**args: Any) -> MathPythonEnvironment:
    return MathPythonEnvironment(Task("t", "math_python", PAYLOAD), **args)


def play(environment: MathPythonEnvironment, *turns: Action) -> list[StepResult]:
    async def episode() -> list[StepResult]:
        async with sandbox_for(MathPythonEnvironment, SandboxConfig(memory_mb=128, disk_mb=8)) as sandbox:
            await environment.reset(Context(sandbox=sandbox))
            return [await environment.step(turn) for turn in turns]

    return asyncio.run(episode())


def program(*codes: object) -> Action:
    return Action("", tuple(ToolCall("python", {"code": code}, call_id=str(i)) for i, code in enumerate(codes)))


def test_an_episode_a_program_then_the_answer() -> None:
    environment = build()
    assert isinstance(environment, Environment) and environment.tools() == (SCHEMA,)
    first, last = play(environment, program("57**831%100"), Action(r"So it is \boxed{93}."))
    assert first.observation == [{"role": "tool", "name": "python", "content": "93", "tool_call_id": "0"}]
    assert not first.terminated and first.reward == 0
    assert (last.reward, last.terminated) == (1.0, True)
    assert last.info == {"correct": 1.0, "wrong": 0.0, "unparseable": 0.0, "calls": 1.0, "errors": 0.0}


def test_what_a_program_says_comes_back_and_none_of_it_is_an_error_of_ours() -> None:
    codes = ["print(1)\n2+2", "x = 5", "1/0", "def f(:", "x", "open('/etc/hostname').read()", "import sys; sys.exit(3)", "print('\\ud800')", 7]
    environment = build()
    (result,) = play(environment, program(*codes))
    contents = [message["content"] for message in result.observation]
    assert contents[:2] == ["1\n4", "(no output)"]
    assert "ZeroDivisionError" in contents[2] and "<string>" not in contents[2]
    assert "SyntaxError" in contents[3] and "NameError" in contents[4] and "FileNotFoundError" in contents[5]
    assert contents[6] == "error: exit code 3" and "Error" in contents[7] and contents[8] == "error: code must be a string"
    assert (environment.calls, environment.errors) == (9, 7)


def test_a_program_that_hangs_or_grows_ends_alone() -> None:
    environment = build(timeout_s=0.5)
    first, last = play(environment, program("while True: pass", "x = [1] * 10**9"), Action(r"\boxed{93}"))
    assert first.observation[0]["content"] == "error: it ran for more than 0.5 s"
    assert "MemoryError" in first.observation[1]["content"]
    assert last.reward == 1.0


def test_printing_the_answer_earns_nothing() -> None:
    assert [result.reward for result in play(build(), program(r"print('\\boxed{93}')"), Action("I am done."))] == [0.0, 0.0]


def test_output_is_cut_in_its_middle() -> None:
    text = said(ExecResult(0, b"a" * 50 + b"b" * 50), 1.0, 20)
    assert text == "a" * 10 + "\n[... 80 characters ...]\n" + "b" * 10


def test_without_a_sandbox_the_episode_fails() -> None:
    with pytest.raises(EnvironmentFailure, match="no sandbox"):
        asyncio.run(build().run("1"))


@pytest.mark.parametrize("family", PROGRAMS)
def test_programs_find_the_generators_answers(family: str) -> None:
    for seed in range(40):
        payload = MathPythonEnvironment.generate_payload(random.Random(seed), "train", families=[family])
        code, output = worked(family, payload["question"])
        assert output == payload["answer"] == str(eval(code))


def test_demonstrations() -> None:
    for seed in range(20):
        *_, call, tool, answer = MathPythonEnvironment.demonstration(random.Random(seed), clean=True, families=["last_digits"], level=3)
        assert call["content"].startswith("<tool_call>") and answer["content"] == boxed(int(tool["content"]))
    lengths = {len(MathPythonEnvironment.demonstration(random.Random(seed), clean=False)) for seed in range(20)}
    assert lengths == {3, 5}
    with pytest.raises(ConfigError, match="demonstrations are known of last_digits"):
        MathPythonEnvironment.demonstration(random.Random(0), clean=True, families=["dice"])
