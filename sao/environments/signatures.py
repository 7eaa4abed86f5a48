"""Tools from the public methods of a class: schemas from type hints and docstrings, and arguments turned into what the hints say.

The JSON types follow JSON Schema; descriptions come from a docstring in Google's style (a text, then `Args:` with `name: description`).
"""

from __future__ import annotations

import inspect
import re
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Union, get_args, get_origin

from sao.errors import ConfigError

JSON_TYPES: Mapping[Any, str] = {str: "string", int: "integer", float: "number", bool: "boolean", type(None): "null"}
LISTS = (list, tuple, set, frozenset, Sequence)
MAPPINGS = (dict, Mapping)
_SECTION = re.compile(r"\s*(Args|Arguments|Parameters|Returns|Return|Raises|Yields|Example|Examples|Note|Notes):\s*")
_ENTRY = re.compile(r"\s*\*{0,2}(\w+)\s*(?:\([^)]*\))?:\s*(.*)")


class BadArgument(ValueError):
    """An argument is not what the hint says; the message is what the policy reads."""


@dataclass(frozen=True)
class Method:
    """One method that is a tool. `hints`: type of each argument."""

    name: str
    hints: Mapping[str, Any]
    schema: Mapping[str, Any]
    is_async: bool


def read_method(name: str, function: Callable[..., Any], where: str) -> Method:
    """Read a function whose first argument is self. Raises ConfigError naming `where` for what no schema can say."""
    try:
        hints = typing.get_type_hints(function)
    except (NameError, TypeError) as error:
        raise ConfigError(f"{where}: the type hints of {name} cannot be read ({error}); import what they name at module level") from None
    parameters = list(inspect.signature(function).parameters.values())[1:]
    text, described = read_docstring(inspect.getdoc(function) or "")
    properties: dict[str, Any] = {}
    required: list[str] = []
    for parameter in parameters:
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD, parameter.POSITIONAL_ONLY):
            raise ConfigError(f"{where}: {name} takes {parameter}, which no schema can say; give every argument a name")
        if parameter.name not in hints:
            raise ConfigError(f"{where}: the argument {parameter.name} of {name} has no type hint; a tool's schema is made from them")
        try:
            schema = schema_of(hints[parameter.name])
        except TypeError as error:
            raise ConfigError(
                f"{where}: the argument {parameter.name} of {name} has the type {error}, which is not JSON; use str, int, list, ..."
            ) from None
        if parameter.name in described:
            schema = {**schema, "description": described[parameter.name]}
        if parameter.default is parameter.empty:
            required.append(parameter.name)
        properties[parameter.name] = schema
    function_schema: dict[str, Any] = {"name": name}
    if text:
        function_schema["description"] = text
    function_schema["parameters"] = {"type": "object", "properties": properties, "required": required}
    kinds = {parameter.name: hints[parameter.name] for parameter in parameters}
    return Method(name, kinds, {"type": "function", "function": function_schema}, inspect.iscoroutinefunction(function))


def schema_of(hint: Any) -> dict[str, Any]:
    """JSON schema of a type hint. Raises TypeError with the hint when there is none."""
    origin, arguments = get_origin(hint), get_args(hint)
    if hint is Any:
        return {}
    if hint in JSON_TYPES:
        return {"type": JSON_TYPES[hint]}
    if origin is typing.Annotated:
        return schema_of(arguments[0])
    if origin is Literal:
        names = list(dict.fromkeys(JSON_TYPES[type(choice)] for choice in arguments))
        return {"type": names[0] if len(names) == 1 else names, "enum": list(arguments)}
    if origin in (Union, types.UnionType):
        return _union([schema_of(argument) for argument in arguments])
    if hint in LISTS or origin in LISTS or _is_abstract(origin, Sequence):
        inner = [argument for argument in arguments if argument is not Ellipsis]
        return {"type": "array", "items": _union([schema_of(argument) for argument in inner])} if inner else {"type": "array"}
    if hint in MAPPINGS or origin in MAPPINGS or _is_abstract(origin, Mapping):
        return {"type": "object"}
    raise TypeError(getattr(hint, "__name__", str(hint)))


def convert(value: Any, hint: Any, where: str = "") -> Any:
    """`value`, as JSON has it, as the type of the hint. Raises BadArgument naming `where`."""
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is typing.Annotated:
        return convert(value, arguments[0], where)
    if origin in (Union, types.UnionType):
        for argument in arguments:
            try:
                return convert(value, argument, where)
            except BadArgument:
                continue
        raise BadArgument(f"{where} is none of what it may be")
    if origin is Literal:
        if not any(value == choice and type(value) is type(choice) for choice in arguments):
            raise BadArgument(f"{where} must be one of {', '.join(map(str, arguments))}")
        return value
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        return _as_float(value, where)
    if hint is int and isinstance(value, float) and value.is_integer():
        return int(value)
    if hint in JSON_TYPES:
        if type(value) is not hint:
            raise BadArgument(f"{where} must be {JSON_TYPES[hint]}")
        return value
    if hint in LISTS or origin in LISTS or _is_abstract(origin, Sequence):
        return _sequence(value, origin or hint, arguments, where)
    if hint in MAPPINGS or origin in MAPPINGS or _is_abstract(origin, Mapping):
        if not isinstance(value, dict):
            raise BadArgument(f"{where} must be object")
        return {key: convert(item, arguments[1], f"{where}.{key}") for key, item in value.items()} if arguments else value
    return value


def read_docstring(text: str) -> tuple[str, dict[str, str]]:
    """The text before the first section, and what `Args:` says of each argument."""
    about: list[str] = []
    described: dict[str, str] = {}
    section, name, indent = "", "", 0
    for line in text.splitlines():
        found = _SECTION.fullmatch(line)
        if found:
            section, name, indent = found[1], "", 0
            continue
        if not section:
            about.append(line)
            continue
        if section not in ("Args", "Arguments", "Parameters") or not line.strip():
            continue
        depth = len(line) - len(line.lstrip())
        indent = indent or depth
        entry = _ENTRY.fullmatch(line)
        if entry and depth <= indent:
            name = entry[1]
            described[name] = entry[2].strip()
        elif name:
            described[name] = f"{described[name]} {line.strip()}".strip()
    return "\n".join(about).strip(), described


def _sequence(value: Any, kind: Any, arguments: tuple[Any, ...], where: str) -> Any:
    if not isinstance(value, list):
        raise BadArgument(f"{where} must be array")
    hints: list[Any] = [Any] * len(value)
    if kind is tuple and arguments and Ellipsis not in arguments:
        if len(value) != len(arguments):
            raise BadArgument(f"{where} must have {len(arguments)} items")
        hints = list(arguments)
    elif arguments:
        hints = [arguments[0]] * len(value)
    items = [convert(item, hint, f"{where}[{index}]") for index, (item, hint) in enumerate(zip(value, hints, strict=True))]
    try:
        return kind(items) if kind in (tuple, set, frozenset) else items
    except TypeError:
        raise BadArgument(f"{where} holds items that cannot be in a set") from None


def _as_float(value: int, where: str) -> float:
    try:
        return float(value)
    except OverflowError:
        raise BadArgument(f"{where} is too large") from None


def _union(schemas: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Types of several schemas in one; plain types and enums only keep what they share with the parser of tool calls."""
    names: list[str] = []
    for schema in schemas:
        kinds = schema.get("type", [])
        names += [kinds] if isinstance(kinds, str) else list(kinds)
    if not all("type" in schema for schema in schemas):
        return {}
    if len(schemas) == 1:
        return dict(schemas[0])
    merged: dict[str, Any] = {"type": list(dict.fromkeys(names))}
    choices = [schema["enum"] if "enum" in schema else [None] if schema["type"] == "null" else None for schema in schemas]
    if all(choice is not None for choice in choices):
        merged["enum"] = [item for choice in choices for item in choice or ()]
    items = [schema["items"] for schema in schemas if "items" in schema]
    return {**merged, "items": items[0]} if len(items) == 1 else merged


def _is_abstract(origin: Any, kind: type) -> bool:
    """`collections.abc.Sequence[int]` and friends, whose origin is the abstract class itself."""
    return inspect.isclass(origin) and origin is kind
