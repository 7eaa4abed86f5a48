"""An environment that breaks the protocol: what it gave, from which method, in one typed failure; its neighbours on the loop notice nothing."""

from __future__ import annotations

import asyncio
import time
import warnings
from typing import Any

import numpy as np
import pytest
from agents_kit import DONE, TASK, ScriptedEnvironment, ScriptedGenerate, say, user

from sao.agents import guarded
from sao.agents.limits import Limits
from sao.agents.turns import run_episode
from sao.environment import StepResult
from sao.errors import EnvironmentFailure
from sao.trajectory import SamplingSpec, Trajectory


def episode(renderer, environment, **limits: Any) -> Trajectory:  # type: ignore[no-untyped-def]
    generate = ScriptedGenerate([[90, renderer.end]] * 3)
    run = run_episode(TASK, environment, renderer, generate, episode_id=(0, 0), admitted_version=0, sampling=SamplingSpec(), limits=Limits(**limits))
    return asyncio.run(run)


class Faulty(ScriptedEnvironment):
    """`fault` in the place of one method."""

    def __init__(self, method: str, fault: Any) -> None:
        super().__init__([say(), DONE])
        setattr(self, method, lambda *args: fault(self, *args))


async def nothing(*args: Any) -> Any:
    return None


async def nested(*args: Any) -> Any:
    return nothing()


async def generator(*args: Any) -> Any:
    yield user("hello")


async def endless(*args: Any) -> Any:
    await asyncio.Event().wait()


def plain(*args: Any) -> Any:
    return [user("hello")]


def raising(*args: Any) -> Any:
    raise KeyError("answer")


@pytest.mark.parametrize("method", ["reset", "step"])
@pytest.mark.parametrize(
    ("fault", "match"),
    [
        (nothing, "must return a .*, returned NoneType"),
        (nested, "must return a .*, returned coroutine"),
        (generator, "must be a coroutine .*, returned async_generator"),
        (plain, "must be a coroutine .*, returned list"),
        (lambda *args: None, "must be a coroutine .*, returned NoneType"),
        (raising, r"raised KeyError on task t-1: 'answer'"),
        (endless, r"rollout\.time_limit_s"),
    ],
)
def test_a_method_that_is_not_what_it_should_be(chatml, method: str, fault: Any, match: str) -> None:
    environment = Faulty(method, fault)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        with pytest.raises(EnvironmentFailure, match=rf"Faulty\.{method}.*{match}") as caught:
            episode(chatml, environment, time_limit_s=0.2, answer_grace_s=0.05)
    assert environment.closed == 1 and caught.value.sampled_tokens == (2 if method == "step" else 0)
    assert not [str(warning.message) for warning in said if "never awaited" in str(warning.message)]


@pytest.mark.parametrize(
    ("fault", "match"),
    [
        (raising, "raised KeyError on task t-1"),
        (nothing, "list of tool schemas, returned coroutine"),
        (generator, "list of tool schemas, returned async_generator"),
        (lambda *args: None, "list of tool schemas, returned NoneType"),
        (lambda *args: [None], "without a function name"),
        (lambda *args: [{"name": "f", "parameters": deep()}], "not JSON"),
    ],
)
def test_tools_that_are_none(chatml, fault: Any, match: str) -> None:
    with pytest.raises(EnvironmentFailure, match=rf"Faulty\.tools.*{match}"):
        episode(chatml, Faulty("tools", fault))


def deep(levels: int = 100_000) -> list[Any]:
    value: list[Any] = []
    for _ in range(levels):
        value = [value]
    return value


@pytest.mark.parametrize(
    ("result", "match"),
    [
        (StepResult(reward=10**400), "reward of type int"),
        (StepResult(reward=np.array([1.0, 2.0])), "reward of type ndarray"),  # type: ignore[arg-type]
        (StepResult(terminated=np.array([True, False])), "true or false for terminated"),  # type: ignore[arg-type]
        (StepResult(None), "list of messages, returned NoneType"),  # type: ignore[arg-type]
        (StepResult(m for m in ()), "list of messages, returned generator"),  # type: ignore[arg-type]
        (StepResult([None]), "message 0 of .* is a NoneType"),  # type: ignore[list-item]
        (StepResult([{"role": "user", "content": b"x"}]), "content of type bytes"),
        (StepResult([{"role": "user", "content": "x", "extra": deep()}]), "malformed tool_calls or fields"),
    ],
)
def test_a_step_that_answers_nonsense(chatml, result: Any, match: str) -> None:
    with pytest.raises(EnvironmentFailure, match=match):
        episode(chatml, ScriptedEnvironment([result]))


def test_a_close_that_never_ends_costs_a_warning_and_its_time(chatml, monkeypatch) -> None:
    monkeypatch.setattr(guarded, "CLOSE_TIMEOUT_S", 0.1)
    for fault in (endless, generator, plain, raising):
        began = time.monotonic()
        environment = Faulty("close", fault)
        got = episode(chatml, environment)
        assert got.reward == 1.0 and got.metrics["close_failed"] == 1 and time.monotonic() - began < 2


def test_a_numpy_number_is_a_reward_and_a_tuple_a_list(chatml) -> None:
    got = episode(chatml, ScriptedEnvironment([StepResult((user("x"),), np.float32(0.5)), StepResult((), True, np.bool_(True))]))
    assert got.reward == 1.5
