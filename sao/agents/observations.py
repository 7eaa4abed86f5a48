"""What an environment hands over, checked before it becomes tokens or a number.

An environment that breaks its contract has failed; its episode is never scored. Every check raises EnvironmentFailure saying what was wrong.
"""

from __future__ import annotations

import json
import unicodedata
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np

from sao.agents.renderer import Renderer
from sao.agents.tool_calls import structured_calls
from sao.environment import Message, StepResult
from sao.errors import EnvironmentFailure

NEWLINE = "\n"
JOINER = "\u200d"
JOINING = (JOINER, "\ufe0e", "\ufe0f", *map(chr, range(0x1F3FB, 0x1F400)))  # variant selectors, skin tones
LONGEST_CLUSTER = 16
MOST_TOKENS_PER_CHARACTER = 4  # a vocabulary of bytes
MOST_NUMBERS = 100  # of one step's info
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
    except (TypeError, ValueError, OverflowError):
        raise EnvironmentFailure(f"{who} gave a reward of type {type(value.reward).__name__}, not a number") from None
    if not abs(reward) <= float(np.finfo(np.float32).max):
        raise EnvironmentFailure(f"{who} gave the reward {reward}, not a finite number")
    try:
        terminated, truncated = bool(value.terminated), bool(value.truncated)
    except (TypeError, ValueError) as problem:
        raise EnvironmentFailure(f"{who} must say true or false for terminated and truncated ({problem})") from None
    return StepResult(check_messages(value.observation, f"{who}'s observation"), reward, terminated, truncated, value.info)


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
    except (TypeError, ValueError, RecursionError) as problem:
        raise EnvironmentFailure(f"{who} returned a tool schema that is not JSON: {problem}") from None
    return list(value)


@dataclass(frozen=True)
class Cut:
    """Shortens messages to `characters` and to `tokens` of text (0: no limit), a marker that says how much is missing included.

    keep: head | tail | both, the end of the text that stays. No character is split: neither its bytes over tokens nor a mark from its letter.
    """

    characters: int
    tokens: int
    keep: str
    renderer: Renderer

    def shortened(self, message: Message) -> Message:
        """The message with its text cut; the same object where nothing was. Raises EnvironmentFailure where what it holds beside its text is too long."""
        text = message["content"]
        rest = beside(message)
        if rest and 0 < self.characters < (length := json_length(rest)):
            raise EnvironmentFailure(
                f"a {message['role']} message of the environment has {length} characters in {', '.join(rest)}, more than rollout.observation_limit={self.characters}"
            )
        kept = len(text) if self.characters <= 0 else self.characters
        short = text if len(text) <= kept else self._within(text, kept)
        if self.tokens > 0 and len(short) > 0:
            short = self._within_tokens(text, short)
        short = short[:kept]  # a limit may be shorter than the marker
        return message if short is text else {**message, "content": short}

    def _within(self, text: str, length: int) -> str:
        """At most `length` characters of the text and its marker."""
        marker = len(_marker(len(text), len(text))) + (2 if self.keep == "both" else 1)
        return self._assembled(text, max(length - marker, 0))

    def _within_tokens(self, text: str, short: str) -> str:
        """`short`, or less of `text` where it has more than `tokens` of them. Found by the density of tokens in what was tried before."""
        if len(short) <= self.tokens // MOST_TOKENS_PER_CHARACTER or (count := self._count(short)) <= self.tokens:
            return short
        marker = _marker(len(text), len(text))
        cost, kept = self._count(marker), len(short)
        room = max(self.tokens - cost, 0)
        if self.characters > 0:
            kept = min(kept, max(self.characters - len(marker) - 1, 1))
        while kept > 0:
            kept = min(kept - 1, int(kept * room / max(count, 1)))
            short = self._assembled(text, kept)
            count = self._count(short) - cost
            if count <= room:
                return short
        return self._assembled(text, 0)

    def _count(self, text: str) -> int:
        """Tokens the text costs in a message."""
        messages: list[list[Message]] = [[{"role": "user", "content": content}] for content in (text, "")]
        whole, empty = (len(self.renderer.open(message, ())) for message in messages)
        return whole - empty

    def _assembled(self, text: str, kept: int) -> str:
        """About `kept` characters of the text, and the marker."""
        first = {"head": kept, "tail": 0, "both": (kept + 1) // 2}[self.keep]
        begin = _boundary(text, first, -1)
        end = max(_boundary(text, len(text) - (kept - first), 1), begin)
        marker = _marker(end - begin, len(text))
        before, after = text[:begin], text[end:]
        return f"{before}{NEWLINE if self.keep != 'tail' else ''}{marker}{NEWLINE if self.keep != 'head' else ''}{after}"


def beside(message: Mapping[str, Any]) -> dict[str, Any]:
    """What a message holds beside its role and its text."""
    return {str(key): value for key, value in message.items() if key not in ("role", "content")}


def json_length(value: Any) -> int:
    """Length of a value written as JSON, about: what has no form there counts as its text."""
    return len(json.dumps(value, default=str, skipkeys=True))


def _marker(missing: int, whole: int) -> str:
    return f"[cut: {missing} of {whole} characters]"


def _boundary(text: str, at: int, way: int) -> int:
    """The nearest place from `at`, going `way`, where a cut parts no mark, joiner or variant selector from what it belongs to."""
    for place in range(at, at + way * LONGEST_CLUSTER, way):
        if not 0 < place < len(text):
            return min(max(place, 0), len(text))
        if not (unicodedata.combining(text[place]) or text[place] in JOINING or text[place - 1] == JOINER):
            return place
    return at


def number_items(info: Any) -> dict[str, float]:
    """The first MOST_NUMBERS finite numbers of a StepResult's info, for metrics."""
    if not isinstance(info, Mapping):
        return {}
    kinds = (bool, int, float, np.bool_, np.integer, np.floating)
    numbers = ((str(key)[:100], _number(value)) for key, value in islice(info.items(), 100 * MOST_NUMBERS) if isinstance(value, kinds))
    return dict(islice(((key, value) for key, value in numbers if np.isfinite(value)), MOST_NUMBERS))


def _number(value: Any) -> float:
    try:
        return float(value)
    except OverflowError:
        return float("inf")


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
        json_length(beside(message))
        structured_calls(message)
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as problem:
        raise EnvironmentFailure(f"{who} has malformed tool_calls or fields ({type(problem).__name__}: {problem})") from None
    return {**message, "content": content}
