"""What adapters share: observations and answers as text, actions read from text."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from sao.environment import Message
from sao.tasks.row_source import MESSAGES_KEY


def plain(value: Any) -> Any:
    """numpy scalars and arrays as Python's own numbers and lists, at any depth of dicts, lists and tuples."""
    if isinstance(value, Mapping):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(map(plain, value)) if type(value) in (list, tuple) else [plain(item) for item in value]
    return value.tolist() if hasattr(value, "tolist") else value


def as_text(value: Any) -> str:
    """Text as it is, a mapping as one `key: value` a line, anything else as Python writes it."""
    value = plain(value)
    if isinstance(value, str):
        return value
    if isinstance(value, Mapping):
        return "\n".join(f"{key}: {as_text(item)}" for key, item in value.items())
    return str(value)


def as_json(value: Any) -> str:
    """Text as it is, nothing for None, the rest as JSON where it is, else as Python writes it."""
    value = plain(value)
    if value is None or isinstance(value, str):
        return value or ""
    try:
        return json.dumps(value, ensure_ascii=False)
    except (TypeError, ValueError):
        return str(value)


def answer_of(text: str) -> str:
    """What a turn says once its reasoning is over."""
    return text.rsplit("</think>", 1)[-1].strip()


def user(text: str) -> Message:
    return {"role": "user", "content": text}


def opening(system: str, text: str) -> list[Message]:
    return [{"role": "system", "content": system}, user(text)] if system else [user(text)]


def row_of(payload: Mapping[str, Any]) -> tuple[dict[str, Any], list[Message]]:
    """A task's columns, and the opening messages a row of a file brings."""
    row = dict(payload)
    return row, list(row.pop(MESSAGES_KEY, None) or [])
