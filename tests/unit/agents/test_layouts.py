"""What the families do beyond their text: calls and their errors, reasoning, thinking, end-of-turn ids, and what is refused."""

from __future__ import annotations

import asyncio
import json
import time
from typing import Any

import pytest
from agents_kit import TASK, ScriptedEnvironment, ScriptedGenerate, make_tokenizer, user
from family_kit import FAMILIES, WEATHER, call, family_renderer, family_tokenizer

from sao.agents.families import FAMILIES as FAMILIES_BY_NAME
from sao.agents.limits import Limits
from sao.agents.renderer import Fork, demonstration_tokens, load_renderer
from sao.agents.tool_calls import ECHO_CHARS, MAX_CALL_CHARS
from sao.agents.turns import run_episode
from sao.environment import Action, StepResult
from sao.errors import ConfigError, UserError
from sao.trajectory import SamplingSpec

LONG = "x " * 60_000


def parse(family: str, text: str, tools: list[Any] | None = None) -> Action:
    """Parse a turn given as the text the policy would sample, its tags as ids."""
    renderer: Any = family_renderer(family)
    from sao.agents.encoding import Own

    return renderer.parse([*renderer.encoder.compose([Own(text)]), renderer.stop_ids[0]], [WEATHER] if tools is None else tools)


def glm(name: str, *pairs: tuple[str, str], close: str = "</tool_call>") -> str:
    return f"<tool_call>{name}\n" + "".join(f"<arg_key>{key}</arg_key>\n<arg_value>{value}</arg_value>\n" for key, value in pairs) + close


KINDS = [
    ("qwen3", '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>', "ok"),
    ("qwen3", '<tool_call>\n{"name": "weather", "arguments": {"city": NaN}}\n</tool_call>', "invalid_json"),
    ("qwen3", '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}', "unclosed"),
    ("qwen3", '<tool_call>\n{"name": "wether", "arguments": {}}\n</tool_call>', "unknown_tool"),
    ("qwen3", '<tool_call>\n{"name": "weather", "arguments": {"days": 1}}\n</tool_call>', "bad_args"),
    ("qwen3", '<tool_call>\n{"name": "weather", "arguments": "Oslo"}\n</tool_call>', "bad_args"),
    ("llama3", '{"name": "weather", "parameters": {"city": "Oslo"}}', "ok"),
    ("llama3", ' \n<|python_tag|>{"name": "weather", "parameters": {"city": "}{\\"\\\\"}}', "ok"),
    ("llama3", '{"type": "function", "name": "weather", "parameters": {"city": "Oslo"}}', "ok"),
    ("llama3", '{"name": "weather", "arguments": {"city": "Oslo"}}', "ok"),
    ("llama3", '{"name": "weather", "parameters": {"city": "Oslo", "city": "Rome"}}', "invalid_json"),
    ("llama3", '{"name": weather, "parameters": {"city": "Oslo"}}', "invalid_json"),
    ("llama3", '{"name": "weather", "parameters": {"city": "Oslo"}', "unclosed"),
    ("llama3", '{"name": "weather", "parameters": {"city": "Oslo}}', "unclosed"),
    ("llama3", '{"name": "wether", "parameters": {}}', "unknown_tool"),
    ("llama3", '{"name": "weather", "parameters": [1]}', "bad_args"),
    ("glm45", glm("weather", ("city", "Oslo"), ("days", "3")), "ok"),
    ("glm45", glm("weather", ("city", "Oslo"), ("days", "three")), "invalid_json"),
    ("glm45", glm("weather", ("city", "Oslo"), ("more", '{"a": 1')), "invalid_json"),
    ("glm45", glm("weather", ("city", "Oslo"), ("city", "Rome")), "invalid_json"),
    ("glm45", glm(""), "invalid_json"),
    ("glm45", "<tool_call>weather\n<arg_key>city</arg_key>\n</tool_call>", "invalid_json"),
    ("glm45", "<tool_call>weather\n<arg_key>city</arg_key> is <arg_value>Oslo</arg_value>\n</tool_call>", "invalid_json"),
    ("glm45", "<tool_call>weather\n<arg_key>city\n<arg_value>Oslo</arg_value>\n</tool_call>", "invalid_json"),
    ("glm45", "<tool_call>weather\n<arg_value>Oslo</arg_value>\n</tool_call>", "invalid_json"),
    ("glm45", glm("weather", ("city", "Oslo"), close=""), "unclosed"),
    ("glm45", glm("wether", ("city", "Oslo")), "unknown_tool"),
    ("glm45", glm("weather", ("days", "3")), "bad_args"),
    ("glm45", glm("weather", ("city", "Oslo"), ("hourly", "1")), "bad_args"),
]


@pytest.mark.parametrize(("family", "turn", "kind"), KINDS)
def test_every_call_has_one_typed_outcome(family: str, turn: str, kind: str) -> None:
    action = parse(family, turn)
    assert [error.kind for error in action.parse_errors] == ([] if kind == "ok" else [kind])
    assert len(action.tool_calls) == (kind == "ok") and not action.text.strip()
    assert all(len(error.message) < 4 * ECHO_CHARS for error in action.parse_errors)


@pytest.mark.parametrize(
    ("family", "turn"),
    [
        ("qwen3", f'<tool_call>\n{{"name": "weather", "arguments": {{"city": "{LONG}"}}}}\n</tool_call>'),
        ("llama3", f'{{"name": "weather", "parameters": {{"city": "{LONG}"}}}}'),
        ("glm45", glm("weather", ("city", LONG))),
        ("glm45", glm(LONG)),
    ],
    ids=["qwen3", "llama3", "glm45-argument", "glm45-name"],
)
def test_a_call_too_long_is_not_echoed(family: str, turn: str) -> None:
    (error,) = parse(family, turn).parse_errors
    assert error.kind == "bad_args" and str(MAX_CALL_CHARS) in error.message and len(error.message) < 3 * ECHO_CHARS


def test_several_calls_and_the_text_around_them() -> None:
    one, two = '{"name": "weather", "parameters": {"city": "Oslo"}}', '{"name": "weather", "parameters": {"city": "Rome"}}'
    action = parse("llama3", f"Both:\n{one}; {two}\nDone.")
    assert [got.arguments["city"] for got in action.tool_calls] == ["Oslo", "Rome"] and action.text == "Both:\n\nDone."
    assert parse("llama3", f"{one}\n{two}").tool_calls == action.tool_calls
    action = parse("glm45", f"\n<think></think>\nBoth:\n{glm('weather', ('city', 'Oslo'))}\n{glm('weather', ('city', 'Rome'))}")
    assert [got.arguments["city"] for got in action.tool_calls] == ["Oslo", "Rome"] and action.text == "\n<think></think>\nBoth:\n\n"


@pytest.mark.parametrize("text", ['{"answer": 4}', 'It is {"name": "weather"}', "{", "4 {", '{"names": {"name": "x"}}', ""])
def test_an_answer_in_json_is_no_call_of_llamas(text: str) -> None:
    assert parse("llama3", text) == Action(text=text)


def test_hostile_turns_take_no_quadratic_time() -> None:
    began = time.process_time()
    for text in ("\n" * 200_000, " " * 200_000, '{"name":\n' * 50_000, '\\"' * 200_000, "<|python_tag|>\n" * 50_000):
        FAMILIES_BY_NAME["llama3"]().parse([text], [WEATHER])
    FAMILIES_BY_NAME["glm45"]().parse(["<tool_call>", *["<think>"] * 100_000, "<arg_key>", *["x"] * 100_000], [WEATHER])
    assert time.process_time() - began < 2


def test_glm_values_are_typed_by_the_schema() -> None:
    def schema(**properties: Any) -> dict[str, Any]:
        return {"name": "t", "parameters": {"type": "object", "properties": properties}}

    text, optional = {"type": "string"}, {"anyOf": [{"type": "string"}, {"type": "null"}]}
    table: list[tuple[dict[str, Any], str, Any]] = [
        (text, "5", "5"),
        (text, " true\n", " true\n"),
        (text, '"quoted"', '"quoted"'),
        ({"type": "integer"}, "5", 5),
        ({"type": "number"}, " 2.5 ", 2.5),
        ({"type": "boolean"}, "true", True),
        ({"type": "array"}, '["日本", {"a": null}]', ["日本", {"a": None}]),
        (optional, "null", None),
        (optional, "5", "5"),
        ({"type": ["string", "integer"]}, "5", 5),
        ({}, "5", 5),
        ({}, '"quoted"', '"quoted"'),
        ({}, "plain", "plain"),
    ]
    for kind, value, meant in table:
        action = parse("glm45", glm("t", ("a", value)), [schema(a=kind)])
        assert [got.arguments for got in action.tool_calls] == [{"a": meant}], (kind, value, action.parse_errors)


@pytest.mark.parametrize("family", ["qwen3", "glm45"])
def test_a_call_that_was_only_thought_of_is_not_made(family: str) -> None:
    made = '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>' if family == "qwen3" else glm("weather", ("city", "Oslo"))
    action = parse(family, f"<think>\nshould I {made}?\n</think>\n\nNo.")
    assert not action.tool_calls and not action.parse_errors and action.text.startswith("<think>") and action.text.endswith("No.")
    assert len(parse(family, f"<think>\nhm\n</think>\n\n{made}").tool_calls) == 1
    assert len(parse(family, f"<think>\nhm {made}").tool_calls) == 1, "reasoning that never closes hides nothing"
    assert len(parse(family, f"<think>{made}</think>{made}").tool_calls) == 1


@pytest.mark.parametrize("family", FAMILIES)
def test_every_end_of_turn_id_ends_a_turn(family: str) -> None:
    renderer = family_renderer(family)
    extra = load_renderer(family, family_tokenizer(family), extra_stop_ids=(65, renderer.stop_ids[0]))
    assert extra.stop_ids == (*renderer.stop_ids, 65)
    for stop in extra.stop_ids:
        assert extra.text([66, stop]) == extra.text([66]) and extra.parse([66, stop], [WEATHER]).text == extra.text([66])
    names = {"chatml": 1, "qwen3": 2, "llama3": 3, "glm45": 3}
    assert len(renderer.stop_ids) == names[family]


@pytest.mark.parametrize("family", FAMILIES)
def test_demonstrations_are_logged_like_episodes(family: str) -> None:
    renderer = family_renderer(family)
    asks = {"role": "assistant", "content": "", "tool_calls": [call("weather", json.dumps({"city": "Oslo"}))]}
    talk = [
        user("q"),
        asks,
        {"role": "tool", "content": "sunny"},
        {"role": "assistant", "content": "Sunny."},
        user("ok"),
        {"role": "assistant", "content": "."},
    ]
    ids, mask = demonstration_tokens(renderer, talk, [WEATHER])
    assert ids[: len(renderer.open(talk[:-1], [WEATHER]))] == renderer.open(talk[:-1], [WEATHER]), (
        "the history is written as it would have been sampled"
    )
    turns = [renderer.encode_turn(talk[index]) for index in (1, 3, 5)]
    assert [token for token, own in zip(ids, mask, strict=True) if own] == [token for turn in turns for token in turn]
    assert renderer.parse(turns[0], [WEATHER]).tool_calls[0].arguments == {"city": "Oslo"}


# --- reasoning and thinking ---


@pytest.mark.parametrize("family", ["qwen3", "glm45"])
def test_reasoning_template_opens_a_segment_per_user_turn(family: str) -> None:
    """A tool result extends; a user's turn strips what was thought before it, in a new segment; a written-out result is none of Qwen3's."""
    renderer: Any = family_renderer(family, "template")
    thinking = {"role": "assistant", "content": "ok", "reasoning_content": "hm"}
    turns = [renderer.encode_turn({**thinking, "tool_calls": [call("weather", {"city": "Oslo"})]}), *[renderer.encode_turn(thinking)] * 2]
    results = [StepResult([{"role": "tool", "content": "sunny"}]), StepResult([user("more")]), StepResult(terminated=True)]
    generate = ScriptedGenerate(turns)
    environment = ScriptedEnvironment(results, tools=[WEATHER])
    got = asyncio.run(
        run_episode(
            TASK, environment, renderer, generate, episode_id=(0, 0), admitted_version=0, sampling=SamplingSpec(), limits=Limits(max_tokens=10_000)
        )
    )
    assert got.metrics["segments/forked/reasoning"] == 1 and len(got.segments) == 2
    first, second = (renderer.encoder.decode(segment.token_ids.tolist()) for segment in got.segments)
    assert first.count("hm") == 2 and second.count("hm") == 1, "the new segment has only its own reasoning"
    assert second.index("more") < second.index("hm") and got.action_tokens == sum(map(len, generate.sampled))
    assert isinstance(renderer.delta(turns[0], [user("<tool_response>x</tool_response>")]), Fork) == (family == "glm45")
    assert not isinstance(family_renderer(family).delta(turns[0], [user("more")]), Fork), "keep appends"


def test_thinking_off_is_said_in_the_generation_prompt() -> None:
    qwen, glm45 = family_renderer("qwen3", thinking=False), family_renderer("glm45", thinking=False)
    assert qwen.text(qwen.generation()) == "<|im_start|>assistant\n<think>\n\n</think>\n\n"
    assert glm45.text(glm45.generation()) == "<|assistant|>\n<think></think>"
    assert family_renderer("qwen3").text(family_renderer("qwen3").generation()) == "<|im_start|>assistant\n"
    talk = [user("hi /nothink"), {"role": "assistant", "content": "yes"}, user("more")]
    turn = glm45.encode_turn(talk[1])
    assert glm45.text(turn) == "\nyes"
    assert [*glm45.open(talk[:1], []), *turn, *glm45.delta(turn, talk[2:])] == glm45.open(talk, [])
    text = glm45.text(glm45.open(talk, []))
    assert text == "[gMASK]<sop><|user|>\nhi /nothink<|assistant|>\n<think></think>\nyes<|user|>\nmore/nothink<|assistant|>\n<think></think>"
    nothink = glm45.encoder.control["/nothink"]  # type: ignore[attr-defined]
    assert glm45.open(talk, []).count(nothink) == 2 and family_renderer("glm45").open(talk, []).count(nothink) == 0
    with pytest.raises(UserError, match=r"set model\.thinking=true"):
        qwen.encode_turn({"role": "assistant", "content": "<think>hm</think>yes"})


def test_the_fallback_passes_the_switch_on() -> None:
    template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% if enable_thinking is false %}<think></think>{% endif %}{% endif %}"
    )
    tokenizer = make_tokenizer(template=template)
    off = load_renderer("template", tokenizer, thinking=False)
    assert off.text(off.generation()) == "<|im_start|>assistant\n<think></think>"
    assert off.delta([2], [user("x")])[-len(off.generation()) :] == off.generation()  # type: ignore[index]
    on = load_renderer("template", tokenizer)
    assert on.text(on.generation()) == "<|im_start|>assistant\n"
    with pytest.raises(ConfigError, match=r"model\.thinking=false does nothing with the chat template"):
        load_renderer("template", make_tokenizer(), thinking=False)


def test_a_template_that_rewrites_history_forks_and_is_counted() -> None:
    """It numbers the messages at the front: each prompt differs from the first token on, and every one is a whole rendering."""
    renderer = load_renderer("template", make_tokenizer(template="{{ messages | length }}" + make_tokenizer().chat_template))
    generate = ScriptedGenerate([[90, 2]] * 3)
    environment = ScriptedEnvironment([StepResult([user("a")]), StepResult([user("b")]), StepResult(terminated=True)])
    run = run_episode(
        TASK, environment, renderer, generate, episode_id=(0, 0), admitted_version=0, sampling=SamplingSpec(), limits=Limits(max_tokens=10_000)
    )
    got = asyncio.run(run)
    assert got.metrics["segments/forked/prefix_changed"] == 2 and len(got.segments) == 3
    history = [user("hello")]
    for request, segment, answer in zip(generate.requests, got.segments, ("a", "b", ""), strict=True):
        prompt = renderer.open(history, [])
        assert request.token_ids.tolist() == prompt and segment.token_ids.tolist() == [*prompt, 90, 2]
        history += [{"role": "assistant", "content": renderer.text([90])}, user(answer)]


# --- what is refused, and what auto chooses ---


@pytest.mark.parametrize(
    ("family", "options", "says"),
    [
        ("chatml", {"reasoning": "template"}, "model.reasoning=template does nothing with model.renderer=chatml"),
        ("llama3", {"reasoning": "template"}, "model.reasoning=template does nothing with model.renderer=llama3"),
        ("chatml", {"thinking": False}, "model.thinking=false does nothing with model.renderer=chatml"),
        ("llama3", {"thinking": False}, "model.thinking=false does nothing with model.renderer=llama3"),
        ("qwen3", {"reasoning": "template", "thinking": False}, "model.thinking=false needs model.reasoning=keep with model.renderer=qwen3"),
    ],
)
def test_a_switch_that_would_do_nothing_is_refused(family: str, options: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        load_renderer(family, family_tokenizer(family), **options)


def test_a_family_needs_its_tokens() -> None:
    with pytest.raises(UserError, match=r"model.renderer=glm45 needs \[gMASK\] and .* or use model.renderer=template"):
        load_renderer("glm45", family_tokenizer("qwen3"))


@pytest.mark.parametrize("family", FAMILIES)
def test_auto_knows_a_family_by_its_tokens(family: str) -> None:
    renderer = load_renderer("auto", family_tokenizer(family))
    assert (renderer.name == family and renderer.why.startswith("the tokenizer has <|")) or renderer.why.startswith("the tokenizer has [gMASK]")
    assert family_renderer(family).why == ""


def test_auto_believes_the_tokenizers_own_template() -> None:
    """Tokens alone say little: models with Qwen3's tokens and another layout exist."""
    alike = make_tokenizer().chat_template
    assert load_renderer("auto", family_tokenizer("qwen3", alike)).name == "qwen3", "a template that ignores tools, but agrees"
    other = load_renderer("auto", family_tokenizer("qwen3", alike.replace("assistant\n{% endif", "assistant\n<think>\n{% endif")))
    assert other.name == "template" and other.why == "the tokenizer's chat template is not that of qwen3"
    listed = "{% for t in tools or [] %}{{ t | tojson }}{% endfor %}" + alike
    assert load_renderer("auto", family_tokenizer("chatml", listed)).name == "template"
    broken = "{{ raise_exception('no system role') }}" + alike
    with pytest.raises(UserError, match="no system role"):
        load_renderer("auto", family_tokenizer("chatml", broken))
    unknown = load_renderer("auto", make_tokenizer(control=False, template="{% for m in messages %}{{ m.content }}<|endoftext|>{% endfor %}"))
    assert unknown.name == "template" and unknown.why == "the tokenizer has no known family's control tokens"


def test_auto_refuses_what_it_cannot_tell() -> None:
    with pytest.raises(UserError, match="the control tokens of none of chatml, qwen3, llama3, glm45 and no chat template"):
        load_renderer("auto", make_tokenizer(control=False, template=None))
    both = make_tokenizer()
    both.add_tokens(["<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|eom_id|>"])
    with pytest.raises(UserError, match="the control tokens of chatml and llama3; say which"):
        load_renderer("auto", both)
