"""Mathematics: problems whose answers were found twice, rows in GSM8K's form, and what is refused of them."""

from __future__ import annotations

import asyncio
import json
import random
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sao.config import Config, EnvConfig
from sao.environment import Action, Context, Environment, Task
from sao.envs.math import families
from sao.envs.math.environment import SYSTEM, MathEnvironment, gold_of, split_of
from sao.envs.math.families import FAMILIES, LEVELS, Problem, WrongAnswer, draw
from sao.errors import ConfigError, DataError
from sao.tasks.source import build_source

PAYLOAD = {"question": "What is 6 times 7?", "answer": "42"}
TARGET = "sao.envs.math.environment:MathEnvironment"


def graded(text: str, payload: Any = PAYLOAD) -> Any:
    return asyncio.run(MathEnvironment(Task("t", "math", payload)).step(Action(text)))


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 2**32), st.sampled_from(sorted(FAMILIES)), st.sampled_from(LEVELS))
def test_both_ways_to_every_answer_agree(seed: int, family: str, level: int) -> None:
    problem = draw(random.Random(seed), family, level)
    assert 0 <= problem.answer <= 999 and problem.check() == problem.answer
    assert draw(random.Random(seed), family, level).question == problem.question


def test_a_problem_whose_answers_differ_is_never_given_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(families.FAMILIES, "dice", lambda rng, level: Problem("1+1?", 3, lambda: 2))
    with pytest.raises(WrongAnswer, match=r"1\+1\? has the answer 2, not 3"):
        draw(random.Random(0), "dice", 1)


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_each_family_has_both_splits_and_harder_levels_are_new_problems(family: str) -> None:
    seen: dict[int, set[str]] = {}
    for level in LEVELS:
        for split in ("train", "held_out"):
            payload = MathEnvironment.generate_payload(random.Random(level), split, families=[family], level=level)
            assert payload["level"] == level and split_of(payload["question"]) == split
        seen[level] = {MathEnvironment.generate_payload(random.Random(i), "train", families=[family], level=level)["question"] for i in range(60)}
        assert len(seen[level]) >= 10
    assert len(seen[5] - seen[1]) >= 40


def test_an_episode() -> None:
    environment = MathEnvironment(Task("t", "math", PAYLOAD))
    assert isinstance(environment, Environment)
    opening = asyncio.run(environment.reset(Context()))
    assert opening == [{"role": "system", "content": SYSTEM}, {"role": "user", "content": PAYLOAD["question"]}]
    right = graded(r"<think>\boxed{1}</think>It is $\boxed{042.0}$.")
    assert (right.reward, right.terminated, right.info) == (1.0, True, {"correct": 1.0, "wrong": 0.0, "unparseable": 0.0})
    assert graded(r"\boxed{41}").info["wrong"] == 1.0 and graded("I do not know").info["unparseable"] == 1.0
    assert [m["role"] for m in MathEnvironment(Task("t", "math", PAYLOAD), system="").messages] == ["user"]


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ({"families": ["dise"]}, "did you mean 'dice'"),
        ({"families": ["topology"]}, "there are congruences"),
        ({"level": 9}, "must lie between 1 and 5"),
    ],
)
def test_arguments_that_make_no_sense(args: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        MathEnvironment.generate_payload(random.Random(0), "train", **args)


def test_a_level_that_is_set_leaves_nothing_to_a_curriculum() -> None:
    assert list(MathEnvironment.levels()) == [1, 2, 3, 4, 5] and not MathEnvironment.levels(level=2)


def test_demonstrations_show_the_form() -> None:
    def right(clean: bool) -> float:
        count = 0
        for seed in range(100):
            *_, asked, said = MathEnvironment.demonstration(random.Random(seed), clean)
            answer = MathEnvironment.generate_payload(random.Random(seed), "train")
            assert asked["content"] == answer["question"]
            count += graded(said["content"], answer).reward
        return count / 100

    assert right(True) == 1.0 and 0.3 < right(False) < 0.7


# ------------------------------------------------------------------ rows


def source(directory: Path, *rows: Any, prompt: str = "question") -> Any:
    path = directory / "train.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = Config()
    config.data.path, config.data.prompt_column = str(path), prompt
    return build_source(config, [EnvConfig("math", TARGET)])


def test_rows_in_the_form_of_gsm8k(tmp_path: Path) -> None:
    rows = [{"question": f"How many is {n} and {n}?", "answer": f"It is <<{n}+{n}={2 * n}>>{2 * n}.\n#### {2 * n:,}"} for n in (4, 1000)]
    tasks = source(tmp_path, *rows)
    for _ in rows:
        task = tasks.next()
        environment = MathEnvironment(task)
        assert environment.messages == [{"role": "system", "content": SYSTEM}, {"role": "user", "content": task.payload["question"]}]
        assert graded(r"\boxed{8}", task.payload).reward == float("4 and" in task.payload["question"])


def test_bad_gold_rows_are_named_at_the_door(tmp_path: Path) -> None:
    with pytest.raises(DataError) as caught:
        source(
            tmp_path,
            {"question": "a", "answer": "#### 1"},
            {"question": "b", "answer": "#### many"},
            {"question": "c"},
            {"question": "d", "answer": None},
            {"question": "e", "answer": "1 #### "},
        )
    said = str(caught.value)
    assert "4 of 5 rows cannot be used" in said and "\n" not in said
    assert "line 2: the gold answer 'many' cannot be graded against" in said
    assert "line 3: it has no column 'answer'" in said and "line 4: the answer is of type NoneType" in said and "line 5: the gold answer ''" in said


def test_the_question_column_has_to_be_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"no column 'prompt'.*set data\.prompt_column=question"):
        source(tmp_path, {"question": "a", "answer": "#### 1"}, prompt="prompt")


@pytest.mark.parametrize(("answer", "gold"), [("#### 7", "7"), ("a #### 1 b #### 2", "2"), ("3/4", "3/4"), (12, "12"), ("#### 1,000", "1,000")])
def test_where_the_gold_answer_stands(answer: Any, gold: str) -> None:
    assert gold_of(answer) == gold


def test_a_boolean_is_no_answer() -> None:
    with pytest.raises(ValueError, match="of type bool"):
        gold_of(True)
