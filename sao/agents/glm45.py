"""GLM-4.5 (https://huggingface.co/zai-org/GLM-4.5, its chat template), byte for byte:

    [gMASK]<sop>                                                       the beginning
    <|system|>\\n# Tools\\n\\n ... <tools>\\nSCHEMA\\n</tools> ...            with tools, a JSON schema a line; a system message of its own
    <|system|>\\nTEXT   <|user|>\\nTEXT
    <|assistant|>\\n<think>THOUGHT</think>\\nTEXT\\n<tool_call>NAME\\n<arg_key>KEY</arg_key>\\n<arg_value>VALUE</arg_value>\\n</tool_call>
    <|observation|>\\n<tool_response>\\nRESULT\\n</tool_response>\\n<tool_response>\\n ... </tool_response>       results in a row
    <|assistant|>                                                      the generation prompt
    <|assistant|>\\n<think></think>                                     the same with model.thinking=false, user messages end with /nothink

A value is bare where it is a string, else JSON; which of the two a sampled value is, the tool's schema says. Nothing closes a message: the next
header does, so a turn ends by sampling `<|user>|` or `<|observation|>` (or `<|endoftext|>`). What follows a sampled turn is the next header, but for
a header that was sampled already. Where the model sampled another one (`<|user|>`, and a tool result comes), both stand: what was sampled stays, and
the header of what really comes follows. A turn cut off by a limit is followed by the next header alone.

The template strips reasoning from turns before the last user message. What differs from it: a developer message is written as a system message;
the text of an argument or result that spells a tag stays text.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from sao.agents.encoding import Own, Piece, Scaffold
from sao.agents.layout import THINK_TAGS, TOOL_TAGS, Layout, Said
from sao.agents.renderer import Tools
from sao.agents.tool_calls import Schemas, Unreadable, clip, is_type, parse_items, strict_json
from sao.environment import Action, Message

_TOOLS = (
    "<|system|>\n# Tools\n\nYou may call one or more functions to assist with the user query.\n\n"
    "You are provided with function signatures within <tools></tools> XML tags:\n<tools>\n"
)
_CALLS = (
    "</tools>\n\nFor each function call, output the function name and arguments within the following XML format:\n"
    "<tool_call>{function-name}\n"
    "<arg_key>{arg-key-1}</arg_key>\n<arg_value>{arg-value-1}</arg_value>\n"
    "<arg_key>{arg-key-2}</arg_key>\n<arg_value>{arg-value-2}</arg_value>\n...\n</tool_call>"
)
_NOTHINK = "/nothink"
_KEY, _KEY_END, _VALUE, _VALUE_END = ARGUMENT_TAGS = ("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>")


@dataclass(frozen=True)
class GLM45(Layout):
    """GLM-4.5 and 4.5-Air: hybrid reasoning, calls as tagged arguments, no closing token."""

    name: ClassVar[str] = "glm45"
    required: ClassVar[tuple[str, ...]] = (
        *("[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>"),
        *(*TOOL_TAGS, *THINK_TAGS, *ARGUMENT_TAGS),
    )
    tags: ClassVar[tuple[str, ...]] = (*TOOL_TAGS, *THINK_TAGS, *ARGUMENT_TAGS)
    stops: ClassVar[tuple[str, ...]] = ("<|user|>", "<|observation|>", "<|endoftext|>")
    close: ClassVar[str] = ""
    reasons: ClassVar[bool] = True

    def opening(self, messages: Sequence[Message], tools: Tools) -> tuple[list[Piece], Sequence[Message]]:
        pieces: list[Piece] = [Scaffold("[gMASK]<sop>")]
        if tools:
            listing = "".join(json.dumps(tool, ensure_ascii=False) + "\n" for tool in tools)
            pieces += [Scaffold(_TOOLS), listing, Scaffold(_CALLS)]
        return pieces, messages

    def message(self, role: str, text: str) -> list[Piece]:
        if role != "user":
            return [Scaffold("<|system|>\n"), text]
        quiet = [] if self.thinking else [Scaffold(_NOTHINK)]
        return [Scaffold("<|user|>\n"), text.removesuffix(_NOTHINK) if quiet else text, *quiet]

    def results(self, texts: Sequence[str]) -> list[Piece]:
        pieces: list[Piece] = [Scaffold("<|observation|>")]
        for text in texts:
            pieces += [Scaffold("\n<tool_response>\n"), text, Scaffold("\n</tool_response>")]
        return pieces

    def prompt(self) -> list[Piece]:
        return [Scaffold("<|assistant|>" if self.thinking else "<|assistant|>\n<think></think>")]

    def turn(self, said: Said) -> list[Piece]:
        pieces: list[Piece] = []
        if self.thinking:
            pieces += [Scaffold("\n<think>"), Own(said.thought.strip()), Scaffold("</think>")]
        if said.text.strip():
            pieces += ["\n", Own(said.text.strip())]
        for name, arguments in said.calls:
            pieces += [Scaffold("\n<tool_call>"), f"{name}\n"]
            for key, value in arguments.items():
                bare = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
                pieces += [Scaffold(_KEY), key, Scaffold(f"{_KEY_END}\n{_VALUE}"), bare, Scaffold(f"{_VALUE_END}\n")]
            pieces.append(Scaffold("</tool_call>"))
        return pieces

    def ending(self, said: Said) -> Scaffold:
        return Scaffold("<|observation|>" if said.calls or "</tool_call>" in said.text else "<|user|>")

    def parse(self, items: Sequence[str], tools: Tools) -> Action:
        return parse_items(items, tools, _read)


def _read(items: Sequence[str], schemas: Schemas) -> tuple[str, Any]:
    """One call: the name, then key and value in turn, blank text between them."""
    first = next((index for index, item in enumerate(items) if item in ARGUMENT_TAGS), len(items))
    name = "".join(items[:first]).strip()
    if not name:
        raise Unreadable(f"the call needs a name before its first {_KEY}")
    parameters = schemas[name].get("parameters") or {} if name in schemas else {}
    properties = parameters.get("properties") or {}
    arguments: dict[str, Any] = {}
    parts = iter(items[first:])
    for part in parts:
        if not part.strip():
            continue
        if part != _KEY:
            raise Unreadable(f"after the name come {_KEY}name{_KEY_END} and {_VALUE}value{_VALUE_END} in turn")
        key = _until(parts, _KEY_END)
        between = _until(parts, _VALUE)
        if between.strip():
            raise Unreadable(f"there is text between {_KEY_END} and {_VALUE}")
        if key in arguments:
            raise Unreadable(f"the key {clip(key)} appears twice")
        arguments[key] = _value(_until(parts, _VALUE_END), properties.get(key))
    return name, arguments


def _until(parts: Iterator[str], tag: str) -> str:
    text: list[str] = []
    for part in parts:
        if part == tag:
            return "".join(text)
        text.append(part)
    raise Unreadable(f"{tag} is missing")


def _value(text: str, schema: Any) -> Any:
    """A sampled value: bare where the tool's schema says string, else JSON. Where it says both, or nothing, JSON wins if it fits."""
    kinds = _kinds(schema)
    bare = not kinds or "string" in kinds
    try:
        value = strict_json(text)
    except Unreadable:
        if not bare:
            raise
        return text
    fits = not kinds or any(is_type(value, kind) for kind in kinds)
    return text if bare and (isinstance(value, str) or not fits) else value


def _kinds(schema: Any) -> set[str]:
    if not isinstance(schema, Mapping):
        return set()
    named = schema.get("type") or ()
    own = {named} if isinstance(named, str) else set(map(str, named))
    return own.union(*(_kinds(option) for key in ("anyOf", "oneOf") for option in schema.get(key) or ()))
