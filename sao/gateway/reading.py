"""Reading a client's JSON: what is there has the type it must have, or the request is refused naming it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from sao.gateway.messages import Refusal


def mapping(value: Any, where: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise Refusal(400, f"{where} must be an object, not {_kind(value)}", param=where)
    return value


def items(value: Any, where: str) -> Sequence[Any]:
    if not isinstance(value, list):
        raise Refusal(400, f"{where} must be a list, not {_kind(value)}", param=where)
    return value


def text(value: Any, where: str) -> str:
    if not isinstance(value, str):
        raise Refusal(400, f"{where} must be a string, not {_kind(value)}", param=where)
    return value


def count(value: Any, where: str) -> int | None:
    """A whole number above 0, or None where there is none."""
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise Refusal(400, f"{where} must be a whole number above 0, not {str(value)[:40]}", param=where)
    return value


def texts(blocks: Any, where: str, kinds: Sequence[str] = ("text",)) -> str:
    """The text of a content: a string, or text blocks, which are joined; null is empty. Other kinds of block (images, files) are refused."""
    if blocks is None:
        return ""
    if isinstance(blocks, str):
        return blocks
    parts = []
    for index, block in enumerate(items(blocks, where)):
        at = f"{where}.{index}"
        kind = mapping(block, at).get("type")
        if kind not in kinds:
            raise Refusal(400, f"{at} is of the type {str(kind)[:40]!r}; this model reads {' and '.join(kinds)} alone", param=at)
        parts.append(text(block.get("text"), f"{at}.text"))
    return "\n".join(parts)


def stop_strings(value: Any, where: str) -> tuple[str, ...]:
    if value is None:
        return ()
    found = [value] if isinstance(value, str) else [text(item, f"{where}.{index}") for index, item in enumerate(items(value, where))]
    return tuple(word for word in found if word)


def _kind(value: Any) -> str:
    return {type(None): "null", bool: "a boolean", int: "a number", float: "a number", str: "a string", list: "a list", dict: "an object"}[
        type(value)
    ]
