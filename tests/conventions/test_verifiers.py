"""Tasksets of the real verifiers package, in an interpreter of its own (`make conventions` makes .venv/verifiers)."""

from __future__ import annotations

import asyncio
import os
import re
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from sao.config_load import compose
from sao.environment import Action, Context, StepResult, Task
from sao.environments import verifiers as adapter
from sao.environments.verifiers import VerifiersEnvironment
from sao.errors import ConfigError, EnvironmentFailure
from sao.tasks.source import build_held_out, build_source, check_arguments

pytestmark = pytest.mark.conventions
ROOT = Path(__file__).resolve().parents[2]
PYTHON = os.environ.get("SAO_VERIFIERS_PYTHON", str(ROOT / ".venv/verifiers/bin/python"))
SUMS: dict[str, Any] = {"taskset": "sums_taskset", "config": {"count": 6}, "held_out": {"first": 50, "count": 2}, "python": PYTHON}


@pytest.fixture(scope="module", autouse=True)
def here() -> Iterator[None]:
    """The tasksets lie beside this file, as a user's lie where the run is started."""
    before = Path.cwd()
    os.chdir(Path(__file__).parent)
    yield
    os.chdir(before)


@pytest.fixture(scope="module")
def runner(here) -> Iterator[asyncio.Runner]:
    """One event loop, so one process of verifiers, for all the tests."""
    with asyncio.Runner() as runner:
        yield runner
        runner.run(VerifiersEnvironment.shutdown())


def environment(row: dict[str, Any], **args: Any) -> VerifiersEnvironment:
    return VerifiersEnvironment(Task("t-1", "verifiers", row), **{**SUMS, **args})


async def episode(env: VerifiersEnvironment, answers: list[str]) -> tuple[list[Any], list[StepResult]]:
    results: list[StepResult] = []
    try:
        opening = list(await env.reset(Context()))
        for answer in answers:
            results.append(await env.step(Action(answer)))
    finally:
        await env.close()
        await env.close()
    return opening, results


def train(index: int) -> dict[str, Any]:
    return {"index": index, "split": "train"}


def config(**args: Any) -> Any:
    made = compose(["env=verifiers", "model.path=m"])
    made.env.args = {**SUMS, **args}
    return made


def test_rows_become_tasks_each_once_an_epoch():
    made = config()
    check_arguments(made.env, made.reward)
    source = build_source(made, [made.env])
    tasks = [source.next() for _ in range(6)]
    assert source.length == 6 and sorted(task.payload["index"] for task in tasks) == list(range(6))
    assert {task.payload["prompt"] for task in tasks} == {f"{n} + {n} = ?" for n in range(1, 7)}
    held_out = build_held_out(made, [made.env], 5)
    assert [task.payload["prompt"] for task in held_out] == ["50 + 50 = ?", "51 + 51 = ?"] and held_out == source.held_out(5)


def test_a_plain_taskset_is_one_prompt_one_answer_and_its_rewards(runner):
    opening, results = runner.run(episode(environment(train(1)), ["4"]))
    assert opening == [{"role": "system", "content": "Say a number."}, {"role": "user", "content": "2 + 2 = ?"}]
    assert results[0].terminated and results[0].reward == 1.0
    assert results[0].info == {"length": 1.0, "reward/exact": 1.0, "reward/boxed": 0.0}
    _, results = runner.run(episode(environment({"index": 0, "split": "held_out"}), [r"\boxed{100.0}"]))
    assert results[0].reward == 0.5, "math-verify needs the main thread of its process for its alarms"


def test_an_environment_that_converses_is_several_turns(runner):
    env = environment(train(1), taskset="higher_taskset", config={}, held_out={}, limit=3)
    opening, results = runner.run(episode(env, ["3", "9", "4"]))
    assert opening == [{"role": "user", "content": "Guess."}]
    assert [r.observation[0]["content"] for r in results[:2]] == ["higher", "lower"]
    assert (results[2].reward, results[2].info["guesses"], results[2].info["turns"]) == (1.0, 3.0, 3.0)


def test_episodes_side_by_side_do_not_mix(runner):
    async def all_of_them() -> list[float]:
        games = [environment(train(i % 6)) for i in range(12)]
        return [results[0].reward for _, results in await asyncio.gather(*(episode(env, [str(2 * (i % 6) + 2)]) for i, env in enumerate(games)))]

    assert runner.run(all_of_them()) == [1.0] * 12


@pytest.mark.parametrize(
    ("args", "row", "answers", "match"),
    [
        ({}, train(0), ["break"], "TaskError: task SumsTask scoring: RuntimeError: the scorer is broken"),
        ({}, train(0), ["2", "2"], "the episode is over"),
        ({"taskset": "higher_taskset", "config": {}, "held_out": {}, "limit": 3}, train(0), ["not a number"], "ValueError: invalid literal"),
    ],
)
def test_what_breaks_is_a_typed_failure(runner, args, row, answers, match):
    with pytest.raises(EnvironmentFailure, match=match):
        runner.run(episode(environment(row, **args), answers))


def test_the_event_loop_is_free_and_a_taskset_that_blocks_is_ended(runner, monkeypatch):
    monkeypatch.setattr(adapter, "CLOSE_S", 0.3)

    async def blocked() -> float:
        env, other = environment(train(0)), environment(train(1))
        await env.reset(Context())
        await other.reset(Context())
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(env.step(Action("block")), 0.2)
        began = time.monotonic()
        await env.close()
        with pytest.raises(EnvironmentFailure, match="blocks it"):
            await other.step(Action("4"))
        await other.close()
        return time.monotonic() - began

    assert runner.run(blocked()) < 3
    assert runner.run(episode(environment(train(1)), ["4"]))[1][0].reward == 1.0


@pytest.mark.parametrize(
    ("taskset", "more", "match"),
    [
        ("no_such_taskset", {}, "ModuleNotFoundError: taskset 'no_such_taskset' not found"),
        ("sums_taskset", {"config": {"wrong": 1}}, "ValidationError"),
        ("sums_taskset", {"config": {"count": 0}}, "has no tasks"),
        ("higher_taskset", {}, "has no end; set env.args.limit"),
        ("refused_taskset", {}, "RefusedTask.by_running scores a runtime, which only its own program can play"),
    ],
)
def test_what_cannot_be_played_says_why(runner, taskset, more, match):
    spec = {"taskset": taskset, "env": "", "config": {}, "limit": 0, **more}

    async def load() -> None:
        await (await adapter._server(PYTHON)).loaded(spec)

    with pytest.raises(EnvironmentFailure, match=re.escape(match)):
        runner.run(load())


@pytest.mark.parametrize(
    ("args", "match"),
    [
        ({"python": sys.executable}, r"needs the package verifiers in .*pip install verifiers==0\.4\.0"),
        ({"python": "/nowhere/python"}, r"env\.args\.python=/nowhere/python cannot be run"),
        (
            {"taskset": "refused_taskset", "config": {}, "held_out": {}},
            r"env\.args\.taskset=refused_taskset: RefusedTask\.by_running scores a runtime",
        ),
    ],
)
def test_mistakes_are_refused_at_the_door(args, match):
    made = config(**args)
    with pytest.raises(ConfigError, match=match):
        check_arguments(made.env, made.reward)


def test_what_the_process_says_of_a_taskset_is_the_refusal(tmp_path):
    for text, match in (
        ("""echo '{"id": 0, "error": "it has no tasks"}'""", r"env\.args\.taskset=sums_taskset: it has no tasks"),
        ("echo Killed >&2; exit 9", r"the process that loads the taskset died \(Killed\)"),
    ):
        script = tmp_path / f"python-{len(text)}"
        script.write_text(f"#!/bin/sh\n{text}\n")
        script.chmod(0o755)
        made = config(python=str(script))
        with pytest.raises(ConfigError, match=match):
            check_arguments(made.env, made.reward)
