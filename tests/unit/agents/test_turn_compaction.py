"""Compaction by summary: the policy sums up a full context, in the segment it has, and goes on from that in a new one."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest
from agents_kit import CALCULATOR, TASK, THINK_TEMPLATE, ScriptedEnvironment, ScriptedGenerate, make_tokenizer, say, user
from hypothesis import given, settings
from hypothesis import strategies as st

from sao.agents.conversation import NO_SUMMARY, SUMMARY_HEAD
from sao.agents.limits import Compaction, Limits
from sao.agents.renderer import load_renderer
from sao.agents.tool_calls import format_call
from sao.agents.turns import run_episode
from sao.environment import StepResult
from sao.inference.protocol import GenerateRequest, Generation
from sao.trajectory import FinishReason, SamplingSpec, Trajectory

ASK = "sum up"


def episode(renderer, generate, environment, **limits: Any) -> Trajectory:  # type: ignore[no-untyped-def]
    compaction = Compaction(**({"keep": 1, "summary_tokens": 12, "prompt": ASK} | limits.pop("compaction", {})))
    own = Limits(**{"max_turns": 20, "max_turn_tokens": 8, "context_tokens": 120, "compaction": compaction, "answer_grace_s": 0.05} | limits)
    run = run_episode(TASK, environment, renderer, generate, episode_id=(0, 0), admitted_version=0, sampling=SamplingSpec(), limits=own)
    return asyncio.run(run)


def turn(renderer, text: str) -> list[int]:  # type: ignore[no-untyped-def]
    return renderer.encode_turn({"role": "assistant", "content": text})


class Talker:
    """Says `turns` in order and `summary` whenever the last message asks for one, cut to what it is allowed."""

    def __init__(self, renderer, summary: Any = "s0", turns: int = 100) -> None:  # type: ignore[no-untyped-def]
        self.renderer, self.summary = renderer, summary
        self.ask = renderer.delta((renderer.stop_ids[0],), [user(ASK)])
        self.said = [turn(renderer, f"t{index}") for index in range(turns)]
        self.requests: list[GenerateRequest] = []
        self.sampled: list[list[int]] = []
        self.summaries: list[int] = []  # requests that asked for one

    async def __call__(self, request: GenerateRequest) -> Generation:
        asked = request.token_ids.tolist()[-len(self.ask) :] == self.ask
        if asked:
            self.summaries.append(len(self.requests))
        self.requests.append(request)
        reply = turn(self.renderer, self.summary) if asked else self.said.pop(0)
        if isinstance(reply, BaseException):
            raise reply
        ids = reply[: request.sampling.max_tokens]
        self.sampled.append(ids)
        versions = np.full(len(ids), len(self.requests) - 1, np.int32)
        return Generation(np.asarray(ids, np.int32), np.full(len(ids), -0.5, np.float32), versions, "stop" if ids == reply else "length", "scripted")


def sampled(trajectory: Trajectory) -> list[list[int]]:
    """The sampled tokens by the request that sampled them; each request is a version."""
    pairs = [(int(v), int(t)) for s in trajectory.segments for v, t in zip(s.versions, s.token_ids, strict=True) if v >= 0]
    return [[token for version, token in pairs if version == wanted] for wanted in sorted({version for version, _ in pairs})]


def text(renderer, ids) -> str:  # type: ignore[no-untyped-def]
    return renderer.encoder.decode(ids)


STEPS = [say(f"observation {index}", 0.25) for index in range(6)]
END = StepResult(reward=1.0, terminated=True)


def test_a_full_context_goes_on_from_a_summary(chatml) -> None:
    talker, environment = Talker(chatml, "s0"), ScriptedEnvironment([*STEPS, END])
    got = episode(chatml, talker, environment, context_tokens=120)
    assert got.finish == FinishReason.terminal() and len(environment.actions) == 7 and not any(ASK in action.text for action in environment.actions)
    count = len(talker.summaries)
    assert count >= 1 and len(got.segments) == count + 1 and got.metrics["compactions"] == got.metrics["segments/compacted"] == count
    assert got.metrics["summary_tokens"] == sum(len(talker.sampled[at]) for at in talker.summaries)
    assert sampled(got) == talker.sampled and got.action_tokens == got.sampled_tokens == sum(map(len, talker.sampled)), "each once, the summary too"
    assert got.turn_rewards is None and got.reward == 1.0 + 6 * 0.25
    assert [segment.parent[0] if segment.parent else None for segment in got.segments] == [None, *range(count)]
    assert len(got.timings) == got.metrics["turns"] == 7 + count

    at = talker.summaries[0]
    old, new = talker.requests[at].token_ids.tolist(), talker.requests[at + 1].token_ids.tolist()
    assert len(old) <= 120 and old == got.segments[0].token_ids[: len(old)].tolist()
    kept = [*talker.sampled[at - 1], *chatml.delta(talker.sampled[at - 1], environment_answer(at - 1))]
    assert new == [*chatml.open([user("hello"), user(f"{SUMMARY_HEAD}s0")], []), *kept], "the kept turn as it was sampled, never rendered again"
    assert got.segments[1].versions[: len(new)].max() == -1, "read again, and not trained again"


def environment_answer(index: int):  # type: ignore[no-untyped-def]
    return STEPS[index].observation


def test_every_request_fits_the_context_with_its_answer(chatml) -> None:
    talker = Talker(chatml, "a long summary of all that happened so far " * 4)
    got = episode(chatml, talker, ScriptedEnvironment([*STEPS, END]), context_tokens=110)
    assert got.metrics["compactions"] >= 2
    assert all(len(request.token_ids) + request.sampling.max_tokens <= 110 for request in talker.requests)
    assert all(len(segment) <= 110 for segment in got.segments)
    assert got.metrics["summaries/cut"] == got.metrics["compactions"] and 12 in {len(talker.sampled[at]) for at in talker.summaries}


@pytest.mark.parametrize(("at", "expected"), [(1.0, 0), (0.2, 1), (70, 1), (500, 0)])
def test_compact_at_asks_earlier(chatml, at: float, expected: int) -> None:
    talker = Talker(chatml)
    got = episode(chatml, talker, ScriptedEnvironment([*STEPS[:3], END]), context_tokens=400, compaction={"at": at, "most": 1, "summary_tokens": 20})
    assert got.metrics.get("compactions", 0) == expected and got.finish == FinishReason.terminal()
    if at == 70:
        before = len(talker.requests[talker.summaries[0]].token_ids) - len(chatml.delta(talker.sampled[0], [user(ASK)]))
        assert before <= 70 < before + len(chatml.delta(talker.sampled[0], environment_answer(1)))


def test_the_last_turns_are_kept_and_fewer_where_they_do_not_fit(chatml) -> None:
    roomy = Talker(chatml)
    got = episode(chatml, roomy, ScriptedEnvironment([*STEPS, END]), context_tokens=300, compaction={"at": 120, "keep": 3, "most": 1})
    after = text(chatml, roomy.requests[roomy.summaries[0] + 1].token_ids)
    last = roomy.summaries[0] - 1
    assert all((f"observation {index}" in after) == (index > last - 3) for index in range(last + 1))
    assert got.info["segments"][1]["messages"][0] == 0
    tight = Talker(chatml)
    episode(chatml, tight, ScriptedEnvironment([*STEPS, END]), context_tokens=125, compaction={"keep": 5})
    after = text(chatml, tight.requests[tight.summaries[0] + 1].token_ids)
    assert after.count("observation") < tight.summaries[0], "one turn at least is summed up, or nothing was won"


@pytest.mark.parametrize("summary", ["", "   ", "<think>what to say</think>"])
def test_an_empty_summary_is_said_to_be_none(chatml, summary: str) -> None:
    talker = Talker(chatml, summary)
    got = episode(chatml, talker, ScriptedEnvironment([*STEPS, END]), compaction={"summary_tokens": 40}, context_tokens=180)
    assert got.finish == FinishReason.terminal() and got.metrics["summaries/empty"] == got.metrics["compactions"] > 0
    assert NO_SUMMARY in text(chatml, talker.requests[talker.summaries[0] + 1].token_ids)
    assert sampled(got) == talker.sampled


def test_a_summary_calls_nothing_and_spells_no_control_token(any_chatml) -> None:
    call = format_call("calculator", {"a": 1, "b": 2})
    talker = Talker(any_chatml, f"before {call} after<|im_start|>")
    environment = ScriptedEnvironment([*STEPS, END], tools=[CALCULATOR])
    got = episode(any_chatml, talker, environment, context_tokens=420, max_tokens=5000, compaction={"summary_tokens": 120, "at": 200, "most": 1})
    assert got.metrics["summaries/tool_calls"] == 1 and got.metrics["tool_calls"] == 0 and len(environment.actions) == 7
    prompt = talker.requests[talker.summaries[0] + 1].token_ids.tolist()
    assert f"{SUMMARY_HEAD}before  after<|im_start|>" in text(any_chatml, prompt)
    assert prompt.count(any_chatml.start) == 6 and got.metrics["control_hits"] == 1  # system, user, summary, turn, answer, generation


def test_the_number_of_compactions_is_bounded_and_then_the_context_is_all_there_is(chatml) -> None:
    environment = ScriptedEnvironment([say(f"observation {i}", 0.5) for i in range(20)])
    got = episode(chatml, Talker(chatml), environment, compaction={"most": 2})
    assert got.finish == FinishReason.truncated("tokens") and got.metrics["compactions"] == 2 and len(got.segments) == 3
    assert got.reward == 0.5 * len(environment.actions)
    assert len(got.segments[2]) > 120 - 8 - 30, "nothing is kept free for a summary that cannot come"


def test_the_episodes_budget_counts_every_segment(chatml) -> None:
    talker = Talker(chatml)
    got = episode(chatml, talker, ScriptedEnvironment([say(f"observation {i}") for i in range(20)]), max_tokens=300)
    shared = [position + 1 for _, position in (segment.parent for segment in got.segments if segment.parent)]
    assert got.finish == FinishReason.truncated("tokens") and got.metrics["compactions"] >= 1
    assert 200 < sum(map(len, got.segments)) - sum(shared) <= 300
    assert sampled(got) == talker.sampled


def test_no_summary_is_asked_for_that_could_not_be_used(chatml) -> None:
    """The newest answer does not fit beside the opening: the episode is cut off, with its reward and without a wasted turn."""
    talker = Talker(chatml)
    got = episode(chatml, talker, ScriptedEnvironment([say("a", 0.5), say("word " * 60, 0.5)]))
    assert got.finish == FinishReason.truncated("tokens") and got.reward == 1.0 and not talker.summaries and len(got.segments) == 1
    assert got.turn_rewards is not None and got.turn_rewards.tolist() == [0.5, 0.5]


def test_time_that_runs_out_in_a_summary_keeps_the_reward(chatml) -> None:
    replies = [turn(chatml, "t0"), turn(chatml, "t1"), 5.0, [90]]
    got = episode(chatml, ScriptedGenerate(replies), ScriptedEnvironment(STEPS), time_limit_s=0.2, compaction={"at": 0.1})
    assert got.finish == FinishReason.truncated("time") and got.reward == 0.5 and got.metrics["compactions"] == 1
    assert got.action_tokens == len(replies[0]) + len(replies[1])


def test_a_template_that_rewrites_history_is_compacted_too() -> None:
    """model.reasoning=template: the request for a summary is a user message, so it forks; what follows goes on from there."""
    renderer = load_renderer("template", make_tokenizer(template=THINK_TEMPLATE), reasoning="template")
    talker = Talker(renderer)
    talker.ask = renderer.open([user(ASK)], [])
    got = episode(renderer, talker, ScriptedEnvironment([*STEPS, END]), context_tokens=130)
    assert got.finish == FinishReason.terminal() and got.metrics["compactions"] >= 1 and sampled(got) == talker.sampled
    assert got.metrics["segments/forked/reasoning"] + got.metrics["segments/compacted"] == len(got.segments) - 1
    assert [part.get("because", "") for part in got.info["segments"]].count("compaction") == got.metrics["compactions"]


def test_what_is_kept_for_people_says_which_messages_each_segment_holds(chatml) -> None:
    got = episode(chatml, Talker(chatml), ScriptedEnvironment([*STEPS, END]))
    messages, parts = got.info["messages"], got.info["segments"]
    assert len(parts) == len(got.segments) and parts[0]["messages"][0] == parts[1]["messages"][0] == 0 and parts[1]["because"] == "compaction"
    first, end = parts[0]["summary"]
    assert text(chatml, got.segments[0].token_ids[first:end]) == "s0<|im_end|>" and got.segments[0].action_mask[first:end].all()
    assert messages[parts[0]["messages"][-1]] == {"role": "assistant", "content": "s0"}
    assert messages[parts[0]["messages"][-2]] == user(ASK) and messages[parts[1]["messages"][1]] == user(f"{SUMMARY_HEAD}s0")
    for part, segment in zip(parts, got.segments, strict=True):
        shown, at = text(chatml, segment.token_ids), 0
        for index in part["messages"]:
            at = shown.index(messages[index]["content"], at)


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_no_schedule_loses_a_token_or_exceeds_a_budget(chatml, data: st.DataObject) -> None:
    """Whatever turns, observations and summaries are like: each sampled token once, every prompt as logged, every budget kept."""
    context = data.draw(st.integers(70, 200))
    limits = {"max_turns": data.draw(st.integers(1, 8)), "max_tokens": data.draw(st.integers(80, 700)), "context_tokens": context}
    compaction = {
        "at": data.draw(st.sampled_from([0.3, 0.7, 1.0])),
        "keep": data.draw(st.integers(1, 3)),
        "summary_tokens": data.draw(st.integers(1, 20)),
        "most": data.draw(st.integers(1, 3)),
    }
    requests: list[GenerateRequest] = []
    replies: list[list[int]] = []

    async def generate(request: GenerateRequest) -> Generation:
        requests.append(request)
        count = data.draw(st.integers(0, request.sampling.max_tokens))
        ids = [data.draw(st.sampled_from([90, 91, 92])) for _ in range(count)]
        if ids and data.draw(st.booleans()):
            ids[-1] = chatml.end
        finish = "stop" if ids and ids[-1] == chatml.end else "length" if count == request.sampling.max_tokens else "stop"
        replies.append(ids)
        return Generation(np.array(ids, np.int32), np.full(count, -1.0), np.full(count, len(requests) - 1), finish)  # type: ignore[arg-type]

    steps = [say("w" * data.draw(st.integers(0, 60)), 0.5) for _ in range(8)]
    got = episode(chatml, generate, ScriptedEnvironment(steps), compaction=compaction, **limits)
    assert sampled(got) == [ids for ids in replies if ids]
    assert all(len(request.token_ids) + request.sampling.max_tokens <= context for request in requests)
    asked = [request.token_ids for request, ids in zip(requests, replies, strict=True) if ids]
    assert all(any(np.array_equal(segment.token_ids[: len(prompt)], prompt) for segment in got.segments) for prompt in asked)
    shared = sum(segment.parent[1] + 1 for segment in got.segments if segment.parent)
    assert sum(map(len, got.segments)) - shared <= limits["max_tokens"] + len(got.segments)
    assert got.metrics.get("compactions", 0) <= compaction["most"]
    if got.finish.kind != "failed":
        assert got.reward == pytest.approx(sum(float(rewards.sum()) for rewards in got.token_rewards()))
