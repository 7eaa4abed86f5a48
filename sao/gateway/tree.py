"""What one session sampled, as a tree of turns, and the training rows it comes to.

    turn = the tokens written before it since its parent's (an opening prompt, or a delta), then the tokens sampled
    row  = one path from a root to a leaf

Every sampled token trains once: in the first row that holds it, with the log-prob and the version it was sampled with. In later rows the same token is
context, and `Segment.parent` says up to where such a row repeats an earlier one. A turn is never rendered again: what extends it is written after its
own tokens. Where history was edited there is nothing to extend, and a new root begins.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from sao.environment import Message
from sao.trajectory import SamplingSpec, Segment

Ids = NDArray[np.int32]


@dataclass(eq=False)
class Turn:
    """One sampled turn. All arrays are one-dimensional; ids, logprobs (NaN: none) and versions have one length, at least 1.

    family: the roots that share it are versions of one conversation (its system prompt and tools). messages: what was written before the turn since its
    parent's. answer: the turn as an assistant message whose content is the exact text. near: of a root, the earlier turn whose row begins most like it.
    shared: leading tokens of `context` that are in the tree already. followed: requests that went on from here, those being sampled included.
    """

    parent: Turn | None
    context: Ids
    ids: Ids
    logprobs: NDArray[np.float32]
    versions: Ids
    family: bytes = b""
    messages: Sequence[Message] = ()
    answer: Message = field(default_factory=dict)
    near: Turn | None = None
    shared: int = 0
    followed: int = 0
    children: list[Turn] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.begin: int = 0 if self.parent is None else self.parent.end  # position of its first context token in its rows
        self.end: int = self.begin + len(self.context) + len(self.ids)

    def path(self) -> list[Turn]:
        """From the root to this turn."""
        turns, turn = [self], self.parent
        while turn is not None:
            turns.append(turn)
            turn = turn.parent
        return turns[::-1]

    def tokens(self) -> Ids:
        """int32[end]: everything up to and with this turn."""
        return np.concatenate([part for turn in self.path() for part in (turn.context, turn.ids)])

    def history(self) -> list[Message]:
        """The conversation up to and with this turn."""
        return [message for turn in self.path() for message in (*turn.messages, turn.answer)]


class Tree:
    """total: tokens, each counted once however many rows repeat it."""

    def __init__(self) -> None:
        self.turns: list[Turn] = []
        self.total = 0
        self.sampled_tokens = 0
        self.missing_logprobs = 0

    def add(self, turn: Turn) -> None:
        """Take in a turn whose parent is in the tree."""
        turn.near, turn.shared = self.overlap(turn.parent, turn.context, turn.family)
        self.turns.append(turn)
        if turn.parent is not None:
            turn.parent.children.append(turn)
        self.total += len(turn.context) - turn.shared + len(turn.ids)
        self.sampled_tokens += len(turn.ids)
        self.missing_logprobs += int(np.isnan(turn.logprobs).sum())

    def overlap(self, parent: Turn | None, context: Ids, family: bytes) -> tuple[Turn | None, int]:
        """How many leading tokens of such a turn's context are in the tree already, and the turn in whose row they are (None: in no row).

        Beside a parent's other children, what they were given before they sampled; for a root, any row of its family.
        """
        best: tuple[Turn | None, int] = (None, 0)
        for other in self.turns if parent is None else parent.children:
            if parent is None and other.family != family:
                continue
            length = _common(context, other.tokens() if parent is None else other.context)
            if length > best[1]:
                best = other, length
        return best

    def segments(self, sampling: SamplingSpec) -> tuple[Segment, ...]:
        """One row per leaf; a row precedes those that branch off it. From a turn with several children the line that goes on longest is one row with it."""
        rows: list[Segment] = []
        row_of: dict[Turn, int] = {}
        heights = self._heights()
        waiting = deque(turn for turn in self.turns if turn.parent is None)
        while waiting:
            start = waiting.popleft()
            line = [start]
            branches: list[Turn] = []
            while line[-1].children:
                children = line[-1].children
                onward = max(children, key=heights.__getitem__)
                branches += [child for child in children if child is not onward]
                line.append(onward)
            row_of |= dict.fromkeys(line, len(rows))
            rows.append(self._row(start, line, row_of, sampling))
            waiting.extendleft(reversed(branches))
        return tuple(rows)

    def _heights(self) -> dict[Turn, int]:
        heights: dict[Turn, int] = {}
        for turn in reversed(self.turns):  # children come after their parents
            heights[turn] = 1 + max((heights[child] for child in turn.children), default=0)
        return heights

    def _row(self, start: Turn, line: Sequence[Turn], row_of: dict[Turn, int], sampling: SamplingSpec) -> Segment:
        ids, logprobs, versions = [], [], []
        before = start.parent.path() if start.parent is not None else []
        for turn in (*before, *line):
            own = row_of[turn] == row_of[start]
            unsampled = len(turn.context) if own else len(turn.context) + len(turn.ids)
            ids += [turn.context, turn.ids]
            logprobs.append(np.full(unsampled, np.nan, np.float32))
            versions.append(np.full(unsampled, -1, np.int32))
            if own:
                logprobs.append(turn.logprobs)
                versions.append(turn.versions)
        values = np.concatenate(logprobs)
        return Segment(
            token_ids=np.concatenate(ids),
            action_mask=np.isfinite(values),
            logprobs=values,
            versions=np.concatenate(versions),
            sampling=sampling,
            parent=self._branching(start, row_of),
        )

    def _branching(self, start: Turn, row_of: dict[Turn, int]) -> tuple[int, int] | None:
        """(row, position of the last token in common) of the earlier row that the row beginning with `start` branches off."""
        if start.parent is None:
            return (row_of[start.near], start.shared - 1) if start.near is not None else None
        beside = [child for child in start.parent.children if child is not start and child in row_of]
        nearest = max(beside, key=lambda child: _common(start.context, child.context))
        return row_of[nearest], start.begin + _common(start.context, nearest.context) - 1


def _common(a: Ids, b: Ids) -> int:
    """How many leading tokens two sequences have in common."""
    length = min(len(a), len(b))
    differ = np.flatnonzero(a[:length] != b[:length])
    return int(differ[0]) if len(differ) else length
