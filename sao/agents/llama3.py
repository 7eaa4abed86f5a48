"""Llama 3.1 to 3.3 Instruct (https://huggingface.co/meta-llama/Llama-3.2-1B-Instruct, its chat template), byte for byte:

    <|begin_of_text|>                                                  the beginning
    <|start_header_id|>system<|end_header_id|>\\n\\nCutting Knowledge Date: December 2023\\nToday Date: 26 Jul 2024\\n\\nTEXT<|eot_id|>     always
    <|start_header_id|>ROLE<|end_header_id|>\\n\\nTEXT<|eot_id|>         each message, whitespace around its text left out
    <|start_header_id|>assistant<|end_header_id|>\\n\\n{"name": ..., "parameters": {...}}<|eot_id|>
    <|start_header_id|>ipython<|end_header_id|>\\n\\n"RESULT"<|eot_id|>   a tool result, as a JSON string
    <|start_header_id|>assistant<|end_header_id|>\\n\\n                  the generation prompt

With tools the system message begins with `Environment: ipython` and the first user message with instructions and the schemas, indented by four; where
the conversation does not begin with a user message they stand in the system message. A turn ends with `<|eot_id|>`, `<|eom_id|>` or `<|end_of_text|>`.

A call begins a line, after `<|python_tag|>` if the model writes one, with an object whose first key is `name` or `type`; several are joined by `; `,
which is how vLLM's `llama3_json` parser reads them.

The date is the template's own default, so that a run renders alike on each day. What else differs from the template: it refuses several calls in a
message and drops the text beside a call, which stands here on the line before it; a developer message is written as a system message.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

from sao.agents.encoding import Own, Piece, Scaffold
from sao.agents.layout import Layout, Said, system_text
from sao.agents.renderer import Tools
from sao.agents.tool_calls import judge, read_json
from sao.environment import Action, Message

_DATES = "Cutting Knowledge Date: December 2023\nToday Date: 26 Jul 2024\n\n"
_FORM = 'Respond in the format {"name": function name, "parameters": dictionary of argument name and its value}.Do not use variables.\n\n'
_IN_SYSTEM = f"You have access to the following functions. To call a function, please respond with JSON for a function call.{_FORM}"
_IN_USER = (
    "Given the following functions, please respond with a JSON for a function call with its proper arguments that best answers the given prompt.\n\n"
    + _FORM
)
_PYTHON = "<|python_tag|>"
# Possessive, so that a turn of blanks takes linear time.
_CALL = re.compile(rf'^[ \t]*+(?:{re.escape(_PYTHON)}\s*+)?(?=\{{\s*+"(?:name|type)"\s*+:)', re.MULTILINE)
_ANOTHER = re.compile(r"[ \t]*;\s*(?=\{)")


@dataclass(frozen=True)
class Llama3(Layout):
    """Llama 3.1, 3.2, 3.3: no reasoning, calls as bare JSON."""

    name: ClassVar[str] = "llama3"
    required: ClassVar[tuple[str, ...]] = ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|eom_id|>")
    tags: ClassVar[tuple[str, ...]] = (_PYTHON,)
    stops: ClassVar[tuple[str, ...]] = ("<|eot_id|>", "<|eom_id|>", "<|end_of_text|>")
    close: ClassVar[str] = "<|eot_id|>"

    def opening(self, messages: Sequence[Message], tools: Tools) -> tuple[list[Piece], Sequence[Message]]:
        system, rest = system_text(messages)
        pieces: list[Piece] = [Scaffold("<|begin_of_text|>"), *_header("system")]
        if not tools:
            return [*pieces, _DATES, (system or "").strip(), Scaffold("<|eot_id|>")], rest
        listing = "".join(json.dumps(tool, indent=4, ensure_ascii=False) + "\n\n" for tool in tools)
        pieces += ["Environment: ipython\n", _DATES]
        if rest and rest[0]["role"] == "user":
            pieces += [(system or "").strip(), Scaffold("<|eot_id|>"), *_header("user"), _IN_USER, listing]
            return [*pieces, str(rest[0].get("content") or "").strip(), Scaffold("<|eot_id|>")], rest[1:]
        return [*pieces, _IN_SYSTEM, listing, (system or "").strip(), Scaffold("<|eot_id|>")], rest

    def message(self, role: str, text: str) -> list[Piece]:
        return [*_header("system" if role == "developer" else role), text.strip(), Scaffold("<|eot_id|>")]

    def results(self, texts: Sequence[str]) -> list[Piece]:
        pieces: list[Piece] = []
        for text in texts:
            pieces += [*_header("ipython"), json.dumps(text, ensure_ascii=False), Scaffold("<|eot_id|>")]
        return pieces

    def prompt(self) -> list[Piece]:
        return _header("assistant")

    def turn(self, said: Said) -> list[Piece]:
        text = said.text.strip()
        calls = "; ".join(json.dumps({"name": name, "parameters": arguments}, ensure_ascii=False) for name, arguments in said.calls)
        return [Own(text), "\n" if text and calls else "", calls]

    def parse(self, items: Sequence[str], tools: Tools) -> Action:
        text, outside, raw = "".join(items), "", []
        at = 0
        while found := _CALL.search(text, at):
            outside += text[at : found.start()]
            begin: int | None = found.end()
            while begin is not None:
                end = _object_end(text, begin)
                raw.append(([text[begin : end or len(text)]], end > 0))
                at = end or len(text)
                another = _ANOTHER.match(text, at)
                begin = another.end() if another else None
        return judge(outside + text[at:], raw, tools, partial(read_json, keys=("parameters", "arguments")), "the call's JSON object is not closed")


def _header(role: str) -> list[Piece]:
    return [Scaffold("<|start_header_id|>"), role, Scaffold("<|end_header_id|>"), "\n\n"]


def _object_end(text: str, begin: int) -> int:
    """Where the JSON object that begins at `begin` ends; 0 where it does not."""
    depth, quoted, escaped = 0, False, False
    for at in range(begin, len(text)):
        letter = text[at]
        if quoted:
            quoted, escaped = escaped or letter != '"', not escaped and letter == "\\"
        elif letter == '"':
            quoted = True
        elif letter in "{}":
            depth += 1 if letter == "{" else -1
            if depth == 0:
                return at + 1
    return 0
