"""The rule stream: exact rules that never agree, and a reward that only they decide."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sao.environment import Action, Environment, Task
from sao.envs.rule_stream.environment import RULES, RuleStreamEnvironment, answers, split_of


def build(**payload: Any) -> RuleStreamEnvironment:
    return RuleStreamEnvironment(Task("t", "rule_stream", {"a": "12", "b": "34", "rule": "first"} | payload))


def reward(environment: Any, text: Any) -> Any:
    return asyncio.run(environment.step(Action(text)))


def test_each_rule_is_what_its_name_says() -> None:
    assert answers("12", "34") == {"first": "12", "second": "34", "first_reversed": "21", "second_reversed": "43"}


@settings(deadline=None)
@given(st.integers(0, 2**32), st.sampled_from(sorted(RULES)), st.sampled_from(["train", "held_out"]))
def test_on_a_drawn_pair_exactly_one_answer_is_right(seed: Any, rule: Any, split: Any) -> None:
    payload = RuleStreamEnvironment.generate_payload(random.Random(seed), split, rule=rule)
    assert split_of(payload["a"], payload["b"]) == split
    given = answers(payload["a"], payload["b"])
    assert len(set(given.values())) == len(RULES)
    earned = {name: reward(build(**payload), text).reward for name, text in given.items()}
    assert earned == {name: float(name == rule) for name in RULES}


def test_the_rule_is_not_in_the_prompt() -> None:
    assert isinstance(build(), Environment)
    assert build(rule="first").opening() == build(rule="second_reversed").opening()


@pytest.mark.parametrize("text", ["", "1", "123", "1 2", "twelve", "١٢", "12."])
def test_anything_but_two_digits_earns_nothing(text: Any) -> None:
    assert reward(build(), text).reward == 0.0


def test_noise_turns_the_reward_over() -> None:
    assert reward(build(flipped=True), "12").reward == 0.0 and reward(build(flipped=True), "34").reward == 1.0


@pytest.mark.parametrize(
    ("args", "says"), [({"rule": "frist"}, "did you mean 'first'"), ({"rule": "sum"}, "there are first"), ({"noise": -1}, "noise")]
)
def test_arguments_that_make_no_sense_are_refused(args: Any, says: Any) -> None:
    with pytest.raises(ValueError, match=says):
        RuleStreamEnvironment.generate_payload(random.Random(0), "train", **args)


def test_demonstrations_take_every_rule() -> None:
    seen = set()
    for i in range(200):
        messages = RuleStreamEnvironment.demonstration(random.Random(i), True)
        a, b = messages[1]["content"].split()
        seen |= {name for name, text in answers(a, b).items() if text == messages[2]["content"]}
    assert seen == set(RULES)
