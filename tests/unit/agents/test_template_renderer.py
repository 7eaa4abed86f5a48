"""The fallback for unknown chat templates: appends what it can prove, forks otherwise. C5, C6, C7, C9."""

from __future__ import annotations

import pytest
from agents_kit import CALCULATOR, CHATML_TEMPLATE, THINK_TEMPLATE, make_tokenizer, user
from hypothesis import given, settings
from hypothesis import strategies as st

from sao.agents.renderer import Fork, load_renderer
from sao.errors import UserError

TOKENIZER = make_tokenizer()
TEMPLATE = load_renderer("template", TOKENIZER)
CHATML = load_renderer("chatml", TOKENIZER)

spoken = st.lists(st.one_of(st.text(max_size=10), st.sampled_from(["<|im_end|>", "\n<|im_start|>", "SLOTq0z", "SLOTq1z", "日本"])), max_size=4).map(
    "".join
)


def with_template(template: str, **options: str):  # type: ignore[no-untyped-def]
    return load_renderer("template", make_tokenizer(template=template), **options)


@settings(max_examples=100)
@given(spoken, spoken, st.lists(st.integers(5, 400), max_size=5), st.booleans())
def test_on_a_chatml_template_it_gives_chatml_tokens(opening: str, answer: str, turn: list[int], closed: bool) -> None:
    turn = [*turn, CHATML.stop_ids[0]] if closed else turn
    assert TEMPLATE.open([user(opening)], []) == CHATML.open([user(opening)], [])
    messages = [{"role": "tool", "content": answer}, user(opening)]
    assert TEMPLATE.delta(turn, messages) == CHATML.delta(turn, messages)
    assert TEMPLATE.text(turn) == CHATML.text(turn)


def test_the_templates_close_is_a_stop_id_even_when_it_is_not_the_eos() -> None:
    tokenizer = make_tokenizer()
    tokenizer.eos_token = "<|endoftext|>"
    assert load_renderer("template", tokenizer).stop_ids == (2, 0)


def test_keep_appends_over_a_template_that_strips_reasoning() -> None:
    renderer = with_template(THINK_TEMPLATE)
    turn = renderer.encode_turn({"role": "assistant", "content": "<think>hm</think>4"})
    delta = renderer.delta(turn, [user("more")])
    assert delta == CHATML.delta(turn, [user("more")])


def test_template_forks_at_a_user_turn_and_extends_over_tool_results() -> None:
    renderer = with_template(THINK_TEMPLATE, reasoning="template")
    turn = renderer.encode_turn({"role": "assistant", "content": "<think>hm</think>4"})
    assert renderer.delta(turn, [user("more")]) == Fork("reasoning")
    assert renderer.delta(turn, [{"role": "tool", "content": "4"}]) == CHATML.delta(turn, [{"role": "tool", "content": "4"}])
    talk = [user("2+2"), {"role": "assistant", "content": "<think>hm\n</think>\n4"}, user("more")]
    text = renderer.encoder.decode(renderer.open(talk, []))
    assert text == "<|im_start|>user\n2+2<|im_end|>\n<|im_start|>assistant\n\n4<|im_end|>\n<|im_start|>user\nmore<|im_end|>\n<|im_start|>assistant\n"
    kept = renderer.encoder.decode(renderer.open(talk[:2], []))
    assert "<think>hm\n</think>\n4<|im_end|>" in kept


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        ("{{ messages | length }}" + CHATML_TEMPLATE, "prefix_changed"),
        (CHATML_TEMPLATE.replace("{{ m.content }}", "{{ m.content if m.role == 'assistant' else m.content.upper() }}"), "text_changed"),
        (
            CHATML_TEMPLATE.replace("{{ m.content }}", "{{ m.content }}{% if m.role == 'tool' %}{{ raise_exception('no') }}{% endif %}"),
            "template_error",
        ),
    ],
)
def test_what_cannot_be_appended_forks_with_its_reason(template: str, reason: str) -> None:
    assert with_template(template).delta([2], [{"role": "tool", "content": "ok"}]) == Fork(reason)


def test_a_trimming_template_trims_the_message() -> None:
    renderer = with_template(CHATML_TEMPLATE.replace("m.content", "m.content | trim"))
    assert renderer.open([user("  a b \n")], []) == CHATML.open([user("a b")], [])


def test_tools_and_fields_that_spell_control_tokens_stay_text() -> None:
    renderer = with_template("{% for t in tools or [] %}{{ t | tojson }}{% endfor %}" + CHATML_TEMPLATE)
    tool = {"type": "function", "function": {**CALCULATOR["function"], "description": 'say "<|im_end|>" \n'}}
    ids = renderer.open([user("q")], [tool])
    assert [token for token in ids if token in renderer.encoder.control_ids] == [1, 2, 1]
    assert '\\"<|im_end|>\\"' in renderer.encoder.decode(ids)


def test_a_template_that_loses_text_is_refused() -> None:
    renderer = with_template(CHATML_TEMPLATE.replace("{{ m.content }}", "{{ m.content if m.role != 'tool' else '' }}"))
    with pytest.raises(UserError, match="chatml"):
        renderer.open([{"role": "tool", "content": "lost"}], [])


def test_a_template_that_refuses_the_roles_says_which() -> None:
    renderer = with_template("{% if messages[0].role == 'system' %}{{ raise_exception('no system role') }}{% endif %}" + CHATML_TEMPLATE)
    with pytest.raises(UserError, match=r"roles system, user \(no system role\)"):
        renderer.open([{"role": "system", "content": "s"}, user("q")], [])
