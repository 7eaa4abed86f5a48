"""What both chat APIs come to, and when two spellings of a conversation are the same one.

A client sends its whole conversation with every request. To find what was sampled of it, each message has a key, and a conversation the chained key
of its messages. Keys leave out what clients change without meaning to: identifiers of tool calls, the spelling of arguments (1.0 for 1 too), `null` for an
empty text, white space around an assistant's text; and in a second form the reasoning, which many clients take out of what they send back.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from sao.agents.tool_calls import THINK_END
from sao.environment import Message, ToolCall

Tools = Sequence[Mapping[str, Any]]


class Refusal(Exception):
    """A request that is not answered. Each API says it in its own form; `param` names the parameter at fault, `code` is for programs."""

    def __init__(self, status: int, message: str, *, code: str = "", param: str = "") -> None:
        super().__init__(message)
        self.status, self.code, self.param = status, code, param


@dataclass(frozen=True)
class ChatRequest:
    """messages and tools in the OpenAI form. asked: settings under which the policy would be sampled otherwise than the run says.

    max_tokens: None where the client sets no limit. speaks_only: no call is wanted (`tool_choice: none`), so the turn is text whatever it spells.
    """

    messages: Sequence[Message]
    tools: Tools = ()
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    asked: Mapping[str, Any] = field(default_factory=dict)
    speaks_only: bool = False
    model: str = ""
    stream: bool = False
    stream_usage: bool = False


@dataclass(frozen=True)
class Answer:
    """One turn as a client hears it. finish: `stop`, `stop_string`, `length` or `tool_calls`; prompt and output in tokens, cached of the prompt."""

    answer_id: str
    text: str
    tool_calls: Sequence[ToolCall]
    finish: str
    prompt_tokens: int
    output_tokens: int
    cached_tokens: int
    stop_string: str = ""

    def message(self) -> Message:
        """As a client echoes it."""
        calls = [
            {
                "id": call.call_id,
                "type": "function",
                "function": {"name": call.name, "arguments": json.dumps(dict(call.arguments), ensure_ascii=False)},
            }
            for call in self.tool_calls
        ]
        return {"role": "assistant", "content": self.text or None, **({"tool_calls": calls} if calls else {})}


def family_key(messages: Sequence[Message], tools: Tools) -> bytes:
    """Of the tools and the leading system messages."""
    key = _step(b"", [dict(tool) for tool in tools])
    for message in messages:
        if message["role"] not in ("system", "developer"):
            break
        key = _step(key, _content_of(message))
    return key


def chain(tools: Tools, messages: Sequence[Message], reasoning: bool = True) -> list[bytes]:
    """Keys of the conversation before its first message, after it, and so on: n + 1 of them. reasoning: whether that of earlier turns counts."""
    keys = [_step(b"", [dict(tool) for tool in tools])]
    for message in messages:
        keys.append(next_key(keys[-1], message, reasoning))
    return keys


def next_key(key: bytes, message: Message, reasoning: bool = True) -> bytes:
    """The key of a conversation with `key` after one more message."""
    return _step(key, _content_of(message, reasoning))


def leaves_out_reasoning(messages: Sequence[Message], known: Sequence[Message]) -> bool:
    """Whether the reasoning in `messages`, wherever there is any, is that of the same message in `known`."""
    return all(
        _thought(message) in ("", _thought(own))
        for message, own in zip(messages, known, strict=False)
        if message["role"] == own["role"] == "assistant"
    )


def _thought(message: Message) -> str:
    thought, closed, _ = str(message.get("content") or "").partition(THINK_END)
    return thought.strip() if closed else ""


def _content_of(message: Message, reasoning: bool = True) -> list[Any]:
    text = str(message.get("content") or "")
    if message["role"] != "assistant":
        return [message["role"], text]
    if not reasoning and THINK_END in text:
        text = text.partition(THINK_END)[2]
    calls = [[call["function"]["name"], _read(call["function"].get("arguments"))] for call in message.get("tool_calls") or ()]
    return ["assistant", text.strip(), calls]


def _read(arguments: Any) -> Any:
    """Arguments as JSON says them, however they are spelled."""
    if not isinstance(arguments, str):
        return arguments or {}
    try:
        return json.loads(arguments or "{}", parse_float=_number)
    except ValueError:
        return arguments


def _number(spelled: str) -> float:
    """A number as a client may spell it anew: JavaScript knows no 1.0."""
    value = float(spelled)
    return int(value) if value.is_integer() else value


def _step(key: bytes, content: Any) -> bytes:
    text = json.dumps(content, sort_keys=True, separators=(",", ":"), default=str)
    return hashlib.blake2b(key + text.encode(), digest_size=16).digest()
