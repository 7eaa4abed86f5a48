"""The messages of one episode, which of them each segment of its token log holds, and the prompts that begin a segment.

opening        what the environment's reset gave
a fork         the same messages, rendered anew by a template that cannot append
compaction     opening, a summary of the policy's, and the last turns: as they were sampled, never rendered again
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from sao.agents.observations import json_length
from sao.agents.renderer import Fork, Renderer
from sao.agents.sampling import Turn
from sao.environment import Message

SUMMARY_HEAD = "[Summary of the conversation so far]\n"
NO_SUMMARY = "[The conversation so far was left out, and there is no summary of it]"
_THINK_END = "</think>"


@dataclass
class Part:
    """One segment: why it began (empty: it is the first), the indices of its messages in order, and where in it a summary was sampled, [first, end)."""

    because: str = ""
    shown: list[int] = field(default_factory=list)
    summary: tuple[int, int] | None = None


class Conversation:
    """`messages` only grows. `window`: the turns that stand word for word in the segment being written, oldest first."""

    def __init__(self, renderer: Renderer, opening: Sequence[Message], tools: Sequence[Mapping[str, Any]]) -> None:
        self.renderer = renderer
        self.tools = tools
        self.messages = list(opening)
        self.opening = list(range(len(self.messages)))
        self.parts = [Part(shown=list(self.opening))]
        self.window: list[Turn] = []

    def add(self, message: Message, shown: bool = True) -> int:
        """Append a message and return its index. shown: it stands in the segment being written."""
        self.messages.append(message)
        index = len(self.messages) - 1
        if shown:
            self.show([index])
        return index

    def show(self, indices: Sequence[int]) -> None:
        self.parts[-1].shown += indices

    def at(self, indices: Sequence[int]) -> list[Message]:
        return [self.messages[index] for index in indices]

    def prompt(self, more: Sequence[Message] = ()) -> list[int]:
        """Ids of the messages of the segment being written and `more`, rendered as a whole."""
        return self.renderer.open([*self.at(self.parts[-1].shown), *more], self.tools)

    def compacted(self, keep: int, summary: Message) -> list[int]:
        """Ids of the prompt that goes on from `summary` and the last `keep` turns of the window with their answers."""
        head = [*self.at(self.opening), summary]
        ids = self.renderer.open(head, self.tools)
        for turn in self.window[-keep:]:
            delta = self.renderer.delta(turn.ids, self.at(turn.answer))
            if isinstance(delta, Fork):
                return self.renderer.open([*head, *self.at(self._indices(keep))], self.tools)
            ids += [*turn.ids, *delta]
        return ids

    def compact(self, keep: int, summary: Message) -> None:
        """A segment of opening, summary and the last `keep` turns begins."""
        index = self.add(summary, shown=False)
        self.parts.append(Part("compaction", [*self.opening, index, *self._indices(keep)]))
        self.window = self.window[-keep:]

    def fork(self, reason: str) -> None:
        """A segment of the same messages begins."""
        self.parts.append(Part(reason, list(self.parts[-1].shown)))

    def record(self, segments: int) -> list[dict[str, Any]]:
        """What is kept of the first `segments` of them, for people to read."""
        fields = ({"because": part.because, "messages": part.shown, "summary": part.summary} for part in self.parts[:segments])
        return [{key: value for key, value in one.items() if value} for one in fields]

    def _indices(self, keep: int) -> list[int]:
        return [index for turn in self.window[-keep:] for index in (turn.said, *turn.answer)]


def summary_text(text: str) -> str:
    """What of a turn's text is its summary: that after its reasoning."""
    return text.rpartition(_THINK_END)[2].strip()


def summary_message(text: str) -> Message:
    """The message from which the next segment goes on; it says so where the policy wrote nothing."""
    return {"role": "user", "content": f"{SUMMARY_HEAD}{text}" if text else NO_SUMMARY}


def characters(messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] = ()) -> int:
    """Length of what a template may write of them, about: cheap, where encoding may not be."""
    fields = (value for message in messages for value in message.values())
    return sum(len(value) if isinstance(value, str) else json_length(value) for value in fields) + (json_length(list(tools)) if tools else 0)
