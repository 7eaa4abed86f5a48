"""Qwen3 (https://huggingface.co/Qwen/Qwen3-8B, its chat template), byte for byte:

    <|im_start|>system\\nTEXT<|im_end|>\\n                                            where there is a system message and no tool
    <|im_start|>system\\nTEXT\\n\\n# Tools\\n\\n ... <tools>\\nSCHEMA\\n</tools> ... <|im_end|>\\n      with tools, a JSON schema a line
    <|im_start|>user\\nTEXT<|im_end|>\\n
    <|im_start|>assistant\\n<think>\\nTHOUGHT\\n</think>\\n\\nTEXT\\n<tool_call>\\n{"name": ..., "arguments": ...}\\n</tool_call><|im_end|>\\n
    <|im_start|>user\\n<tool_response>\\nRESULT\\n</tool_response>\\n<tool_response>\\n ... </tool_response><|im_end|>\\n       results in a row
    <|im_start|>assistant\\n                                                         the generation prompt
    <|im_start|>assistant\\n<think>\\n\\n</think>\\n\\n                                   the same with model.thinking=false

The template strips reasoning from turns before the last user message. What differs from it: without reasoning an assistant message gets no empty
block, but for the one of a generation prompt with model.thinking=false, which stays in the history, since the model saw it there; a developer
message is written as a system message; a tag or other control token that data spells stays text.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from sao.agents.encoding import Own, Piece, Scaffold
from sao.agents.layout import THINK_TAGS, TOOL_TAGS, Layout, Said, system_text
from sao.agents.renderer import Tools
from sao.agents.tool_calls import tagged_calls
from sao.environment import Message
from sao.errors import ConfigError

_TOOLS = (
    "# Tools\n\nYou may call one or more functions to assist with the user query.\n\n"
    "You are provided with function signatures within <tools></tools> XML tags:\n<tools>"
)
_CALLS = (
    "\n</tools>\n\nFor each function call, return a json object with function name and arguments within <tool_call></tool_call> XML tags:\n"
    '<tool_call>\n{"name": <function-name>, "arguments": <args-json-object>}\n</tool_call>'
)
_RESULT = "<tool_response>"
_RESULT_END = "</tool_response>"


@dataclass(frozen=True)
class Qwen3(Layout):
    """Qwen3 and what shares its template: hybrid reasoning, tool results as a user turn."""

    name: ClassVar[str] = "qwen3"
    required: ClassVar[tuple[str, ...]] = ("<|im_start|>", "<|im_end|>", *TOOL_TAGS, *THINK_TAGS, _RESULT, _RESULT_END)
    tags: ClassVar[tuple[str, ...]] = (*TOOL_TAGS, *THINK_TAGS)
    stops: ClassVar[tuple[str, ...]] = ("<|im_end|>", "<|endoftext|>")
    close: ClassVar[str] = "<|im_end|>"
    separator: ClassVar[str] = "\n"
    reasons: ClassVar[bool] = True

    def opening(self, messages: Sequence[Message], tools: Tools) -> tuple[list[Piece], Sequence[Message]]:
        system, rest = system_text(messages)
        if not tools:
            return ([] if system is None else self.message("system", system)), rest
        head: list[Piece] = [Scaffold("<|im_start|>system\n"), *([] if system is None else [system, "\n\n"]), Scaffold(_TOOLS)]
        listing = "".join("\n" + json.dumps(tool, ensure_ascii=False) for tool in tools)
        return [*head, listing, Scaffold(_CALLS), Scaffold("<|im_end|>\n")], rest

    def message(self, role: str, text: str) -> list[Piece]:
        return [Scaffold("<|im_start|>"), f"{'system' if role == 'developer' else role}\n{text}", Scaffold("<|im_end|>\n")]

    def results(self, texts: Sequence[str]) -> list[Piece]:
        pieces: list[Piece] = [Scaffold("<|im_start|>user")]
        for text in texts:
            pieces += [Scaffold(f"\n{_RESULT}\n"), text, Scaffold(f"\n{_RESULT_END}")]
        return [*pieces, Scaffold("<|im_end|>\n")]

    def prompt(self) -> list[Piece]:
        return [Scaffold("<|im_start|>assistant\n" if self.thinking else "<|im_start|>assistant\n<think>\n\n</think>\n\n")]

    def turn(self, said: Said) -> list[Piece]:
        thought = [Scaffold("<think>\n"), Own(said.thought), Scaffold("\n</think>\n\n")] if said.thought else []
        return [*thought, Own(said.text), *tagged_calls(said.calls, bool(said.text), margin="\n")]

    def is_query(self, message: Message) -> bool:
        """A user message, but for a tool result that was written out as one."""
        text = str(message.get("content") or "")
        return message["role"] == "user" and not (text.startswith(_RESULT) and text.endswith(_RESULT_END))

    def check(self, reasoning: str) -> None:
        if reasoning == "template" and not self.thinking:
            raise ConfigError(
                "model.thinking=false needs model.reasoning=keep with model.renderer=qwen3: its template takes the empty reasoning block, "
                "which the model was prompted with, out of turns before a tool result"
            )
