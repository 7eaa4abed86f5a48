"""What breaks is raised with its type and the tokens it cost; it is never a reward of 0. C71, C72, C76."""

from __future__ import annotations

import asyncio
import pickle
from typing import Any

import pytest
from agents_kit import DONE, TASK, ScriptedEnvironment, ScriptedGenerate, say, user

from sao.agents.limits import Limits
from sao.agents.turns import run_episode
from sao.environment import StepResult
from sao.errors import DataError, EngineFailure, EnvironmentFailure, RewardFailure, SystemFailure
from sao.trajectory import FinishReason, SamplingSpec, Trajectory


def episode(renderer, generate, environment, **limits: Any) -> Trajectory:  # type: ignore[no-untyped-def]
    run = run_episode(TASK, environment, renderer, generate, episode_id=(0, 0), admitted_version=0, sampling=SamplingSpec(), limits=Limits(**limits))
    return asyncio.run(run)


@pytest.mark.parametrize(
    ("second", "kind", "match"),
    [
        (RuntimeError("boom"), EnvironmentFailure, r"ScriptedEnvironment.step raised RuntimeError on task t-1: boom"),
        (TimeoutError("mine"), EnvironmentFailure, "raised TimeoutError"),
        (asyncio.CancelledError(), EnvironmentFailure, "cancelled from within"),
        (RewardFailure("the grader hung", "timeout"), RewardFailure, "the grader hung"),
        (StepResult(reward=float("nan")), EnvironmentFailure, "reward nan"),
        (StepResult(reward=float("inf")), EnvironmentFailure, "reward inf"),
        (StepResult(reward=1e300), EnvironmentFailure, "reward 1e"),
        (StepResult(reward="1"), EnvironmentFailure, "reward of type str"),  # type: ignore[arg-type]
        (StepResult(reward=None), EnvironmentFailure, "reward of type NoneType"),  # type: ignore[arg-type]
        (("obs", 1.0, True, False, {}), EnvironmentFailure, "must return a StepResult, returned tuple"),
        (StepResult("text"), EnvironmentFailure, "list of messages, returned str"),  # type: ignore[arg-type]
        (StepResult([{"role": "user"}]), EnvironmentFailure, "content of type NoneType"),
        (StepResult([{"role": "user", "content": [{"type": "image"}]}]), EnvironmentFailure, "content of type list"),
        (StepResult([{"role": "narrator", "content": "x"}]), EnvironmentFailure, "role 'narrator'"),
        (StepResult(["x"]), EnvironmentFailure, "message 0 of .* is a str"),  # type: ignore[list-item]
        (StepResult([{"role": "assistant", "content": "", "tool_calls": [{"function": {}}]}]), EnvironmentFailure, "malformed tool_calls"),
    ],
)
def test_environment_failures_are_typed_and_counted(chatml, second: Any, kind: type[SystemFailure], match: str) -> None:
    environment = ScriptedEnvironment([say(reward=0.5), second])
    with pytest.raises(kind, match=match) as caught:
        episode(chatml, ScriptedGenerate([[90, chatml.end]] * 2), environment)
    assert caught.value.sampled_tokens == 4 and environment.closed == 1
    assert pickle.loads(pickle.dumps(caught.value)).sampled_tokens == 4, "the count survives the way to the driver"
    left = caught.value.trajectory
    assert left.finish == FinishReason.failed(caught.value.reason) and left.sampled_tokens == left.action_tokens == 4
    assert left.info["failure"] == str(caught.value) and left.info["messages"][-1]["role"] == "assistant"


@pytest.mark.parametrize(
    ("reply", "match"),
    [
        (EngineFailure("engine 2 died"), "engine 2 died"),
        (ValueError("odd"), "generate raised ValueError: odd"),
        (asyncio.CancelledError(), "cancelled"),
    ],
)
def test_engine_failures_are_typed_and_counted(chatml, reply: BaseException, match: str) -> None:
    environment = ScriptedEnvironment([say()])
    with pytest.raises(EngineFailure, match=match) as caught:
        episode(chatml, ScriptedGenerate([[90, 91, chatml.end], ([92], "drained"), reply]), environment)
    assert caught.value.sampled_tokens == 4 and environment.closed == 1
    assert caught.value.trajectory.segments[0].sampled_tokens == 4


@pytest.mark.parametrize(
    ("environment", "match"),
    [
        (ScriptedEnvironment(opening=OSError("disk")), "reset raised OSError"),
        (ScriptedEnvironment(opening=[]), "returned no message"),
        (ScriptedEnvironment(opening="hello"), "list of messages"),
        (ScriptedEnvironment(opening=5.0), "did not return within 0.1 s"),
        (ScriptedEnvironment(tools="calculator"), "list of tool schemas"),
        (ScriptedEnvironment(tools=[{"type": "function"}]), "without a function name"),
        (ScriptedEnvironment(tools=[{"name": "f", "parameters": {1, 2}}]), "not JSON"),
    ],
)
def test_an_opening_that_breaks_the_contract_is_a_failure(chatml, environment: ScriptedEnvironment, match: str) -> None:
    with pytest.raises(EnvironmentFailure, match=match) as caught:
        episode(chatml, ScriptedGenerate([]), environment, time_limit_s=0.1, answer_grace_s=0.05)
    assert caught.value.sampled_tokens == 0 and environment.closed == 1


def test_a_users_mistake_is_not_a_system_failure(chatml) -> None:
    environment = ScriptedEnvironment(opening=DataError("train.jsonl line 3: no column prompt"))
    with pytest.raises(DataError):
        episode(chatml, ScriptedGenerate([]), environment)
    assert environment.closed == 1


def test_a_failing_close_costs_no_data_and_hides_no_cause(chatml) -> None:
    got = episode(chatml, ScriptedGenerate([[90, chatml.end]]), ScriptedEnvironment([DONE], close_error=OSError("busy")))
    assert got.reward == 1.0 and got.metrics["close_failed"] == 1
    with pytest.raises(EnvironmentFailure, match="boom"):
        episode(chatml, ScriptedGenerate([[90, chatml.end]]), ScriptedEnvironment([RuntimeError("boom")], close_error=OSError("busy")))


@pytest.mark.parametrize("where", ["generate", "step", "reset"])
def test_cancellation_passes_and_closes_once(chatml, where: str) -> None:
    environment = ScriptedEnvironment([5.0, DONE] if where == "step" else [DONE], opening=5.0 if where == "reset" else None)
    generate = ScriptedGenerate([5.0, [90]] if where == "generate" else [[90, chatml.end]])

    async def main() -> None:
        run = run_episode(TASK, environment, chatml, generate, episode_id=(0, 0), admitted_version=0, sampling=SamplingSpec(), limits=Limits())
        task = asyncio.create_task(run)
        await asyncio.sleep(0.05)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(main())
    assert environment.closed == 1


def test_an_outer_time_limit_is_not_taken_for_ours(chatml) -> None:
    environment = ScriptedEnvironment([5.0])

    async def main() -> None:
        async with asyncio.timeout(0.05):
            await run_episode(
                TASK,
                environment,
                chatml,
                ScriptedGenerate([[90, chatml.end]]),
                episode_id=(0, 0),
                admitted_version=0,
                sampling=SamplingSpec(),
                limits=Limits(),
            )

    with pytest.raises(TimeoutError):
        asyncio.run(main())
    assert environment.closed == 1


def test_a_long_error_text_is_cut(chatml) -> None:
    with pytest.raises(EnvironmentFailure) as caught:
        episode(chatml, ScriptedGenerate([[90, chatml.end]]), ScriptedEnvironment([RuntimeError("x" * 10_000)]))
    assert len(str(caught.value)) < 500


def test_one_failure_leaves_its_neighbours_alone(chatml) -> None:
    """C77: a flaky environment fails its own episode, typed; the others' trajectories are what they would have been."""

    async def one(index: int) -> Trajectory | SystemFailure:
        results: list[Any] = [RuntimeError("flaky")] if index % 3 == 0 else [DONE]
        environment = ScriptedEnvironment(results, opening=[user(f"q{index}")])
        try:
            return await run_episode(
                TASK,
                environment,
                chatml,
                ScriptedGenerate([[90, chatml.end]]),
                episode_id=(index, 0),
                admitted_version=0,
                sampling=SamplingSpec(),
                limits=Limits(),
            )
        except SystemFailure as failure:
            return failure

    async def main() -> list[Trajectory | SystemFailure]:
        return await asyncio.gather(*(one(index) for index in range(9)))

    for index, outcome in enumerate(asyncio.run(main())):
        assert isinstance(outcome, EnvironmentFailure if index % 3 == 0 else Trajectory)
        if isinstance(outcome, Trajectory):
            assert outcome.segments[0].token_ids.tolist() == [*chatml.open([user(f"q{index}")], []), 90, chatml.end]
