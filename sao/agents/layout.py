"""The family renderer: one class for every model family whose chat layout is written down here.

A `Layout` says how a family writes each kind of message, as pieces: `Scaffold` (ours, control tokens become ids), `Own` (the policy's, its tags
become ids) and plain text (data, control ids banned). `LayoutRenderer` turns pieces into ids, decides what follows a sampled turn and what
happens to earlier reasoning. Each family's bytes stand in the docstring of its own file.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any, ClassVar

from sao.agents.encoding import Own, Piece, Scaffold, TextEncoder
from sao.agents.renderer import Fork, Tools
from sao.agents.tool_calls import CLOSE_TAG, OPEN_TAG, THINK, THINK_END, after_reasoning, parse_items, structured_calls, turn_items
from sao.environment import Action, Message
from sao.errors import ConfigError, UserError

TOOL_TAGS = (OPEN_TAG, CLOSE_TAG)
THINK_TAGS = (THINK, THINK_END)


@dataclass(frozen=True)
class Said:
    """An assistant message taken apart: reasoning, text (calls written into it included) and structured calls."""

    thought: str
    text: str
    calls: Sequence[tuple[str, Mapping[str, Any]]] = ()


@dataclass(frozen=True)
class Layout(ABC):
    """How one family writes a conversation. `thinking` is false where the generation prompt tells the model not to reason."""

    name: ClassVar[str]
    required: ClassVar[tuple[str, ...]]  # control tokens without which a vocabulary is not of this family
    tags: ClassVar[tuple[str, ...]]  # control tokens the policy writes inside a turn
    stops: ClassVar[tuple[str, ...]]  # control tokens that end a turn, where the vocabulary has them
    close: ClassVar[str]  # closes a turn; empty where the next message's header does
    separator: ClassVar[str] = ""  # between a close and the next message
    reasons: ClassVar[bool] = False  # has a form for reasoning, strips it from earlier turns, and can be told not to reason

    thinking: bool = True

    @abstractmethod
    def opening(self, messages: Sequence[Message], tools: Tools) -> tuple[list[Piece], Sequence[Message]]:
        """What a conversation begins with, and the messages that are still to write."""

    @abstractmethod
    def message(self, role: str, text: str) -> list[Piece]:
        """A message of any role but assistant and tool, its close and separator included."""

    @abstractmethod
    def results(self, texts: Sequence[str]) -> list[Piece]:
        """The tool messages between two other messages."""

    @abstractmethod
    def prompt(self) -> list[Piece]:
        """The generation prompt."""

    @abstractmethod
    def turn(self, said: Said) -> list[Piece]:
        """What the policy samples after the generation prompt, up to the token that ends the turn."""

    def past(self, said: Said) -> list[Piece]:
        """An assistant message of the history without its close: as it would have been sampled."""
        layout = replace(self, thinking=True) if said.thought else self
        return [*layout.prompt(), *layout.turn(said)]

    def ending(self, said: Said) -> Scaffold:
        """The token by which the policy ends this turn."""
        return Scaffold(self.close)

    def is_query(self, message: Message) -> bool:
        """Whether the message makes the family drop the reasoning before it."""
        return bool(message["role"] == "user")

    def parse(self, items: Sequence[str], tools: Tools) -> Action:
        """Text and calls of a turn given as text runs and tags."""
        return parse_items(items, tools)

    def check(self, reasoning: str) -> None:
        """Raise ConfigError where the family cannot do what `model.reasoning` and `model.thinking` ask."""
        if self.reasons:
            return
        if reasoning != "keep":
            raise ConfigError(f"model.reasoning=template does nothing with model.renderer={self.name}, which never strips reasoning: use keep")
        if not self.thinking:
            raise ConfigError(f"model.thinking=false does nothing with model.renderer={self.name}, which has no such switch: use true")


class LayoutRenderer:
    """See `sao.agents.renderer.Renderer`. Stop ids: the family's, the tokenizer's eos, and those given."""

    def __init__(self, layout: Layout, tokenizer: Any, reasoning: str = "keep", extra_stop_ids: Sequence[int] = ()) -> None:
        layout.check(reasoning)
        self.layout = layout
        self.name = layout.name
        self.why = ""
        self.reasoning = reasoning
        self.encoder = TextEncoder(tokenizer, layout.required, layout.tags)
        missing = [token for token in layout.required if token not in self.encoder.control]
        if missing:
            raise UserError(
                f"model.renderer={self.name} needs {' and '.join(missing)} in the vocabulary of the tokenizer in model.path: "
                "add them there, or use model.renderer=template"
            )
        stops = [self.encoder.control[token] for token in layout.stops if token in self.encoder.control]
        eos = getattr(tokenizer, "eos_token_id", None)
        self.stop_ids: tuple[int, ...] = tuple(dict.fromkeys([*stops, *([] if eos is None else [int(eos)]), *extra_stop_ids]))

    def open(self, messages: Sequence[Message], tools: Tools) -> list[int]:
        """Ids of the opening prompt, ending with the generation prompt."""
        pieces, rest = self.layout.opening(messages, tools)
        return self.encoder.compose([*pieces, *self._written(rest), *self.layout.prompt()])

    def delta(self, turn_ids: Sequence[int], messages: Sequence[Message]) -> list[int] | Fork:
        """Ids after a sampled turn, or a Fork where the family would now strip its reasoning.

        A turn that ends with a stop id gets no close. Where that stop already is the first token of what follows, it is not repeated.
        """
        if self.reasoning == "template" and any(map(self.layout.is_query, messages)):
            return Fork("reasoning")
        last = int(turn_ids[-1]) if len(turn_ids) else -1
        closed = last in self.stop_ids
        close = Scaffold(self.layout.separator if closed else self.layout.close + self.layout.separator)
        ids = self.encoder.compose([close, *self._written(messages), *self.layout.prompt()])
        return ids[1:] if closed and ids[0] == last else ids

    def generation(self) -> list[int]:
        """Ids of the generation prompt."""
        return self.encoder.compose(self.layout.prompt())

    def parse(self, turn_ids: Sequence[int], tools: Tools) -> Action:
        """Text and typed tool calls of a sampled turn."""
        items = turn_items(self.encoder, self.layout.tags, self._body(turn_ids))
        return after_reasoning(items, lambda said: self.layout.parse(said, tools)) if self.layout.reasons else self.layout.parse(items, tools)

    def text(self, turn_ids: Sequence[int]) -> str:
        """Exact text of a sampled turn without its stop id."""
        return self.encoder.decode(self._body(turn_ids))

    def encode_turn(self, message: Message) -> list[int]:
        """An assistant message as the policy would sample it, closed as the family closes it."""
        said = self._said(message)
        if said.thought and not self.layout.thinking:
            raise UserError("a demonstration holds reasoning, for which model.thinking=false leaves no place: set model.thinking=true")
        return self.encoder.compose([*self.layout.turn(said), self.layout.ending(said)])

    def count_markers(self, messages: Sequence[Message]) -> int:
        """Control tokens spelled in the messages' text."""
        texts = (Own(_text(message)) if message["role"] == "assistant" else _text(message) for message in messages)
        return sum(map(self.encoder.count_markers, texts))

    def _written(self, messages: Sequence[Message]) -> list[Piece]:
        queries = [index for index, message in enumerate(messages) if self.layout.is_query(message)]
        stripped = queries[-1] if queries and self.reasoning == "template" else 0
        pieces: list[Piece] = []
        for role, group in groupby(enumerate(messages), key=lambda pair: pair[1]["role"]):
            if role == "tool":
                pieces += self.layout.results([_text(message) for _, message in group])
                continue
            for index, message in group:
                if role != "assistant":
                    pieces += self.layout.message(role, _text(message))
                    continue
                said = self._said(message)
                pieces += self.layout.past(replace(said, thought="") if index < stripped else said)
                pieces.append(Scaffold(self.layout.close + self.layout.separator))
        return pieces

    def _said(self, message: Message) -> Said:
        text, calls = _text(message), structured_calls(message)
        if not self.layout.reasons:
            return Said("", text, calls)
        thought = message.get("reasoning_content")
        if not isinstance(thought, str):
            before, closed, after = text.partition(THINK_END)
            thought, text = (before.rpartition(THINK)[2], after.lstrip("\n")) if closed else ("", text)
        return Said(thought.strip("\n"), text.lstrip("\n") if thought else text, calls)

    def _body(self, turn_ids: Sequence[int]) -> list[int]:
        ids = [int(token) for token in turn_ids]
        return ids[:-1] if ids and ids[-1] in self.stop_ids else ids


def system_text(messages: Sequence[Message]) -> tuple[str | None, Sequence[Message]]:
    """The leading system (or developer) message's text, none where there is none, and the other messages."""
    if messages and messages[0]["role"] in ("system", "developer"):
        return _text(messages[0]), messages[1:]
    return None, messages


def _text(message: Message) -> str:
    return str(message.get("content") or "")
