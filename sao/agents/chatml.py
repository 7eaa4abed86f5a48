"""ChatML, byte for byte:

    <|im_start|>ROLE\\nCONTENT<|im_end|>\\n            each message
    <|im_start|>assistant\\n                          the generation prompt

Tools follow the system text (or make a system message) as a line `# Tools` and one compact JSON schema per line. An assistant message's
structured `tool_calls` are written after its content in the form `sao.agents.tool_calls` reads. Tool results have the role `tool`.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from sao.agents.encoding import Piece, TextEncoder
from sao.agents.renderer import Tools
from sao.agents.tool_calls import call_pieces, parse_items, tool_tags, turn_items
from sao.environment import Action, Message
from sao.errors import UserError

START = "<|im_start|>"
END = "<|im_end|>"


class ChatML:
    """See `sao.agents.renderer.Renderer`. Stop ids: `<|im_end|>`, the tokenizer's eos, and those given."""

    def __init__(self, tokenizer: Any, extra_stop_ids: Sequence[int] = ()) -> None:
        self.encoder = TextEncoder(tokenizer, (START, END))
        missing = [token for token in (START, END) if token not in self.encoder.control]
        if missing:
            raise UserError(
                f"model.renderer=chatml needs {' and '.join(missing)} in the vocabulary of the tokenizer in model.path: "
                "add them there, or use model.renderer=template"
            )
        self.start = self.encoder.control[START]
        self.end = self.encoder.control[END]
        eos = getattr(tokenizer, "eos_token_id", None)
        self.stop_ids: tuple[int, ...] = tuple(dict.fromkeys([self.end, *([] if eos is None else [int(eos)]), *extra_stop_ids]))
        self.tags = tool_tags(self.encoder)

    def open(self, messages: Sequence[Message], tools: Tools) -> list[int]:
        """Ids of the opening prompt, ending with the generation prompt."""
        pieces: list[Piece] = []
        for message in with_tools(messages, tools):
            pieces += self._message(message)
        return self.encoder.compose([*pieces, *self._generation()])

    def delta(self, turn_ids: Sequence[int], messages: Sequence[Message]) -> list[int]:
        """Ids after a sampled turn. A turn that ends with a stop id gets only the separator: the close was sampled."""
        closed = len(turn_ids) > 0 and int(turn_ids[-1]) in self.stop_ids
        pieces: list[Piece] = ["\n"] if closed else [self.end, "\n"]
        for message in messages:
            pieces += self._message(message)
        return self.encoder.compose([*pieces, *self._generation()])

    def parse(self, turn_ids: Sequence[int], tools: Tools) -> Action:
        """Text and typed tool calls of a sampled turn."""
        return parse_items(turn_items(self.encoder, self.tags, self._body(turn_ids)), tools)

    def text(self, turn_ids: Sequence[int]) -> str:
        """Exact text of a sampled turn without its stop id."""
        return self.encoder.decode(self._body(turn_ids))

    def encode_turn(self, message: Message) -> list[int]:
        """An assistant message as the policy would sample it, closed by `<|im_end|>`."""
        pieces = [*self.encoder.split(message.get("content") or "", self.tags), *call_pieces(message, self.tags)]
        return [*self.encoder.compose(pieces), self.end]

    def count_markers(self, messages: Sequence[Message]) -> int:
        """Control tokens spelled in the messages' text."""
        return sum(self.encoder.count_markers(str(message.get("content") or "")) for message in messages)

    def _message(self, message: Message) -> list[Piece]:
        head = f"{message['role']}\n{message.get('content') or ''}"
        return [self.start, head, *call_pieces(message, self.tags), self.end, "\n"]

    def _generation(self) -> list[Piece]:
        return [self.start, "assistant\n"]

    def _body(self, turn_ids: Sequence[int]) -> list[int]:
        ids = [int(token) for token in turn_ids]
        return ids[:-1] if ids and ids[-1] in self.stop_ids else ids


def with_tools(messages: Sequence[Message], tools: Tools) -> list[Message]:
    """The messages with the tool list in the system message; unchanged without tools."""
    if not tools:
        return list(messages)
    listing = "# Tools\n" + "\n".join(json.dumps(tool, ensure_ascii=False, separators=(",", ":")) for tool in tools)
    if not messages or messages[0]["role"] != "system":
        return [{"role": "system", "content": listing}, *messages]
    text = messages[0].get("content") or ""
    return [{**messages[0], "content": f"{text}\n\n{listing}" if text else listing}, *messages[1:]]
