"""ChatML, byte for byte:

    <|im_start|>ROLE\\nCONTENT<|im_end|>\\n            each message
    <|im_start|>assistant\\n                          the generation prompt

Tools follow the system text (or make a system message) as a line `# Tools` and one compact JSON schema per line. An assistant message's
structured `tool_calls` are written after its content, one a line, in the form `sao.agents.tool_calls` reads. Tool results have the role `tool`.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from sao.agents.encoding import Own, Piece, Scaffold
from sao.agents.layout import TOOL_TAGS, Layout, Said
from sao.agents.renderer import Tools
from sao.agents.tool_calls import tagged_calls
from sao.environment import Message

START = "<|im_start|>"
END = "<|im_end|>"


@dataclass(frozen=True)
class ChatML(Layout):
    """Plain ChatML; adds no system prompt of its own, has no form for reasoning."""

    name: ClassVar[str] = "chatml"
    required: ClassVar[tuple[str, ...]] = (START, END)
    tags: ClassVar[tuple[str, ...]] = TOOL_TAGS
    stops: ClassVar[tuple[str, ...]] = (END,)
    close: ClassVar[str] = END
    separator: ClassVar[str] = "\n"

    def opening(self, messages: Sequence[Message], tools: Tools) -> tuple[list[Piece], Sequence[Message]]:
        return [], with_tools(messages, tools)

    def message(self, role: str, text: str) -> list[Piece]:
        return [Scaffold(START), f"{role}\n{text}", Scaffold(END), "\n"]

    def results(self, texts: Sequence[str]) -> list[Piece]:
        return [piece for text in texts for piece in self.message("tool", text)]

    def prompt(self) -> list[Piece]:
        return [Scaffold(f"{START}assistant\n")]

    def turn(self, said: Said) -> list[Piece]:
        return [Own(said.text), *tagged_calls(said.calls, bool(said.text))]


def with_tools(messages: Sequence[Message], tools: Tools) -> list[Message]:
    """The messages with the tool list in the system message; unchanged without tools."""
    if not tools:
        return list(messages)
    listing = "# Tools\n" + "\n".join(json.dumps(tool, ensure_ascii=False, separators=(",", ":")) for tool in tools)
    if not messages or messages[0]["role"] != "system":
        return [{"role": "system", "content": listing}, *messages]
    text = messages[0].get("content") or ""
    return [{**messages[0], "content": f"{text}\n\n{listing}" if text else listing}, *messages[1:]]
