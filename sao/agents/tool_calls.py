"""Tool calls in a sampled turn: found on ids or exact text, read strictly, checked against the tool's schema.

A call is `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, or what a family's layout says. Each becomes a `ToolCall` that can be executed
or a `ParseError` whose message goes back to the model:

    invalid_json   not JSON, NaN or Infinity, a key twice, not an object, no name, an unpaired surrogate; not the family's form
    unclosed       no closing tag: the turn ended, or another call began
    unknown_tool   no tool of that name
    bad_args       arguments not an object, too long, required ones missing, unknown ones, wrong JSON types

An error never repeats more than `ECHO_CHARS` characters of what the model wrote.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from sao.agents.encoding import Piece, Scaffold, TextEncoder
from sao.environment import Action, ParseError, ToolCall

OPEN_TAG = "<tool_call>"
CLOSE_TAG = "</tool_call>"
THINK = "<think>"
THINK_END = "</think>"
ECHO_CHARS = 120
MAX_CALL_CHARS = 100_000
MAX_DEPTH = 32

# The schemas of an environment's tools by name.
Schemas = Mapping[str, Mapping[str, Any]]
# What stands inside one call, as text runs and tags -> the tool's name and its arguments. Raises Unreadable.
Reader = Callable[[Sequence[str], Schemas], tuple[str, Any]]

_JSON_TYPES: Mapping[str, tuple[type, ...]] = {
    "string": (str,),
    "number": (int, float),
    "integer": (int,),
    "boolean": (bool,),
    "object": (dict,),
    "array": (list,),
    "null": (type(None),),
}


class Unreadable(ValueError):
    """A call that is not in the family's form; the message is for the model."""


def format_call(name: str, arguments: Mapping[str, Any]) -> str:
    """The text of one call, in the form the parser reads and demonstrations teach."""
    return OPEN_TAG + call_body(name, arguments) + CLOSE_TAG


def call_body(name: str, arguments: Mapping[str, Any]) -> str:
    """What stands between the tags."""
    return json.dumps({"name": name, "arguments": dict(arguments)}, ensure_ascii=False)


def structured_calls(message: Mapping[str, Any]) -> list[tuple[str, Mapping[str, Any]]]:
    """Name and arguments of an assistant message's `tool_calls` (OpenAI form). Raises KeyError, TypeError, ValueError or AttributeError on others."""
    calls: list[tuple[str, Mapping[str, Any]]] = []
    for call in message.get("tool_calls") or ():
        function = _function(call)
        arguments = function.get("arguments") or {}
        calls.append((str(function["name"]), dict(json.loads(arguments) if isinstance(arguments, str) else arguments)))
    return calls


def tagged_calls(calls: Sequence[tuple[str, Mapping[str, Any]]], after_text: bool, margin: str = "") -> list[Piece]:
    """The calls between their tags, one a line, `margin` around each body: the tags are scaffold, what stands between them is data."""
    pieces: list[Piece] = []
    for index, (name, arguments) in enumerate(calls):
        separator = ["\n"] if index or after_text else []
        pieces += [*separator, Scaffold(OPEN_TAG), margin + call_body(name, arguments) + margin, Scaffold(CLOSE_TAG)]
    return pieces


def turn_items(encoder: TextEncoder, tags: Sequence[str], ids: Sequence[int]) -> list[str]:
    """A turn's exact text as runs and `tags` in order: found on ids where all of them are ids, else on the text.

    A spelled-out tag beside real tag ids stays joined to its run, so that no run equals a tag.
    """
    spelled = {encoder.control[tag]: tag for tag in tags if tag in encoder.control}
    if len(spelled) < len(tags):
        pattern = "|".join(map(re.escape, tags))
        return [part for part in re.split(f"({pattern})", encoder.decode(ids)) if part]
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


def after_reasoning(items: Sequence[str], parse: Callable[[Sequence[str]], Action]) -> Action:
    """`parse` of what follows the reasoning: a call inside a closed reasoning block was thought, not made. One that never closes hides nothing."""
    said = items.index(THINK_END) + 1 if THINK_END in items else 0
    action = parse(items[said:])
    return replace(action, text="".join(items[:said]) + action.text)


def parse_items(items: Iterable[str], tools: Sequence[Mapping[str, Any]], read: Reader | None = None) -> Action:
    """Read a turn given as text runs and tags in order; `items` equal to a tag are tags. `read` reads one call (default: JSON)."""
    outside: list[str] = []
    raw: list[tuple[Sequence[str], bool]] = []
    inside: list[str] | None = None
    for item in items:
        if item == OPEN_TAG:
            if inside is not None:
                raw.append((inside, False))
            inside = []
        elif item == CLOSE_TAG and inside is not None:
            raw.append((inside, True))
            inside = None
        else:
            (outside if inside is None else inside).append(item)
    if inside is not None:
        raw.append((inside, False))
    return judge("".join(outside), raw, tools, read or read_json, f"the call has no {CLOSE_TAG}")


def judge(text: str, raw: Sequence[tuple[Sequence[str], bool]], tools: Sequence[Mapping[str, Any]], read: Reader, unclosed: str) -> Action:
    """The typed outcome of each call found beside `text`: (what stands inside it, whether it is closed). `unclosed` is said of those that are not."""
    calls: list[ToolCall] = []
    errors: list[ParseError] = []
    schemas = {str(function.get("name", "")): function for function in map(_function, tools)}
    for index, (items, closed) in enumerate(raw):
        outcome = _read_call(items, schemas, read, f"call_{index}") if closed else _error("unclosed", f"{unclosed}: {clip(''.join(items))}")
        if isinstance(outcome, ToolCall):
            calls.append(outcome)
        else:
            errors.append(outcome)
    return Action(text=text, tool_calls=tuple(calls), parse_errors=tuple(errors))


def read_json(items: Sequence[str], schemas: Schemas, keys: Sequence[str] = ("arguments",)) -> tuple[str, Any]:
    """A call that is one JSON object: its `name`, and its arguments under the first of `keys` that is there."""
    call = strict_json("".join(items))
    if not isinstance(call, dict):
        raise Unreadable(f"the call must be a JSON object, not {_json_type(call)}")
    name = call.get("name")
    if not isinstance(name, str) or not name:
        raise Unreadable('the call needs a "name" that is a string')
    return name, next((call[key] for key in keys if key in call), {})


def _read_call(items: Sequence[str], schemas: Schemas, read: Reader, call_id: str) -> ToolCall | ParseError:
    payload = "".join(items)
    if len(payload) > MAX_CALL_CHARS:
        return _error("bad_args", f"the call has {len(payload)} characters, at most {MAX_CALL_CHARS} are read: {clip(payload)}")
    try:
        name, arguments = read(items, schemas)
    except Unreadable as problem:
        return _error("invalid_json", f"{problem}: {clip(payload)}")
    if name not in schemas:
        return _error("unknown_tool", f"there is no tool {clip(name)}; tools: {clip(', '.join(schemas) or 'none')}", name)
    mismatch = _schema_problem(arguments, schemas[name].get("parameters") or {})
    if mismatch:
        return _error("bad_args", f"{clip(name)}: {mismatch}", name)
    return ToolCall(name=name, arguments=arguments, call_id=call_id)


def strict_json(payload: str) -> Any:
    """The JSON value `payload` spells: no NaN or Infinity, no key twice, bounded depth. Raises Unreadable."""

    def refuse_constant(constant: str) -> None:
        raise Unreadable(f"{constant} is not JSON")

    def finite(number: str) -> float:
        if not math.isfinite(float(number)):
            raise Unreadable("a number is too large")
        return float(number)

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for key, value in pairs:
            if key in found:
                raise Unreadable(f"the key {clip(key)} appears twice")
            found[key] = value
        return found

    try:
        value = json.loads(payload, parse_constant=refuse_constant, parse_float=finite, object_pairs_hook=unique)
        _check_depth(value, MAX_DEPTH)
        json.dumps(value, ensure_ascii=False).encode("utf-8")
    except Unreadable:
        raise
    except json.JSONDecodeError as problem:
        raise Unreadable(f"not JSON at character {problem.pos}") from None
    except UnicodeEncodeError:
        raise Unreadable("an escape is half a surrogate pair") from None
    except RecursionError:
        raise Unreadable("nested too deeply") from None
    except ValueError:
        raise Unreadable("a number has too many digits") from None
    return value


def _check_depth(value: Any, left: int) -> None:
    """What an environment does with the arguments may recurse: a model must not be able to break it by nesting."""
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    if inner and left == 0:
        raise Unreadable("nested too deeply")
    for item in inner:
        _check_depth(item, left - 1)


def _schema_problem(arguments: Any, schema: Mapping[str, Any]) -> str:
    """What is wrong with the arguments, or nothing. Beyond JSON schema, an argument the tool does not name is refused unless the schema allows it."""
    if not isinstance(arguments, dict):
        return f"arguments must be an object, not {_json_type(arguments)}"
    properties = schema.get("properties") or {}
    missing = [key for key in schema.get("required") or () if key not in arguments]
    if missing:
        return f"missing {clip(', '.join(map(str, missing)))}"
    unknown = [key for key in arguments if key not in properties]
    if unknown and not schema.get("additionalProperties", "properties" not in schema):
        return f"unknown argument {clip(', '.join(unknown))}; arguments: {clip(', '.join(map(str, properties)) or 'none')}"
    for key, value in arguments.items():
        expected = properties.get(key)
        if not isinstance(expected, Mapping):
            continue
        names = expected.get("type")
        names = [names] if isinstance(names, str) else list(names or ())
        if names and not any(is_type(value, name) for name in names):
            return f"{clip(key)} must be {' or '.join(names)}, not {_json_type(value)}"
        choices = expected.get("enum")
        if choices is not None and not any(_json_type(value) == _json_type(choice) and value == choice for choice in choices):
            return f"{clip(key)} must be one of {clip(', '.join(map(str, choices)))}"
    return ""


def is_type(value: Any, name: str) -> bool:
    """Whether a JSON value is of a JSON schema type; unknown types hold everything."""
    if isinstance(value, bool) and name != "boolean":
        return False
    return name not in _JSON_TYPES or isinstance(value, _JSON_TYPES[name])


def _json_type(value: Any) -> str:
    for name in ("boolean", "integer", "number", "string", "object", "array"):
        if is_type(value, name):
            return name
    return "null"


def _function(tool: Mapping[str, Any]) -> Mapping[str, Any]:
    inner = tool.get("function")
    return inner if isinstance(inner, Mapping) else tool


def _error(kind: str, message: str, name: str = "") -> ParseError:
    return ParseError(kind=kind, message=f"error: {message}", name=clip(name))


def clip(text: str) -> str:
    """At most `ECHO_CHARS` characters of what the model wrote."""
    return text if len(text) <= ECHO_CHARS else f"{text[: ECHO_CHARS - 3]}..."
