"""Tool calls are read strictly, and what goes back to the model is bounded. C78."""

from __future__ import annotations

import json

import pytest
from agents_kit import CALCULATOR
from hypothesis import given, settings
from hypothesis import strategies as st

from sao.agents.tool_calls import CLOSE_TAG, ECHO_CHARS, MAX_CALL_CHARS, OPEN_TAG, parse_items
from sao.environment import Action

RICH = {
    "name": "rich",
    "parameters": {
        "type": "object",
        "properties": {
            "s": {"type": "string"},
            "n": {"type": "number"},
            "i": {"type": "integer"},
            "b": {"type": "boolean"},
            "o": {"type": "object"},
            "l": {"type": "array"},
            "z": {"type": "null"},
            "sn": {"type": ["string", "null"]},
            "e": {"type": "string", "enum": ["x", "y"]},
            "any": {},
        },
    },
}
OPEN_ENDED = {"name": "open_ended", "parameters": {"type": "object", "properties": {"a": {}}, "additionalProperties": True}}
FREE = {"name": "free"}
TOOLS = [CALCULATOR, RICH, OPEN_ENDED, FREE]


def parse(payload: str) -> Action:
    return parse_items([OPEN_TAG, payload, CLOSE_TAG], TOOLS)


def call(name: str, arguments: object) -> str:
    return json.dumps({"name": name, "arguments": arguments})


@pytest.mark.parametrize(
    ("payload", "kind"),
    [
        ("", "invalid_json"),
        ('{"name": "calculator", "arguments": {"a": 1', "invalid_json"),
        ("null", "invalid_json"),
        ("[1, 2]", "invalid_json"),
        ('"calculator"', "invalid_json"),
        ("17", "invalid_json"),
        ("true", "invalid_json"),
        ("{}", "invalid_json"),
        ('{"name": 3, "arguments": {}}', "invalid_json"),
        ('{"name": "", "arguments": {}}', "invalid_json"),
        ('{"name": "calculator", "arguments": {"a": NaN, "b": 1}}', "invalid_json"),
        ('{"name": "calculator", "arguments": {"a": -Infinity, "b": 1}}', "invalid_json"),
        ('{"name": "rich", "arguments": {"n": 1e999}}', "invalid_json"),
        ('{"name": "calculator", "arguments": {"a": 1, "a": 2, "b": 1}}', "invalid_json"),
        ('{"name": "rich", "arguments": {"s": "\\ud800"}}', "invalid_json"),
        ('{"name": "rich", "arguments": {"i": ' + "9" * 5000 + "}}", "invalid_json"),
        ('{"name": "rich", "arguments": {"l": ' + "[" * 40 + "]" * 40 + "}}", "invalid_json"),
        ("[" * 90_000, "invalid_json"),
        ("{} {}", "invalid_json"),
        ("{'name': 'calculator'}", "invalid_json"),
        (call("calc", {}), "unknown_tool"),
        (call("Calculator", {"a": 1, "b": 2}), "unknown_tool"),
        (call("x" * 10_000, {}), "unknown_tool"),
        ('{"name": "calculator"}', "bad_args"),
        (call("calculator", None), "bad_args"),
        (call("calculator", [1, 2]), "bad_args"),
        (call("calculator", '{"a": 1, "b": 2}'), "bad_args"),
        (call("calculator", {"a": 1}), "bad_args"),
        (call("calculator", {"a": 1, "b": "2"}), "bad_args"),
        (call("calculator", {"a": 1, "b": True}), "bad_args"),
        (call("calculator", {"a": 1, "b": 2.0}), "bad_args"),
        (call("calculator", {"a": 1, "b": 2, "c": 3}), "bad_args"),
        (call("rich", {"e": "z"}), "bad_args"),
        (call("rich", {"b": 1}), "bad_args"),
        (call("rich", {"n": False}), "bad_args"),
        (call("rich", {"s": "x" * 1_000_000}), "bad_args"),
        (call("rich", {"o": []}), "bad_args"),
        (call("rich", {"z": 0}), "bad_args"),
    ],
)
def test_malformed_calls_are_typed_and_bounded(payload: str, kind: str) -> None:
    action = parse(payload)
    assert not action.tool_calls
    (error,) = action.parse_errors
    assert error.kind == kind
    assert error.message.startswith("error: ") and len(error.message) < 3 * ECHO_CHARS and len(error.name) <= ECHO_CHARS


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("calculator", {"a": -1, "b": 0}),
        ("rich", {}),
        ("rich", {"s": "", "n": 1, "i": 2, "b": False, "o": {}, "l": [], "z": None, "sn": None, "e": "y", "any": [None]}),
        ("rich", {"n": 1.5, "sn": "日本 🎉 <|im_end|>"}),
        ("open_ended", {"whatever": 1}),
        ("free", {"x": 1}),
    ],
)
def test_well_formed_calls_reach_the_environment_unchanged(name: str, arguments: dict) -> None:
    action = parse("\n" + call(name, arguments) + "\n")
    assert not action.parse_errors
    assert (action.tool_calls[0].name, action.tool_calls[0].arguments) == (name, arguments)


def test_no_arguments_key_is_no_arguments() -> None:
    assert parse('{"name": "free"}').tool_calls[0].arguments == {}


def test_unclosed_nested_and_stray_tags() -> None:
    good = call("free", {})
    action = parse_items(["a", OPEN_TAG, "{", OPEN_TAG, good, CLOSE_TAG, "b", CLOSE_TAG, OPEN_TAG, good], TOOLS)
    assert action.text == "ab" + CLOSE_TAG
    assert [c.name for c in action.tool_calls] == ["free"]
    assert [e.kind for e in action.parse_errors] == ["unclosed", "unclosed"]


def test_call_ids_are_distinct() -> None:
    good = [OPEN_TAG, call("free", {}), CLOSE_TAG]
    assert len({c.call_id for c in parse_items(good * 3, TOOLS).tool_calls}) == 3


def test_a_large_call_below_the_limit_is_executed() -> None:
    assert parse(call("rich", {"s": "x" * (MAX_CALL_CHARS // 2)})).tool_calls


def test_many_keys_are_read_in_linear_time() -> None:
    payload = "{" + ",".join(f'"{i}":0' for i in range(9_000)) + "}"
    assert parse(payload).parse_errors[0].kind == "invalid_json"


@settings(max_examples=100)
@given(st.one_of(st.text(max_size=60), st.recursive(st.none() | st.booleans() | st.floats() | st.text(max_size=5), st.lists).map(json.dumps)))
def test_nothing_a_model_writes_raises(payload: str) -> None:
    action = parse(" " + payload)  # no item of its own, so never a tag
    assert len(action.tool_calls) + len(action.parse_errors) == 1
