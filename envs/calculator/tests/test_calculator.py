import asyncio
import json
import random
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sao.environment import Action, Context, Environment, StepResult, Task, ToolCall
from sao.envs.calculator.arithmetic import OperationError, Problem, one_operation
from sao.envs.calculator.demonstrations import MIXTURE
from sao.envs.calculator.environment import CalculatorEnvironment, split_of, tool_call


def build(expression: str = "12+34*5", **args: object) -> CalculatorEnvironment:
    return CalculatorEnvironment(Task("t", "calculator", {"expression": expression}), **args)


def call(environment: CalculatorEnvironment, *expressions: object) -> StepResult:
    return asyncio.run(environment.step(Action("", tuple(ToolCall("calculator", {"expression": e}) for e in expressions))))


def answer(environment: CalculatorEnvironment, text: str) -> StepResult:
    return asyncio.run(environment.step(Action(text)))


def test_an_episode_of_two_calls_and_the_answer() -> None:
    environment = build()
    assert isinstance(environment, Environment)
    opening = asyncio.run(environment.reset(Context()))
    assert [m["role"] for m in opening] == ["system", "user"]
    assert opening[1]["content"] == "What is 12+34*5?"
    first = call(environment, "34*5")
    assert [m["content"] for m in first.observation] == ["170"]
    assert not first.terminated and first.reward == 0
    assert call(environment, "12+170").observation[0]["content"] == "182"
    last = answer(environment, "The answer is 182")
    assert last.terminated and last.reward == 1.0
    assert last.info == {"calls": 2, "errors": 0}


@pytest.mark.parametrize("text", ["182", " 182\n", "The answer is 182.", "the answer is 182"])
def test_the_right_number_earns_one(text: str) -> None:
    assert answer(build(), text).reward == 1.0


@pytest.mark.parametrize(
    "text", ["181", "-182", "- 182", "", "The answer is 181", "It is 182", "The answer is", "182.0", "182 182", "1_82", "١٨٢", "9" * 5000]
)
def test_anything_but_the_right_number_earns_nothing(text: str) -> None:
    result = answer(build(), text)
    assert result.terminated and result.reward == 0.0


@pytest.mark.parametrize(
    "expression", ["12+34*5", "12+", "+12", "12", "", "1/2", "2**3", "1 2+3", "1" * 20 + "+1", None, 7, ["1+1"], "__import__('os')"]
)
def test_a_wrong_call_is_answered_with_an_error(expression: object) -> None:
    environment = build()
    content = call(environment, expression).observation[0]["content"]
    assert content.startswith("error: ")
    assert call(environment, "34*5").observation[0]["content"] == "170"


def test_each_of_several_calls_in_a_turn_is_answered() -> None:
    result = call(build(), "34*5", "1+1")
    assert [m["content"] for m in result.observation] == ["170", "2"]


def test_without_the_tool_every_call_is_an_error() -> None:
    environment = build(tool=False)
    assert call(environment, "34*5").observation[0]["content"] == "error: unavailable"
    assert answer(environment, "182").reward == 1.0


@given(st.integers(0, 10**9), st.sampled_from("+-*"), st.integers(0, 10**9))
def test_one_operation_is_exact(left: int, sign: str, right: int) -> None:
    if max(left, right) < 10**9:
        assert one_operation(f"{left}{sign}{right}") == eval(f"{left}{sign}{right}")
    else:
        with pytest.raises(OperationError):
            one_operation(f"{left}{sign}{right}")


@given(st.integers(0), st.integers(11, 10_000))
def test_generated_tasks_stay_in_their_split_and_have_the_right_answer(seed: int, operand_max: int) -> None:
    for split in ("train", "held_out"):
        expression = CalculatorEnvironment.generate_payload(random.Random(seed), split, operand_max=operand_max)["expression"]
        assert split_of(expression) == split
        assert Problem.parse(expression).answer == eval(expression)


def test_an_unknown_split_and_a_bad_payload_are_refused() -> None:
    with pytest.raises(ValueError, match="split"):
        CalculatorEnvironment.generate_payload(random.Random(0), "test")
    with pytest.raises(ValueError, match="three integers"):
        build("1+1")


def replay(messages: list[dict[str, object]]) -> float:
    """Act a demonstration out against a fresh environment; every tool reply must be the environment's own."""
    expression = str(messages[1]["content"]).removeprefix("What is ").removesuffix("?")
    assert split_of(expression) == "train"
    environment = build(expression)
    assert messages[:2] == environment.opening()
    for said, reply in zip(messages[2:-1:2], messages[3::2], strict=True):
        text = str(said["content"]).removeprefix("<tool_call>").removesuffix("</tool_call>")
        assert tool_call(json.loads(text)["arguments"]["expression"]) == said["content"]
        result = call(environment, json.loads(text)["arguments"]["expression"])
        assert [m["content"] for m in result.observation] == [reply["content"]]
    return answer(environment, str(messages[-1]["content"])).reward


def test_clean_demonstrations_succeed_and_mixed_ones_mostly_fail() -> None:
    clean = [replay(CalculatorEnvironment.demonstration(random.Random(i), True)) for i in range(200)]
    mixed = [replay(CalculatorEnvironment.demonstration(random.Random(i), False)) for i in range(1000)]
    assert all(clean)
    assert 0.2 < sum(mixed) / 1000 < 0.4
    assert sum(MIXTURE.values()) == pytest.approx(1.0)
    assert MIXTURE["no_tool"] > 0.5, "otherwise the greedy policy uses the tool from the start"


def test_demonstrations_are_reproducible_and_show_a_working_tool() -> None:
    one, two = (CalculatorEnvironment.demonstration(random.Random(5), True, tool=tool) for tool in (True, False))
    assert one == two
    kinds = Counter(len(CalculatorEnvironment.demonstration(random.Random(i), False)) for i in range(300))
    assert set(kinds) == {3, 5, 7, 9}, "answer at once, one call, two calls, two calls and an error"
