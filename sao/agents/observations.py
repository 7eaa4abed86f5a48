"""What an environment hands over, checked before it becomes tokens or a number.

An environment that breaks its contract has failed; its episode is never scored. Every check raises EnvironmentFailure saying what was wrong.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from sao.agents.tool_calls import structured_calls
from sao.environment import Message, StepResult
from sao.errors import EnvironmentFailure

ROLES = ("system", "developer", "user", "assistant", "tool")


def check_messages(value: Any, who: str) -> list[Message]:
    """A list of messages with a known role and text content (empty where structured tool calls stand in its place)."""
    if isinstance(value, (str, bytes, Mapping)) or not isinstance(value, Sequence):
        raise EnvironmentFailure(f"{who} must return a list of messages, returned {type(value).__name__}")
    return [_check_message(message, f"message {index} of {who}") for index, message in enumerate(value)]


def check_step(value: Any, who: str) -> StepResult:
    """A StepResult whose reward is a finite number (also as float32) and whose observation is well formed."""
    if not isinstance(value, StepResult):
        raise EnvironmentFailure(f"{who} must return a StepResult, returned {type(value).__name__}")
    try:
        if isinstance(value.reward, (str, bytes)):
            raise TypeError
        reward = float(value.reward)
    except (TypeError, ValueError):
        raise EnvironmentFailure(f"{who} gave a reward of type {type(value.reward).__name__}, not a number") from None
    if not abs(reward) <= float(np.finfo(np.float32).max):
        raise EnvironmentFailure(f"{who} gave the reward {reward}, not a finite number")
    return StepResult(check_messages(value.observation, f"{who}'s observation"), reward, bool(value.terminated), bool(value.truncated), value.info)


def check_tools(value: Any, who: str) -> list[Mapping[str, Any]]:
    """Tool schemas: JSON objects, each with a function name."""
    if isinstance(value, (str, bytes, Mapping)) or not isinstance(value, Sequence):
        raise EnvironmentFailure(f"{who} must return a list of tool schemas, returned {type(value).__name__}")
    for tool in value:
        function = tool.get("function", tool) if isinstance(tool, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise EnvironmentFailure(f"{who} returned a tool schema without a function name")
    try:
        json.dumps(list(value))
    except (TypeError, ValueError) as problem:
        raise EnvironmentFailure(f"{who} returned a tool schema that is not JSON: {problem}") from None
    return list(value)


def cut_message(message: Message, limit: int) -> Message:
    """The message with its text cut to `limit` characters, the marker included; the same object where nothing was cut. 0: no limit."""
    text = message["content"]
    if limit <= 0 or len(text) <= limit:
        return message
    marker = f"\n[cut: {len(text)} characters]"
    return {**message, "content": (text[: max(limit - len(marker), 0)] + marker)[:limit]}


def number_items(info: Any) -> dict[str, float]:
    """The finite numbers of a StepResult's info, for metrics."""
    if not isinstance(info, Mapping):
        return {}
    kinds = (bool, int, float, np.bool_, np.integer, np.floating)
    return {str(key): float(value) for key, value in info.items() if isinstance(value, kinds) and np.isfinite(value)}


def _check_message(message: Any, who: str) -> Message:
    if not isinstance(message, Mapping):
        raise EnvironmentFailure(f"{who} is a {type(message).__name__}, not a message")
    role, content, calls = message.get("role"), message.get("content"), message.get("tool_calls")
    if role not in ROLES:
        raise EnvironmentFailure(f"{who} has the role {str(role)[:40]!r}: use one of {', '.join(ROLES)}")
    if content is None and calls:
        content = ""
    if not isinstance(content, str):
        raise EnvironmentFailure(f"{who} has content of type {type(content).__name__}, not text")
    try:
        structured_calls(message)
    except (KeyError, TypeError, ValueError, AttributeError) as problem:
        raise EnvironmentFailure(f"{who} has malformed tool_calls ({type(problem).__name__}: {problem})") from None
    return {**message, "content": content}
