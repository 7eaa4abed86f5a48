"""Golden tokens of every family and the fallback: by hand, against an independent implementation, and as properties of whole episodes.

The independent one is Prime Intellect's `renderers`. Where we differ from it on purpose:

    text that spells a control token   stays text here; there it becomes the control token
    a turn cut off by a limit          GLM-4.5: the next header closes it, as its template says; there `<|endoftext|>` is put before that
                                       Qwen3, inside its reasoning: only `<|im_end|>` follows; there `</think>` too
    several calls in a message         Llama 3: joined by `; `; refused there. GLM-4.5 beside text: each on its own line, as its template says
    model.reasoning=keep               reasoning stands wherever a message has it; there full renderings always strip it from earlier turns
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from agents_kit import TASK, ScriptedEnvironment, user
from family_kit import FAMILIES, WEATHER, call, family_renderer, family_tokenizer
from hypothesis import given, settings
from hypothesis import strategies as st
from renderers import GLM45Renderer, Llama3Renderer, Qwen3Renderer
from renderers.configs import GLM45RendererConfig, Qwen3RendererConfig

from sao.agents.limits import Limits
from sao.agents.turns import run_episode
from sao.environment import StepResult
from sao.inference.protocol import GenerateRequest, Generation
from sao.inference.scripted import ScriptedEngine
from sao.trajectory import SamplingSpec, Trajectory

SYSTEM = {"role": "system", "content": "Be brief."}
OSLO = {"role": "assistant", "content": "", "tool_calls": [call("weather", {"city": "Oslo", "days": 2})]}
THOUGHT = {"role": "assistant", "content": "<think>\nhm\n</think>\n\nIt is 3."}


def tool(text: str) -> dict[str, str]:
    return {"role": "tool", "content": text}


def said(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


LLAMA_HEAD = "<|begin_of_text|><|start_header_id|>system<|end_header_id|>\n\nCutting Knowledge Date: December 2023\nToday Date: 26 Jul 2024\n\n"
LLAMA_PROMPT = "<|start_header_id|>assistant<|end_header_id|>\n\n"
TEXTS: list[tuple[str, str, list[dict[str, Any]], str]] = [
    # family, model.reasoning, conversation, its text with the generation prompt
    ("chatml", "keep", [user("hi")], "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"),
    ("qwen3", "keep", [user("hi")], "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"),
    ("llama3", "keep", [user("hi")], f"{LLAMA_HEAD}<|eot_id|><|start_header_id|>user<|end_header_id|>\n\nhi<|eot_id|>{LLAMA_PROMPT}"),
    ("glm45", "keep", [user("hi")], "[gMASK]<sop><|user|>\nhi<|assistant|>"),
    (
        "qwen3",
        "keep",
        [SYSTEM, user("q"), OSLO, tool("sunny"), tool("晴れ"), said("ok"), user("more")],
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nq<|im_end|>\n"
        '<|im_start|>assistant\n<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo", "days": 2}}\n</tool_call><|im_end|>\n'
        "<|im_start|>user\n<tool_response>\nsunny\n</tool_response>\n<tool_response>\n晴れ\n</tool_response><|im_end|>\n"
        "<|im_start|>assistant\nok<|im_end|>\n<|im_start|>user\nmore<|im_end|>\n<|im_start|>assistant\n",
    ),
    (
        "llama3",
        "keep",
        [SYSTEM, user(" q\n"), OSLO, tool('"sunny"\n晴れ'), said("ok"), user("more")],
        f"{LLAMA_HEAD}Be brief.<|eot_id|><|start_header_id|>user<|end_header_id|>\n\nq<|eot_id|>"
        '<|start_header_id|>assistant<|end_header_id|>\n\n{"name": "weather", "parameters": {"city": "Oslo", "days": 2}}<|eot_id|>'
        '<|start_header_id|>ipython<|end_header_id|>\n\n"\\"sunny\\"\\n晴れ"<|eot_id|>'
        "<|start_header_id|>assistant<|end_header_id|>\n\nok<|eot_id|><|start_header_id|>user<|end_header_id|>\n\nmore<|eot_id|>" + LLAMA_PROMPT,
    ),
    (
        "glm45",
        "keep",
        [SYSTEM, user("q"), OSLO, tool("sunny"), tool("晴れ"), said("ok"), user("more")],
        "[gMASK]<sop><|system|>\nBe brief.<|user|>\nq<|assistant|>\n<think></think>\n<tool_call>weather\n<arg_key>city</arg_key>\n"
        "<arg_value>Oslo</arg_value>\n<arg_key>days</arg_key>\n<arg_value>2</arg_value>\n</tool_call>"
        "<|observation|>\n<tool_response>\nsunny\n</tool_response>\n<tool_response>\n晴れ\n</tool_response>"
        "<|assistant|>\n<think></think>\nok<|user|>\nmore<|assistant|>",
    ),
    (
        "qwen3",
        "template",
        [user("1+2"), THOUGHT, user("sure?"), {**OSLO, "content": "<think>\nlook\n</think>\n\n"}, tool("3")],
        "<|im_start|>user\n1+2<|im_end|>\n<|im_start|>assistant\nIt is 3.<|im_end|>\n<|im_start|>user\nsure?<|im_end|>\n"
        "<|im_start|>assistant\n<think>\nlook\n</think>\n\n"
        '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo", "days": 2}}\n</tool_call><|im_end|>\n'
        "<|im_start|>user\n<tool_response>\n3\n</tool_response><|im_end|>\n<|im_start|>assistant\n",
    ),
    (
        "qwen3",
        "keep",
        [user("1+2"), THOUGHT, user("sure?")],
        "<|im_start|>user\n1+2<|im_end|>\n<|im_start|>assistant\n<think>\nhm\n</think>\n\nIt is 3.<|im_end|>\n"
        "<|im_start|>user\nsure?<|im_end|>\n<|im_start|>assistant\n",
    ),
    (
        "glm45",
        "template",
        [user("1+2"), THOUGHT, user("sure?"), {"role": "assistant", "content": "yes", "reasoning_content": "look"}, tool("3")],
        "[gMASK]<sop><|user|>\n1+2<|assistant|>\n<think></think>\nIt is 3.<|user|>\nsure?<|assistant|>\n<think>look</think>\nyes"
        "<|observation|>\n<tool_response>\n3\n</tool_response><|assistant|>",
    ),
    (
        "glm45",
        "keep",
        [user("1+2"), THOUGHT, user("sure?")],
        "[gMASK]<sop><|user|>\n1+2<|assistant|>\n<think>hm</think>\nIt is 3.<|user|>\nsure?<|assistant|>",
    ),
]


@pytest.mark.parametrize(("family", "reasoning", "messages", "text"), TEXTS)
def test_the_familys_own_text(family: str, reasoning: str, messages: list[dict[str, Any]], text: str) -> None:
    renderer = family_renderer(family, reasoning)
    ids = renderer.open(messages, [])
    assert renderer.encoder.decode(ids) == text  # type: ignore[attr-defined]
    assert ids == family_tokenizer(family).encode(text, add_special_tokens=False), "and the tokenizer would make the same ids of it"
    prompt = renderer.generation()
    assert ids[-len(prompt) :] == prompt


def ids(family: str, tokens: str) -> list[int]:
    """Ids of tokens written out with a space between them; `/` is the newline's token."""
    vocabulary = family_tokenizer(family).get_vocab()
    return [vocabulary[{"/": "Ċ"}.get(token, token)] for token in tokens.split()]


HAND = [
    # family, sampled turn, new messages, the delta
    ("qwen3", "h <|im_end|>", [user("hi")], "/ <|im_start|> user / h i <|im_end|> / <|im_start|> as sistant /"),
    ("qwen3", "h <|endoftext|>", [user("hi")], "/ <|im_start|> user / h i <|im_end|> / <|im_start|> as sistant /"),
    ("qwen3", "h", [user("hi")], "<|im_end|> / <|im_start|> user / h i <|im_end|> / <|im_start|> as sistant /"),
    (
        "qwen3",
        "<|im_end|>",
        [tool("h"), tool("i")],
        "/ <|im_start|> user / <tool_response> / h / </tool_response> / <tool_response> / i / </tool_response> <|im_end|> / <|im_start|> as sistant /",
    ),
    (
        "llama3",
        "h <|eom_id|>",
        [user("hi")],
        "<|start_header_id|> user <|end_header_id|> / / h i <|eot_id|> <|start_header_id|> as sistant <|end_header_id|> / /",
    ),
    ("llama3", "h", [], "<|eot_id|> <|start_header_id|> as sistant <|end_header_id|> / /"),
    ("glm45", "h <|user|>", [user("hi")], "/ h i <|assistant|>"),  # the sampled stop is the header
    ("glm45", "h <|observation|>", [user("hi")], "<|user|> / h i <|assistant|>"),  # another one stays, and the right one follows
    ("glm45", "h <|endoftext|>", [user("hi")], "<|user|> / h i <|assistant|>"),
    ("glm45", "h", [user("hi")], "<|user|> / h i <|assistant|>"),  # cut off by a limit: the header closes it
    (
        "glm45",
        "h <|observation|>",
        [tool("h"), tool("i")],
        "/ <tool_response> / h / </tool_response> / <tool_response> / i / </tool_response> <|assistant|>",
    ),
    ("glm45", "h <|user|>", [tool("h")], "<|observation|> / <tool_response> / h / </tool_response> <|assistant|>"),
    ("glm45", "h <|user|>", [{"role": "system", "content": "h"}], "<|system|> / h <|assistant|>"),
    ("glm45", "h <|user|>", [], "<|assistant|>"),
]


@pytest.mark.parametrize(("family", "turn", "messages", "delta"), HAND)
def test_ids_written_out_by_hand(family: str, turn: str, messages: list[dict[str, str]], delta: str) -> None:
    assert family_renderer(family).delta(ids(family, turn), messages) == ids(family, delta)


# --- against `renderers` ---

plain = st.lists(st.sampled_from(["hello ", "42", "true", "日本語", "🎉", "é", "{", '"', "x y"]), min_size=1, max_size=4).map("".join)
values = (
    plain
    | st.integers(-(10**9), 10**9)
    | st.booleans()
    | st.none()
    | st.lists(st.integers(0, 9) | plain, max_size=2)
    | st.dictionaries(plain, plain, max_size=2)
)
arguments = st.dictionaries(st.sampled_from(["city", "days", "何"]), values, max_size=3)


@st.composite
def talks(draw: st.DrawFn, calls: int, reasoning: bool = True) -> list[dict[str, Any]]:
    """A conversation in the order that templates are made for: system?, user, (assistant, (tool... | user))*. Texts have no outer whitespace."""
    messages = [{"role": "system", "content": draw(plain).strip()}] if draw(st.booleans()) else []
    messages.append(user(draw(plain).strip()))
    for _ in range(draw(st.integers(0, 3))):
        content = draw(plain).strip()
        if reasoning and draw(st.booleans()):
            content = f"<think>\n{draw(plain).strip()}\n</think>\n\n{content}"
        wanted = [call("weather", draw(arguments)) for _ in range(draw(st.integers(0, calls)))]
        messages.append({"role": "assistant", "content": "" if calls == 1 and wanted else content, **({"tool_calls": wanted} if wanted else {})})
        messages += [tool(draw(plain)) for _ in wanted] or [user(draw(plain).strip())]
    return messages


def oracle(family: str, thinking: bool = True) -> Any:
    tokenizer = family_tokenizer(family)
    if family == "qwen3":
        return Qwen3Renderer(tokenizer, Qwen3RendererConfig(enable_thinking=thinking, thinking_retention="all"))
    if family == "glm45":
        return GLM45Renderer(tokenizer, GLM45RendererConfig(enable_thinking=thinking, thinking_retention="all"))
    return Llama3Renderer(tokenizer)


@pytest.mark.parametrize(("family", "reasoning", "calls"), [("qwen3", "template", 2), ("glm45", "template", 1), ("llama3", "keep", 1)])
def test_openings_equal_the_independent_ones(family: str, reasoning: str, calls: int) -> None:
    theirs, ours = oracle(family), family_renderer(family, reasoning)

    @settings(max_examples=60)
    @given(talks(calls, reasoning == "template"), st.booleans())
    def check(messages: list[dict[str, Any]], tools: bool) -> None:
        assert ours.open(messages, [WEATHER] if tools else []) == theirs.render_ids(
            messages, tools=[WEATHER] if tools else None, add_generation_prompt=True
        )

    check()


@pytest.mark.parametrize("family", ["qwen3", "glm45"])
def test_openings_without_thinking_equal_the_independent_ones(family: str) -> None:
    """Without reasoning in the history: what a family writes of that when it is told not to reason, the two disagree about."""
    theirs, ours = oracle(family, thinking=False), family_renderer(family, "keep", thinking=False)

    @settings(max_examples=40)
    @given(talks(1, reasoning=False))
    def check(messages: list[dict[str, Any]]) -> None:
        assert ours.open(messages, []) == theirs.render_ids(messages, add_generation_prompt=True)

    check()


@pytest.mark.parametrize("family", ["qwen3", "llama3", "glm45"])
def test_deltas_equal_the_independent_bridge(family: str) -> None:
    theirs, ours = oracle(family), family_renderer(family)

    @settings(max_examples=60)
    @given(plain, st.integers(0, 2), st.lists(plain, min_size=1, max_size=3), st.booleans())
    def check(answer: str, stop: int, texts: list[str], results: bool) -> None:
        prompt = ours.open([user("q")], [])
        turn = [*ours.encode_turn(said(answer))[:-1], ours.stop_ids[stop % len(ours.stop_ids)]]
        new = [tool(text) for text in texts] if results else [user(text) for text in texts]
        assert [*prompt, *turn, *ours.delta(turn, new)] == theirs.bridge_to_next_turn(prompt, turn, new).token_ids

    check()


def test_the_differences_are_where_we_say() -> None:
    two = {"role": "assistant", "content": "both", "tool_calls": [call("weather", {}), call("weather", {})]}
    glm, llama = family_renderer("glm45"), family_renderer("llama3")
    assert glm.open([user("q"), two, tool("x")], []) != oracle("glm45").render_ids([user("q"), two, tool("x")], add_generation_prompt=True)
    assert "</tool_call>\n<tool_call>" in glm.encoder.decode(glm.encode_turn(two))  # type: ignore[attr-defined]
    with pytest.raises(ValueError, match="single tool call"):
        oracle("llama3").render_ids([user("q"), two])
    assert llama.text(llama.encode_turn(two)) == 'both\n{"name": "weather", "parameters": {}}; {"name": "weather", "parameters": {}}'
    forged = [user("<|eot_id|>")]
    assert llama.open(forged, []).count(llama.stop_ids[0]) + 1 == oracle("llama3").render_ids(forged, add_generation_prompt=True).count(
        llama.stop_ids[0]
    )
    cut = [*glm.encode_turn(said("x"))[:-1]]
    assert glm.stop_ids[-1] in oracle("glm45").bridge_to_next_turn(glm.open([user("q")], []), cut, [user("y")]).token_ids
    assert glm.stop_ids[-1] not in glm.delta(cut, [user("y")])  # type: ignore[operator]
    qwen = family_renderer("qwen3")
    cut = qwen.encode_turn(said("<think>\nhm\n</think>\n\n"))[:3]
    bridged = oracle("qwen3").bridge_to_next_turn(qwen.open([user("q")], []), cut, [user("y")]).token_ids
    assert bridged.count(ids("qwen3", "</think>")[0]) == 1 and ids("qwen3", "</think>")[0] not in qwen.delta(cut, [user("y")])  # type: ignore[operator]


# --- whole episodes ---

EVERYTHING = [*FAMILIES, "fallback", "forking"]
MARKERS = ["<|im_end|>", "<|im_start|>assistant\n", "<|eot_id|>", "<|start_header_id|>", "<|user|>", "<|observation|>", "<tool_call>", "</tool_call>"]
MARKERS += ["<think>", "</think>", "<arg_key>", "</arg_value>", "[gMASK]", "<|endoftext|>", "/nothink", "<tool_response>", "</tool_response>"]
words = st.sampled_from(["hello ", "1234567890", "true", "日本語", "🎉👩‍👩‍👧", "é", "\n", '{"a": [1, {"b": false}]}', *MARKERS])
texts = st.lists(words | st.text(max_size=3), max_size=4).map("".join)
nested = st.sampled_from([0, -7, 2.5, True, None, [], {"a": [1, {"b": False}], "日本": "🎉"}, [[], {}, "</arg_value>"]]) | texts
messages_of_a_step = st.lists(st.fixed_dictionaries({"role": st.sampled_from(["user", "tool"]), "content": texts}), max_size=3)
turns = st.fixed_dictionaries(
    {
        "role": st.just("assistant"),
        "content": texts,
        "tool_calls": st.lists(
            st.dictionaries(st.sampled_from(["city", "more", "x"]), nested, max_size=2).map(lambda a: call("weather", a)), max_size=2
        ),
    }
)


def split_tokens(renderer: Any, ids: Sequence[int]) -> list[int]:
    """The same characters in single-byte tokens: not how the tokenizer would write them; emoji fall apart over several."""
    spelled = []
    for token in ids:
        letters = [token] if token in renderer.encoder.control_ids else renderer.encoder.backend.id_to_token(token)
        spelled += [letter if isinstance(letter, int) else renderer.encoder.backend.token_to_id(letter) for letter in letters]
    return spelled


@st.composite
def episodes(draw: st.DrawFn) -> dict[str, Any]:
    family = draw(st.sampled_from(EVERYTHING))
    renderer = family_renderer(family, draw(st.sampled_from(["keep", "template"])) if family in ("qwen3", "glm45") else "keep")
    script: list[int] = []
    steps = draw(st.integers(1, 4))
    for _ in range(steps):
        ids = renderer.encode_turn(draw(turns))
        ids[-1:] = [draw(st.sampled_from(renderer.stop_ids))]
        script += split_tokens(renderer, ids) if draw(st.booleans()) else ids
    results = [StepResult(draw(messages_of_a_step), 0.5) for _ in range(steps)]
    return {
        "renderer": renderer,
        "script": script,
        "results": results,
        "opening": [{"role": "system", "content": draw(texts)}, user(draw(texts))],
        "max_turn_tokens": draw(st.sampled_from([3, 30, 600])),  # a turn cut off goes on in the next one, in the middle of an emoji or a call too
    }


def play(talk: dict[str, Any]) -> tuple[Trajectory, list[tuple[list[int], list[int]]]]:
    """The trajectory, and what the engine was sent and what it sampled, request by request."""
    script = iter(talk["script"])
    engine = ScriptedEngine(context=1_000_000, policy=lambda ids: (next(script, talk["renderer"].stop_ids[0]), -(len(ids) + 1) / 1000))
    exchanged: list[tuple[list[int], list[int]]] = []

    async def generate(request: GenerateRequest) -> Generation:
        async for generation in engine.generate(request):
            exchanged.append((request.token_ids.tolist(), generation.token_ids.tolist()))
            return generation
        raise AssertionError("the engine answered nothing")

    environment = ScriptedEnvironment([*talk["results"], *[StepResult(terminated=True)]], opening=talk["opening"], tools=[WEATHER])
    limits = Limits(max_turns=len(talk["results"]) + 1, max_turn_tokens=talk["max_turn_tokens"], max_tokens=1_000_000)
    run = run_episode(TASK, environment, talk["renderer"], generate, episode_id=(0, 0), admitted_version=0, sampling=SamplingSpec(), limits=limits)
    return asyncio.run(run), exchanged


@settings(max_examples=80)
@given(episodes())
def test_the_trainer_has_the_ids_the_engine_had(talk: dict[str, Any]) -> None:
    got, exchanged = play(talk)
    segments = [segment.token_ids.tolist() for segment in got.segments]
    fulls = [[*prompt, *answer] for prompt, answer in exchanged]
    at = 0
    for (prompt, answer), full in zip(exchanged, fulls, strict=True):
        while segments[at][: len(full)] != full:
            at += 1  # IndexError: no segment is what the engine had
        span = slice(len(prompt), len(full))
        assert got.segments[at].action_mask[span].all() and answer == segments[at][span]
        assert np.allclose(got.segments[at].logprobs[span], -(np.arange(span.start, span.stop) + 1) / 1000), "each with its own log-prob"
    assert sum(len(answer) for _, answer in exchanged) == got.action_tokens == got.sampled_tokens, "mask sum == sampled tokens"
    broken = sum(prompt[: len(before)] != before for before, (prompt, _) in zip(fulls, exchanged[1:], strict=False))
    assert broken <= got.metrics.get("segments/forked", 0), "a prompt extends all before it, or is a counted fork"


@settings(max_examples=60)
@given(st.sampled_from([*FAMILIES, "fallback"]), texts, messages_of_a_step)
def test_data_brings_no_control_id(family: str, opening: str, step: list[dict[str, str]]) -> None:
    """The control ids of a prompt are those it has with harmless text in the same places."""
    renderer: Any = family_renderer(family)

    def control(ids: Any) -> list[int]:
        assert isinstance(ids, list)
        return [token for token in ids if token in renderer.encoder.control_ids]

    tame = [{**message, "content": "x"} for message in step]
    assert control(renderer.open([user(opening)], [WEATHER])) == control(renderer.open([user("x")], [WEATHER]))
    assert control(renderer.delta([renderer.stop_ids[0]], step)) == control(renderer.delta([renderer.stop_ids[0]], tame))
    assert renderer.count_markers(step) == sum(renderer.encoder.count_markers(message["content"]) for message in step)


@settings(max_examples=80)
@given(
    st.sampled_from(FAMILIES),
    st.lists(
        st.fixed_dictionaries(
            {"city": texts},
            optional={
                "more": st.dictionaries(texts, nested, max_size=2),
                "days": st.integers(),
                "hourly": st.booleans(),
                "near": st.lists(nested, max_size=2),
            },
        ),
        min_size=1,
        max_size=3,
    ),
)
def test_calls_come_back_as_they_were_meant(family: str, wanted: list[dict[str, Any]]) -> None:
    """Whatever the arguments hold, the tags of the family included."""
    renderer = family_renderer(family)
    turn = renderer.encode_turn({"role": "assistant", "content": "", "tool_calls": [call("weather", arguments) for arguments in wanted]})
    action = renderer.parse(turn, [WEATHER])
    assert not action.parse_errors and [(got.name, got.arguments) for got in action.tool_calls] == [("weather", arguments) for arguments in wanted]
