"""Model families through the gateway: calls of each family's own form, and clients that leave the reasoning out of what they send back."""

from __future__ import annotations

import asyncio
import json

import pytest
from agents_kit import ScriptedGenerate
from family_kit import WEATHER, call, family_renderer
from gateway_kit import rows, terms

from sao.agents.tool_calls import THINK_END
from sao.gateway.messages import ChatRequest, Refusal
from sao.gateway.session import Session

ASK = [{"role": "system", "content": "help"}, {"role": "user", "content": "weather?"}]


def session_of(family, said):
    renderer = family_renderer(family)
    return Session(terms(), renderer, ScriptedGenerate([renderer.encode_turn(message) for message in said]))


def without_reasoning(message):
    return {**message, "content": (message["content"] or "").partition(THINK_END)[2] or message["content"]}


def as_javascript_spells_it(message):
    """JSON.parse and JSON.stringify: 2.0 becomes 2, keys keep no spaces, identifiers are the client's own."""
    calls = []
    for index, one in enumerate(message["tool_calls"]):
        arguments = json.loads(one["function"]["arguments"], parse_float=lambda text: int(float(text)) if float(text).is_integer() else float(text))
        function = {"name": one["function"]["name"], "arguments": json.dumps(arguments, separators=(",", ":"))}
        calls.append({**one, "id": f"own-{index}", "function": function})
    return {**message, "tool_calls": calls}


@pytest.mark.parametrize("family", ["chatml", "qwen3", "llama3", "glm45"])
@pytest.mark.parametrize("echo", [lambda message: message, without_reasoning])
def test_a_call_and_its_result_are_one_row_whatever_the_client_makes_of_the_reasoning(family, echo):
    thought = "<think>\nmaybe rain\n</think>\n\n" if family in ("qwen3", "glm45") else ""
    made = {"role": "assistant", "content": f"{thought}I look", "tool_calls": [call("weather", {"city": "Oslo", "more": {"step": 2.0}})]}
    session = session_of(family, [made, {"role": "assistant", "content": f"{thought}rain"}, {"role": "assistant", "content": "bye"}])

    async def play():
        messages = list(ASK)
        for follows in ({"role": "tool", "content": "rain"}, {"role": "user", "content": "thanks"}):
            answer = await session.chat(ChatRequest(messages, [WEATHER]))
            said = echo(answer.message())
            assert (THINK_END in (said["content"] or "")) == (bool(thought) and echo is not without_reasoning)
            if said.get("tool_calls"):
                assert json.loads(said["tool_calls"][0]["function"]["arguments"]) == {"city": "Oslo", "more": {"step": 2.0}}
                said = as_javascript_spells_it(said)
            messages += [said, follows]
        await session.chat(ChatRequest(messages, [WEATHER]))

    asyncio.run(play())
    (row,) = rows(session)
    assert session.counts["tool_calls"] == 1 and not session.counts["gateway/forks"]
    assert session.renderer.text(row.token_ids.tolist()).count("maybe rain") == (2 if thought else 0)


def test_turns_that_differ_in_their_reasoning_alone_go_on_as_their_own_and_an_edited_one_is_a_fork():
    said = [{"role": "assistant", "content": f"<think>\n{thought}\n</think>\n\nyes"} for thought in ("one", "two")]
    session = session_of("qwen3", [*said, *[{"role": "assistant", "content": "bye"}] * 3])

    async def play():
        first, second = [(await session.chat(ChatRequest(ASK))).message() for _ in range(2)]
        edited = {**first, "content": first["content"].replace("one", "three")}
        for echoed in (second, first, edited):
            await session.chat(ChatRequest([*ASK, echoed, {"role": "user", "content": "and?"}]))

    asyncio.run(play())
    one, two, after_two, after_one, fork = session.tree.turns
    assert after_two.parent is two and after_one.parent is one and fork.parent is None and session.counts["gateway/forks"] == 2


def test_the_setting_that_bounds_the_context_is_the_one_that_is_named():
    for limits, key in (({"context_tokens": 40}, "rollout.context_tokens=40"), ({"max_model_len": 40}, "engine.max_model_len=40")):
        session = Session(terms(**limits), family_renderer("chatml"), ScriptedGenerate([]))
        for length in (100, 100_000):  # encoded, and too long for that
            with pytest.raises(Refusal, match=key) as refused:
                asyncio.run(session.chat(ChatRequest([{"role": "user", "content": "x " * length}])))
            assert refused.value.code == "context_length_exceeded" and session.cut == "tokens"


def test_what_cannot_fit_is_refused_unencoded():
    class Unasked:
        def __getattr__(self, name):
            raise AssertionError(f"{name} was asked of the renderer")

    session = Session(terms(max_tokens=100), Unasked(), ScriptedGenerate([]))
    with pytest.raises(Refusal, match=r"rollout\.max_tokens") as refused:
        asyncio.run(session.chat(ChatRequest([{"role": "user", "content": "x" * 2000}])))
    assert refused.value.code == "context_length_exceeded"
