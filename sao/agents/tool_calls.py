"""Tool calls in a sampled turn: found on ids or exact text, read strictly, checked against the tool's schema.

A call is `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`. Each becomes a `ToolCall` that can be executed or a `ParseError` whose
message goes back to the model:

    invalid_json   not JSON, NaN or Infinity, a key twice, not an object, no name, an unpaired surrogate
    unclosed       no closing tag: the turn ended, or another call began
    unknown_tool   no tool of that name
    bad_args       arguments not an object, too long, required ones missing, unknown ones, wrong JSON types

An error never repeats more than `ECHO_CHARS` characters of what the model wrote.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from sao.agents.encoding import Piece, TextEncoder
from sao.environment import Action, Message, ParseError, ToolCall

OPEN_TAG = "<tool_call>"
CLOSE_TAG = "</tool_call>"
ECHO_CHARS = 120
MAX_CALL_CHARS = 100_000
MAX_DEPTH = 32

_TAGS = re.compile(f"({re.escape(OPEN_TAG)}|{re.escape(CLOSE_TAG)})")
_JSON_TYPES: Mapping[str, tuple[type, ...]] = {
    "string": (str,),
    "number": (int, float),
    "integer": (int,),
    "boolean": (bool,),
    "object": (dict,),
    "array": (list,),
    "null": (type(None),),
}


class _Unreadable(ValueError):
    """A payload that is not one strict JSON object; the message is for the model."""


def format_call(name: str, arguments: Mapping[str, Any]) -> str:
    """The text of one call, in the form the parser reads and demonstrations teach."""
    return OPEN_TAG + call_body(name, arguments) + CLOSE_TAG


def call_body(name: str, arguments: Mapping[str, Any]) -> str:
    """What stands between the tags."""
    return json.dumps({"name": name, "arguments": dict(arguments)}, ensure_ascii=False)


def tool_tags(encoder: TextEncoder) -> dict[str, int]:
    """The tags that are added tokens of the vocabulary, both or none: then a call is those ids, and the same characters spelled out are text."""
    tags = {tag: encoder.control[tag] for tag in (OPEN_TAG, CLOSE_TAG) if tag in encoder.control}
    return tags if len(tags) == 2 else {}


def call_pieces(message: Message, tags: Mapping[str, int]) -> list[Piece]:
    """An assistant message's structured `tool_calls` (OpenAI form) as pieces: the tags are scaffold, what stands between them is data."""
    pieces: list[Piece] = []
    for index, call in enumerate(message.get("tool_calls") or ()):
        function = _function(call)
        arguments = function.get("arguments") or {}
        body = call_body(function["name"], json.loads(arguments) if isinstance(arguments, str) else arguments)
        separator = ["\n"] if index or message.get("content") else []
        pieces += [*separator, tags.get(OPEN_TAG, OPEN_TAG), body, tags.get(CLOSE_TAG, CLOSE_TAG)]
    return pieces


def turn_items(encoder: TextEncoder, tags: Mapping[str, int], ids: Sequence[int]) -> list[str]:
    """A turn's exact text as runs and tags in order, found on ids where the tags are ids, else on the text.

    A spelled-out tag beside real tag ids stays joined to its run, so that no run equals a tag.
    """
    if not tags:
        return [part for part in _TAGS.split(encoder.decode(ids)) if part]
    spelled = {index: tag for tag, index in tags.items()}
    items: list[str] = []
    run: list[int] = []
    for token in [*ids, None]:
        if token is not None and token not in spelled:
            run.append(token)
            continue
        if run:
            text = encoder.decode(run)
            items += [text[:1], text[1:]] if text in tags else [text]
            run = []
        if token is not None:
            items.append(spelled[token])
    return items


def parse_items(items: Iterable[str], tools: Sequence[Mapping[str, Any]]) -> Action:
    """Read a turn given as text runs and tags in order; `items` equal to a tag are tags."""
    outside: list[str] = []
    raw: list[tuple[str, bool]] = []
    inside: list[str] | None = None
    for item in items:
        if item == OPEN_TAG:
            if inside is not None:
                raw.append(("".join(inside), False))
            inside = []
        elif item == CLOSE_TAG and inside is not None:
            raw.append(("".join(inside), True))
            inside = None
        else:
            (outside if inside is None else inside).append(item)
    if inside is not None:
        raw.append(("".join(inside), False))
    calls: list[ToolCall] = []
    errors: list[ParseError] = []
    schemas = {str(function.get("name", "")): function for function in map(_function, tools)}
    for index, (payload, closed) in enumerate(raw):
        outcome = _read_call(payload, schemas, f"call_{index}") if closed else _error("unclosed", f"the call has no {CLOSE_TAG}: {_clip(payload)}")
        if isinstance(outcome, ToolCall):
            calls.append(outcome)
        else:
            errors.append(outcome)
    return Action(text="".join(outside), tool_calls=tuple(calls), parse_errors=tuple(errors))


def _read_call(payload: str, schemas: Mapping[str, Mapping[str, Any]], call_id: str) -> ToolCall | ParseError:
    if len(payload) > MAX_CALL_CHARS:
        return _error("bad_args", f"the call has {len(payload)} characters, at most {MAX_CALL_CHARS} are read: {_clip(payload)}")
    try:
        call = _strict_object(payload)
    except _Unreadable as problem:
        return _error("invalid_json", f"{problem}: {_clip(payload)}")
    name = call.get("name")
    if not isinstance(name, str) or not name:
        return _error("invalid_json", f'the call needs a "name" that is a string: {_clip(payload)}')
    if name not in schemas:
        return _error("unknown_tool", f"there is no tool {_clip(name)}; tools: {_clip(', '.join(schemas) or 'none')}", name)
    arguments = call.get("arguments", {})
    mismatch = _schema_problem(arguments, schemas[name].get("parameters") or {})
    if mismatch:
        return _error("bad_args", f"{_clip(name)}: {mismatch}", name)
    return ToolCall(name=name, arguments=arguments, call_id=call_id)


def _strict_object(payload: str) -> dict[str, Any]:
    def refuse_constant(constant: str) -> None:
        raise _Unreadable(f"{constant} is not JSON")

    def finite(number: str) -> float:
        if not math.isfinite(float(number)):
            raise _Unreadable("a number is too large")
        return float(number)

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for key, value in pairs:
            if key in found:
                raise _Unreadable(f"the key {_clip(key)} appears twice")
            found[key] = value
        return found

    try:
        value = json.loads(payload, parse_constant=refuse_constant, parse_float=finite, object_pairs_hook=unique)
        _check_depth(value, MAX_DEPTH)
        json.dumps(value, ensure_ascii=False).encode("utf-8")
    except _Unreadable:
        raise
    except json.JSONDecodeError as problem:
        raise _Unreadable(f"not JSON at character {problem.pos}") from None
    except UnicodeEncodeError:
        raise _Unreadable("an escape is half a surrogate pair") from None
    except RecursionError:
        raise _Unreadable("nested too deeply") from None
    except ValueError:
        raise _Unreadable("a number has too many digits") from None
    if not isinstance(value, dict):
        raise _Unreadable(f"the call must be a JSON object, not {_json_type(value)}")
    return value


def _check_depth(value: Any, left: int) -> None:
    """What an environment does with the arguments may recurse: a model must not be able to break it by nesting."""
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    if inner and left == 0:
        raise _Unreadable("nested too deeply")
    for item in inner:
        _check_depth(item, left - 1)


def _schema_problem(arguments: Any, schema: Mapping[str, Any]) -> str:
    """What is wrong with the arguments, or nothing. Beyond JSON schema, an argument the tool does not name is refused unless the schema allows it."""
    if not isinstance(arguments, dict):
        return f"arguments must be an object, not {_json_type(arguments)}"
    properties = schema.get("properties") or {}
    missing = [key for key in schema.get("required") or () if key not in arguments]
    if missing:
        return f"missing {_clip(', '.join(map(str, missing)))}"
    unknown = [key for key in arguments if key not in properties]
    if unknown and not schema.get("additionalProperties", "properties" not in schema):
        return f"unknown argument {_clip(', '.join(unknown))}; arguments: {_clip(', '.join(map(str, properties)) or 'none')}"
    for key, value in arguments.items():
        expected = properties.get(key)
        if not isinstance(expected, Mapping):
            continue
        names = expected.get("type")
        names = [names] if isinstance(names, str) else list(names or ())
        if names and not any(_is_type(value, name) for name in names):
            return f"{_clip(key)} must be {' or '.join(names)}, not {_json_type(value)}"
        choices = expected.get("enum")
        if choices is not None and not any(_json_type(value) == _json_type(choice) and value == choice for choice in choices):
            return f"{_clip(key)} must be one of {_clip(', '.join(map(str, choices)))}"
    return ""


def _is_type(value: Any, name: str) -> bool:
    if isinstance(value, bool) and name != "boolean":
        return False
    return name not in _JSON_TYPES or isinstance(value, _JSON_TYPES[name])


def _json_type(value: Any) -> str:
    for name in ("boolean", "integer", "number", "string", "object", "array"):
        if _is_type(value, name):
            return name
    return "null"


def _function(tool: Mapping[str, Any]) -> Mapping[str, Any]:
    inner = tool.get("function")
    return inner if isinstance(inner, Mapping) else tool


def _error(kind: str, message: str, name: str = "") -> ParseError:
    return ParseError(kind=kind, message=f"error: {message}", name=_clip(name))


def _clip(text: str) -> str:
    return text if len(text) <= ECHO_CHARS else f"{text[: ECHO_CHARS - 3]}..."
