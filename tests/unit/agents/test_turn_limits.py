"""Budgets are exact, and running out of one is a named truncation that keeps what was earned. C36."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest
from agents_kit import CALCULATOR, DONE, TASK, ScriptedEnvironment, ScriptedGenerate, say, user
from hypothesis import given, settings
from hypothesis import strategies as st

from sao.agents.limits import Limits
from sao.agents.renderer import load_renderer
from sao.agents.tool_calls import format_call
from sao.agents.turns import run_episode
from sao.environment import StepResult
from sao.errors import EngineFailure, EnvironmentFailure
from sao.inference.pool import EnginePool, LocalHandle
from sao.inference.protocol import GenerateRequest, Generation
from sao.inference.scripted import ScriptedEngine
from sao.trajectory import FinishReason, SamplingSpec, Trajectory

CALL = format_call("calculator", {"a": 1, "b": 2})


def episode(renderer, generate, environment, **limits: Any) -> Trajectory:  # type: ignore[no-untyped-def]
    own = Limits(**{"answer_grace_s": 0.05} | limits)
    run = run_episode(TASK, environment, renderer, generate, episode_id=(0, 0), admitted_version=0, sampling=SamplingSpec(), limits=own)
    return asyncio.run(run)


def opening(renderer) -> int:  # type: ignore[no-untyped-def]
    return len(renderer.open([user("hello")], []))


@pytest.mark.parametrize("produced", range(0, 9))
def test_a_request_given_back_continues_with_what_remains(chatml, produced: int) -> None:
    """C36: after k tokens the next call may sample cap - k, never the full cap again."""
    generate = ScriptedGenerate([(list(range(90, 90 + produced)), "drained"), list(range(100, 200))])
    got = episode(chatml, generate, ScriptedEnvironment([DONE]), max_turn_tokens=8, max_tokens=500)
    assert [request.sampling.max_tokens for request in generate.requests] == ([8, 8 - produced] if produced < 8 else [8])
    assert got.sampled_tokens == 8 == got.action_tokens
    if produced < 8:
        assert generate.requests[1].token_ids.tolist() == [*generate.requests[0].token_ids, *range(90, 90 + produced)]
        assert set(got.segments[0].versions[-8:].tolist()) == ({0, 1} if produced else {1})
    assert len({request.request_id for request in generate.requests}) == len(generate.requests)


def test_given_back_on_its_last_token_ends_the_turn(chatml) -> None:
    generate = ScriptedGenerate([([90, chatml.end], "drained")])
    assert episode(chatml, generate, ScriptedEnvironment([DONE])).finish == FinishReason.terminal()


def test_an_engine_that_only_gives_back_is_ended_by_the_clock(chatml) -> None:
    generate = ScriptedGenerate([([90], "drained"), *[([], "drained")] * 200])
    got = episode(chatml, generate, ScriptedEnvironment(), time_limit_s=0.2)
    assert got.finish == FinishReason.truncated("time") and got.sampled_tokens == 1 and len(generate.requests) < 20


def test_a_turn_cut_off_is_closed_by_us_and_calls_nothing(any_chatml) -> None:
    call = any_chatml.encode_turn({"role": "assistant", "content": "let me see " + CALL + CALL})
    cut = len(call) - 4
    environment = ScriptedEnvironment([say("go on"), DONE], tools=[CALCULATOR])
    generate = ScriptedGenerate([call, [91, any_chatml.end]])
    got = episode(any_chatml, generate, environment, max_turn_tokens=cut, max_tokens=1000)
    assert environment.actions[0].text.startswith("let me see ") and not environment.actions[0].tool_calls
    assert [error.kind for error in environment.actions[0].parse_errors] == ["unclosed", "unclosed"]
    assert got.metrics["forced_closes"] == 1 and got.metrics["tool_calls"] == 0
    segment = got.segments[0]
    end = int(segment.turn_ends()[0])
    assert segment.token_ids[end + 1] == any_chatml.end and not segment.action_mask[end + 1]
    assert [message["role"] for message in got.info["messages"]] == ["user", "assistant", "user", "tool", "tool", "assistant"]


def test_a_turn_cut_off_by_the_episodes_budget_ends_it(chatml) -> None:
    environment = ScriptedEnvironment([DONE])
    got = episode(chatml, ScriptedGenerate([list(range(90, 190))]), environment, max_tokens=opening(chatml) + 5)
    assert got.finish == FinishReason.truncated("tokens") and got.sampled_tokens == 5 and not environment.actions
    assert len(got.segments[0]) == opening(chatml) + 5


def test_the_context_of_the_model_is_a_budget_too(chatml) -> None:
    got = episode(chatml, ScriptedGenerate([list(range(90, 190))]), ScriptedEnvironment(), max_model_len=opening(chatml) + 3)
    assert got.finish == FinishReason.truncated("tokens") and got.sampled_tokens == 3


def test_an_engine_with_a_shorter_context_than_told_truncates(chatml) -> None:
    got = episode(chatml, ScriptedGenerate([([90, 91], "length")]), ScriptedEnvironment([DONE]))
    assert got.finish == FinishReason.truncated("tokens") and got.sampled_tokens == 2


@pytest.mark.parametrize("spare", [-1, 0, 1])
def test_an_observation_is_appended_only_with_room_for_a_token(chatml, spare: int) -> None:
    delta = len(chatml.delta([chatml.end], [user("next")]))
    room = opening(chatml) + 2 + delta + spare
    got = episode(chatml, ScriptedGenerate([[90, chatml.end], [91, 92, chatml.end]]), ScriptedEnvironment([say(reward=0.5)]), max_tokens=room)
    assert got.finish == FinishReason.truncated("tokens") and got.reward == 0.5
    assert got.sampled_tokens == (3 if spare == 1 else 2)
    assert got.segments[0].action_mask[-1], "no context is left hanging after the last sampled token"


def test_turn_limit_keeps_the_reward(chatml) -> None:
    environment = ScriptedEnvironment([say(reward=0.25), say(reward=0.5)])
    got = episode(chatml, ScriptedGenerate([[90, chatml.end]] * 2), environment, max_turns=2)
    assert got.finish == FinishReason.truncated("turns") and got.reward == 0.75 and len(environment.actions) == 2
    assert got.segments[0].action_mask[-1]


def test_the_environments_own_truncation_counts_as_turns(chatml) -> None:
    got = episode(chatml, ScriptedGenerate([[90, chatml.end]]), ScriptedEnvironment([say(reward=0.5, truncated=True)]))
    assert got.finish == FinishReason.truncated("turns") and got.reward == 0.5
    both = episode(chatml, ScriptedGenerate([[90, chatml.end]]), ScriptedEnvironment([say(truncated=True, terminated=True)]))
    assert both.finish == FinishReason.terminal()


def test_time_limit_while_sampling_keeps_the_reward(chatml) -> None:
    environment = ScriptedEnvironment([say(reward=0.5)])
    got = episode(chatml, ScriptedGenerate([[90, chatml.end], 5.0]), environment, time_limit_s=0.2)
    assert got.finish == FinishReason.truncated("time") and got.reward == 0.5 and environment.closed == 1
    assert got.timings[-1].output_tokens == 0 and got.timings[-1].generate_s > 0.05


def test_an_engine_that_ends_the_turn_on_time_keeps_its_tokens(chatml) -> None:
    generate = ScriptedGenerate([[90, chatml.end], ([91, 92], "time")])
    got = episode(chatml, generate, ScriptedEnvironment([say(reward=0.5)]), time_limit_s=9)
    assert got.finish == FinishReason.truncated("time") and got.reward == 0.5
    assert got.sampled_tokens == got.action_tokens == 4 and got.segments[0].token_ids[-2:].tolist() == [91, 92]
    assert 8 < generate.requests[1].time_limit_s <= generate.requests[0].time_limit_s <= 9


def test_an_answer_within_the_grace_counts_and_a_later_one_does_not(chatml) -> None:
    soon = ScriptedGenerate([0.2, ([90, 91], "time")])
    assert episode(chatml, soon, ScriptedEnvironment(), time_limit_s=0.1, answer_grace_s=5.0).sampled_tokens == 2
    late = ScriptedGenerate([5.0, ([90, 91], "time")])
    assert episode(chatml, late, ScriptedEnvironment(), time_limit_s=0.1).finish == FinishReason.failed("time_limit")


def test_an_environment_that_outlasts_the_episode_is_a_failure_and_never_a_reward_of_0(chatml) -> None:
    environment = ScriptedEnvironment([say(reward=0.5), 5.0])
    with pytest.raises(EnvironmentFailure, match=r"rollout\.time_limit_s") as caught:
        episode(chatml, ScriptedGenerate([[90, chatml.end]] * 2), environment, time_limit_s=0.2)
    assert caught.value.sampled_tokens == 4 and environment.closed == 1
    assert environment.context is not None and environment.context.deadline < float("inf")


def test_time_limit_before_the_first_token_is_a_failure(chatml) -> None:
    got = episode(chatml, ScriptedGenerate([5.0]), ScriptedEnvironment(), time_limit_s=0.1)
    assert got.finish == FinishReason.failed("time_limit") and "rollout.time_limit_s" in got.info["failure"]


def test_prompt_too_long_names_the_numbers(chatml) -> None:
    environment = ScriptedEnvironment(opening=[user("x " * 500)])
    generate = ScriptedGenerate([])
    got = episode(chatml, generate, environment, max_tokens=100, max_model_len=64)
    assert got.finish == FinishReason.failed("prompt_too_long") and environment.closed == 1 and not generate.requests
    assert "t-1" in got.info["failure"] and "rollout.max_tokens=100" in got.info["failure"] and "engine.max_model_len=64" in got.info["failure"]
    assert str(len(got.segments[0])) in got.info["failure"]
    exact = episode(chatml, generate, ScriptedEnvironment(), max_tokens=opening(chatml))
    assert exact.finish == FinishReason.failed("prompt_too_long")


@pytest.mark.parametrize("reply", [[], ([], "length")])
def test_an_answer_of_no_tokens_is_a_failure(chatml, reply: Any) -> None:
    got = episode(chatml, ScriptedGenerate([reply]), ScriptedEnvironment([DONE]))
    assert got.finish == FinishReason.failed("no_action_tokens") and got.info["failure"].startswith("0 tokens were sampled")


def test_an_empty_turn_between_others_moves_its_reward_to_the_turn_before(chatml) -> None:
    generate = ScriptedGenerate([[90, chatml.end], [], [91, chatml.end]])
    got = episode(chatml, generate, ScriptedEnvironment([say(reward=0.5), say(reward=0.25), DONE]))
    assert got.turn_rewards is not None and got.turn_rewards.tolist() == [0.75, 1.0]


def test_long_observations_are_cut_with_a_marker(chatml) -> None:
    environment = ScriptedEnvironment([StepResult([user("y" * 5000), user("short")]), DONE])
    got = episode(chatml, ScriptedGenerate([[90, chatml.end], [91, chatml.end]]), environment, observation_limit=60)
    text = got.info["messages"][2]["content"]
    assert len(text) == 60 and text.startswith("yyy") and text.endswith("\n[cut: 4971 of 5000 characters]")
    assert got.info["messages"][3]["content"] == "short" and got.metrics["observations_cut"] == 1


@pytest.mark.parametrize(
    "broken",
    [
        Generation(np.arange(9), np.zeros(9), np.zeros(9), "length"),
        Generation(np.arange(2), np.zeros(1), np.zeros(2), "stop"),
        Generation(np.arange(2), np.zeros(2), np.zeros(3), "stop"),
        Generation(np.arange(2), np.zeros(2), np.zeros(2), None),
        Generation(np.arange(2), np.zeros(2), -np.ones(2), "stop"),
    ],
)
def test_an_engine_that_breaks_its_promise_has_failed(chatml, broken: Generation) -> None:
    with pytest.raises(EngineFailure):
        episode(chatml, ScriptedGenerate([broken]), ScriptedEnvironment([DONE]), max_turn_tokens=8)


@settings(max_examples=50)
@given(st.data())
def test_no_schedule_exceeds_a_budget(data: st.DataObject) -> None:
    """C36 as a property: drains, cuts and stops in any order; total, turn and context caps hold, and every request fits what remained."""
    renderer = _renderer()
    start = opening(renderer)
    limits = {
        "max_turns": data.draw(st.integers(1, 4)),
        "max_turn_tokens": data.draw(st.integers(1, 12)),
        "max_tokens": start + data.draw(st.integers(1, 60)),
        "max_model_len": data.draw(st.sampled_from([0, start + 20, start + 45])),
    }
    requests: list[GenerateRequest] = []

    async def generate(request: GenerateRequest) -> Generation:
        requests.append(request)
        cap = request.sampling.max_tokens
        count = data.draw(st.integers(0, cap))
        ids = [data.draw(st.sampled_from([90, 91, 92])) for _ in range(count)]
        finish = "length" if count == cap else data.draw(st.sampled_from(["stop", "drained"]))
        return Generation(np.array(ids, np.int32), np.full(count, -1.0), np.zeros(count, int), finish)  # type: ignore[arg-type]

    got = episode(renderer, generate, ScriptedEnvironment([say(reward=0.5)] * 4), **limits)
    assert len(got.segments[0]) <= limits["max_tokens"] and len(got.segments[0]) <= (limits["max_model_len"] or 10**6)
    assert all(timing.output_tokens <= limits["max_turn_tokens"] for timing in got.timings) and len(got.timings) <= limits["max_turns"]
    for request in requests:
        assert 0 < request.sampling.max_tokens <= limits["max_tokens"] - len(request.token_ids)
    if got.finish.kind != "failed":
        assert got.reward == pytest.approx(sum(got.token_rewards()[0]))


_RENDERER: list[Any] = []


def _renderer():  # type: ignore[no-untyped-def]
    if not _RENDERER:
        from agents_kit import make_tokenizer

        _RENDERER.append(load_renderer("chatml", make_tokenizer()))
    return _RENDERER[0]


@pytest.mark.parametrize("counted", [False, True])
def test_time_without_an_engine_is_not_the_episodes(chatml, counted: bool) -> None:
    """The only engine dies in a turn and its replacement needs three times the episode's limit."""

    def dies(request: GenerateRequest, tokens: int) -> None:
        if tokens:
            raise EngineFailure("killed")

    async def main() -> Trajectory:
        pool = EnginePool([LocalHandle(ScriptedEngine("engine-0", fault=dies), "engine-0")])
        outage = {} if counted else {"outage_s": pool.outage_s}
        asyncio.get_running_loop().call_later(0.9, lambda: pool.admit(LocalHandle(ScriptedEngine("engine-0"), "engine-0")))
        limits = Limits(time_limit_s=0.3, answer_grace_s=0.05)
        return await run_episode(
            TASK,
            ScriptedEnvironment([DONE]),
            chatml,
            pool.generate,
            episode_id=(0, 0),
            admitted_version=0,
            sampling=SamplingSpec(),
            limits=limits,
            **outage,
        )

    assert asyncio.run(main()).finish == (FinishReason.failed("time_limit") if counted else FinishReason.terminal())
