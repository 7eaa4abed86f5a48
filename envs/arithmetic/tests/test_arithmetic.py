import asyncio
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sao.environment import Action, Context, Environment, Task
from sao.envs.arithmetic.environment import ArithmeticEnvironment
from sao.envs.arithmetic.expressions import operations, split_of, value, worked_result
from sao.errors import ConfigError


def build(expression: str = "2+3*4", **args: object) -> ArithmeticEnvironment:
    return ArithmeticEnvironment(Task("t", "arithmetic", {"expression": expression}), **args)


def answer(text: str, expression: str = "2+3*4") -> float:
    result = asyncio.run(build(expression).step(Action(text)))
    assert result.terminated
    return result.reward


def test_the_opening_is_one_short_user_message() -> None:
    environment = build(question="Compute {expression}.")
    assert isinstance(environment, Environment)
    assert asyncio.run(environment.reset(Context())) == [{"role": "user", "content": "Compute 2+3*4."}]
    assert asyncio.run(build().reset(Context())) == [{"role": "user", "content": "2+3*4="}]
    assert not environment.tools()


def test_examples_are_solved_turns_before_the_question() -> None:
    messages = asyncio.run(build(examples=2).reset(Context()))
    assert [(m["role"], m["content"]) for m in messages] == [
        ("user", "5+3-2="),
        ("assistant", "6"),
        ("user", "2+3*2="),
        ("assistant", "8"),
        ("user", "2+3*4="),
    ]
    with pytest.raises(ConfigError, match=r"env\.args\.examples=9"):
        ArithmeticEnvironment.generate_payload(random.Random(0), "train", examples=9)


def test_worked_examples_end_with_the_answer() -> None:
    messages = asyncio.run(build(examples=4, worked=True).reset(Context()))
    assert [m["content"] for m in messages if m["role"] == "assistant"] == ["5+3=8, 8-2=6", "3*2=6, 2+6=8", "5-2=3, 3-4=-1", "4*2=8, 8-1=7"]


def test_examples_are_of_the_kind_that_is_asked() -> None:
    messages = asyncio.run(build("5-3", examples=3, operators="+-", negative=False).reset(Context()))
    assert [m["content"] for m in messages if m["role"] == "user"] == ["5+3-2=", "2+6+1=", "9-5+1=", "5-3="]
    with pytest.raises(ConfigError, match=r"env\.args\.examples=3 must lie between 0 and 2, the solved questions with operators \+"):
        ArithmeticEnvironment.generate_payload(random.Random(0), "train", operators="+", examples=3)


@given(st.integers(0), st.sampled_from(["-", "+-", "+-*"]))
def test_without_negatives_no_result_on_the_way_is_below_zero(seed: int, operators: str) -> None:
    payload = ArithmeticEnvironment.generate_payload(random.Random(seed), "train", operators=operators, negative=False)
    assert all(int(step.partition("=")[2]) >= 0 for step in operations(payload["expression"]))


@pytest.mark.parametrize("text", ["14", " 14\n", "2+3*4 = 14", "14.", "It is 14.0"])
def test_the_right_last_number_earns_one(text: str) -> None:
    assert answer(text) == 1.0


@pytest.mark.parametrize("text", ["", "13", "-14", "14 or 15", "fourteen", "1 4", "141"])
def test_anything_else_earns_nothing(text: str) -> None:
    assert answer(text) == 0.0


def test_negative_answers_need_their_sign() -> None:
    assert answer("-5", "3-8") == 1.0 and answer("= -5", "3-8") == 1.0 and answer("5", "3-8") == 0.0


@given(st.lists(st.tuples(st.sampled_from("+-*"), st.integers(0, 999)), min_size=1, max_size=15), st.integers(0, 999))
def test_the_value_is_exact(rest: list[tuple[str, int]], first: int) -> None:
    expression = str(first) + "".join(f"{sign}{number}" for sign, number in rest)
    assert value(expression) == eval(expression)


@pytest.mark.parametrize(
    "expression", ["", "1", "1+", "+1", "1++2", "1/2", "2**3", "1.5+2", "x+1", "1" * 7 + "+1", "+".join("1" * 17), "__import__('os')", "١+٢"]
)
def test_other_payloads_are_refused(expression: str) -> None:
    with pytest.raises(ValueError, match="integers joined"):
        build(expression)


@given(st.integers(0), st.integers(2, 5), st.sampled_from(["+", "+-", "*", "+-*"]))
def test_generated_tasks_keep_to_their_split_and_arguments(seed: int, operands: int, operators: str) -> None:
    for split in ("train", "held_out"):
        payload = ArithmeticEnvironment.generate_payload(random.Random(seed), split, operands=operands, operand_max=12, operators=operators)
        expression = payload["expression"]
        assert split_of(expression) == split
        numbers = [int(part) for part in expression.replace("-", "+").replace("*", "+").split("+")]
        assert len(numbers) == operands and all(1 <= number <= 12 for number in numbers)
        assert set(expression) & set("+-*") <= set(operators)


@pytest.mark.parametrize("args", [{"operands": 1}, {"operand_min": 5, "operand_max": 4}, {"operand_min": -1}, {"operators": "+/"}, {"operators": ""}])
def test_arguments_out_of_range_are_refused(args: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match=r"env\.args"):
        ArithmeticEnvironment.generate_payload(random.Random(0), "train", **args)


def test_a_range_without_a_task_and_an_unknown_split_are_refused() -> None:
    with pytest.raises(ConfigError, match="widen the range"):
        ArithmeticEnvironment.generate_payload(
            random.Random(0), "held_out" if split_of("2+2") == "train" else "train", operands=2, operand_min=2, operand_max=2, operators="+"
        )
    with pytest.raises(ValueError, match="split"):
        ArithmeticEnvironment.generate_payload(random.Random(0), "test")


@given(st.lists(st.tuples(st.sampled_from("+-*"), st.integers(0, 99)), min_size=1, max_size=6), st.integers(0, 99))
def test_operations_one_by_one_come_to_the_value(rest: list[tuple[str, int]], first: int) -> None:
    expression = f"{first}" + "".join(f"{operator}{number}" for operator, number in rest)
    steps = operations(expression)
    assert len(steps) == len(rest) and int(steps[-1].partition("=")[2]) == value(expression)


@pytest.mark.parametrize(
    ("answer", "result"),
    [
        ("1+2=3, 3+4=7", "7"),
        ("1+2=3, 3+4=7, 7+1", "7"),
        ("1+2=3, 3-4= -1", " -1"),
        ("1+2=3, 3+4=", ""),
        ("1+2=3, 3+4=x7", ""),
        ("1+2+4=7", "1+2+4=7"),
        ("7", "7"),
    ],
)
def test_a_worked_answer_ends_with_its_last_operation(answer: str, result: str) -> None:
    assert worked_result(answer, 2) == result
