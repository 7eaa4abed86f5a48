"""Hypothesis conversations: whatever is said, called, cut or forged, the trainer's ids are the engine's ids."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
from agents_kit import CALCULATOR, TASK, THINK_TEMPLATE, ScriptedEnvironment, ScriptedGenerate, make_tokenizer, user
from hypothesis import given, settings
from hypothesis import strategies as st

from sao.agents.limits import Limits
from sao.agents.renderer import Renderer, load_renderer
from sao.agents.tool_calls import format_call
from sao.agents.turns import run_episode
from sao.environment import StepResult
from sao.trajectory import SamplingSpec

RENDERERS: dict[str, Renderer] = {tags: load_renderer("chatml", make_tokenizer(tags)) for tags in ("special", "added", "text")}
RENDERERS["template"] = load_renderer("template", make_tokenizer())
RENDERERS["forking"] = load_renderer("template", make_tokenizer(template=THINK_TEMPLATE), reasoning="template")

words = st.sampled_from(
    [
        "hello ",
        "1234567890",
        "true",
        "日本語",
        "🎉👩‍👩‍👧",
        "é",
        "\n",
        "<think>hm</think>",
        "<|im_end|>",
        "<|im_start|>assistant\n",
        "<tool_call>",
        "</tool_call>",
    ]
)
texts = st.lists(words | st.text(max_size=6), max_size=5).map("".join)
values = st.integers(-(10**6), 10**6) | st.booleans() | st.none() | st.text(max_size=5)
calls = st.dictionaries(st.sampled_from(["a", "b", "c"]), values, max_size=3).map(lambda arguments: format_call("calculator", arguments))
spoken = st.lists(texts | calls, max_size=3).map("".join)
observations = st.lists(st.fixed_dictionaries({"role": st.sampled_from(["user", "tool"]), "content": texts}), max_size=3)


@st.composite
def conversation(draw: st.DrawFn) -> dict[str, Any]:
    renderer = RENDERERS[draw(st.sampled_from(sorted(RENDERERS)))]
    replies: list[Any] = []
    for _ in range(draw(st.integers(1, 5))):
        ids = renderer.encode_turn({"role": "assistant", "content": draw(spoken)})
        if draw(st.booleans()):
            ids = [token for token in ids[:-1] for token in _split(renderer, token)] + ids[-1:]
        if draw(st.booleans()):
            at = draw(st.integers(0, len(ids) - 1))
            replies.append((ids[:at], "drained"))
            ids = ids[at:]
        replies.append(ids if draw(st.booleans()) else ids[:-1])
    results = [StepResult(draw(observations), draw(st.sampled_from([0.0, 0.5, -1.0]))) for _ in replies]
    return {
        "renderer": renderer,
        "replies": replies,
        "results": [*results[:-1], StepResult(draw(observations), 1.0, terminated=True)],
        "opening": [{"role": "system", "content": draw(texts)}, user(draw(texts))],
        "max_turn_tokens": draw(st.sampled_from([4, 40, 500])),
    }


def _split(renderer: Any, token: int) -> list[int]:
    """The same characters in single-byte tokens: not how the tokenizer would write them."""
    if token in renderer.encoder.control_ids:
        return [token]
    spelled = renderer.encoder.backend.id_to_token(token)
    return [renderer.encoder.backend.token_to_id(character) for character in spelled]


@settings(max_examples=60)
@given(conversation())
def test_trainer_ids_are_engine_ids(talk: dict[str, Any]) -> None:
    renderer = talk["renderer"]
    generate = ScriptedGenerate([*talk["replies"], *[[90, renderer.stop_ids[0]]] * 10])
    environment = ScriptedEnvironment([*talk["results"], *[StepResult(terminated=True)] * 10], opening=talk["opening"], tools=[CALCULATOR])
    run = run_episode(
        TASK,
        environment,
        renderer,
        generate,
        episode_id=(0, 0),
        admitted_version=0,
        sampling=SamplingSpec(),
        limits=Limits(max_turns=6, max_turn_tokens=talk["max_turn_tokens"], max_tokens=100_000),
    )
    got = asyncio.run(run)

    everything = [token for answer in generate.sampled for token in answer]
    logged = [token for segment in got.segments for token in segment.token_ids[segment.versions >= 0].tolist()]
    assert logged == everything, "each sampled token once, in order"
    assert got.action_tokens == len(everything) == got.sampled_tokens, "mask sum == sampled tokens"

    segment_of = 0
    for request, answer in zip(generate.requests, generate.sampled, strict=True):
        prompt = request.token_ids.tolist()
        full = [*prompt, *answer]
        if not answer:
            continue  # a trailing segment in which nothing was sampled is left out
        while got.segments[segment_of].token_ids[: len(full)].tolist() != full:
            segment_of += 1
        segment = got.segments[segment_of]
        at = slice(len(prompt), len(full))
        assert segment.action_mask[at].all(), "the engine sampled it right here"
        assert np.allclose(segment.logprobs[at], -(np.arange(at.start, at.stop) + 1) / 1000), "with its own log-prob"
    for segment in got.segments:
        assert np.isfinite(segment.logprobs[segment.action_mask]).all()
    opened = 1 + got.metrics.get("segments/forked", 0)
    assert len(got.segments) == opened or (len(got.segments) < opened and not generate.sampled[-1])


@settings(max_examples=60)
@given(st.sampled_from(["special", "added", "text"]), texts, observations)
def test_context_holds_only_the_scaffolds_control_ids(tags: str, opening: str, answer: list[dict[str, str]]) -> None:
    renderer = RENDERERS[tags]
    start, end = renderer.encoder.control["<|im_start|>"], renderer.encoder.control["<|im_end|>"]  # type: ignore[attr-defined]
    control = renderer.encoder.control_ids  # type: ignore[attr-defined]
    assert [token for token in renderer.open([user(opening)], [CALCULATOR]) if token in control] == [start, end] * 2 + [start]
    delta = renderer.delta([end], answer)
    assert isinstance(delta, list)
    assert [token for token in delta if token in control] == [start, end] * len(answer) + [start]
