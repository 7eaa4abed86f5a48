"""The token log of one episode: append-only, and the only source of its segments.

    context(ids)     what we wrote: prompt, deltas, synthesised closes      not trained
    sampled(...)     what the engine sampled, with log-prob and version     trained where the log-prob is finite
    fork(prompt)     the template could not append: a new segment begins

Within a segment, the prompt of a turn is everything before it, so prompts extend each other by construction.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import takewhile

import numpy as np
from numpy.typing import NDArray

from sao.inference.protocol import Generation
from sao.trajectory import SamplingSpec, Segment

_NAN = float("nan")


@dataclass
class _Open:
    """A segment being written."""

    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    parent: tuple[int, int] | None = None


class TokenLog:
    """`total` counts each token once: what a fork shares with its parent is not counted again."""

    def __init__(self, prompt: Sequence[int]) -> None:
        self._segments = [_Open()]
        self.total = 0
        self.sampled_tokens = 0
        self.missing_logprobs = 0
        self.context(prompt)

    def __len__(self) -> int:
        """Length of the segment being written."""
        return len(self._segments[-1].ids)

    @property
    def segment_count(self) -> int:
        return len(self._segments)

    @property
    def position(self) -> tuple[int, int]:
        """(segment, position) of the last token."""
        return len(self._segments) - 1, len(self) - 1

    def prompt(self) -> NDArray[np.int32]:
        """int32[T]: everything the engine has to continue."""
        return np.asarray(self._segments[-1].ids, np.int32)

    def context(self, ids: Sequence[int]) -> None:
        """Append tokens the policy did not sample."""
        self._append(ids, [_NAN] * len(ids), [-1] * len(ids))

    def sampled(self, generation: Generation) -> None:
        """Append what the engine sampled. A token without a finite log-prob keeps its version and is never trained on."""
        logprobs = [value if math.isfinite(value) else _NAN for value in map(float, generation.logprobs)]
        self.sampled_tokens += len(logprobs)
        self.missing_logprobs += sum(map(math.isnan, logprobs))
        self._append([int(token) for token in generation.token_ids], logprobs, [int(version) for version in generation.versions])

    def shared(self, prompt: Sequence[int]) -> int:
        """How many leading tokens `prompt` has in common with the segment being written."""
        pairs = zip(self._segments[-1].ids, prompt, strict=False)
        return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))

    def fork(self, prompt: Sequence[int]) -> None:
        """Go on in a new segment that holds `prompt` as context."""
        shared = self.shared(prompt)
        self._segments.append(_Open(parent=(len(self._segments) - 1, max(shared - 1, 0))))
        self.context(prompt)
        self.total -= shared

    def segments(self, sampling: SamplingSpec) -> tuple[Segment, ...]:
        """The finished segments; trailing ones in which nothing was sampled are left out, but never the first."""
        kept = list(self._segments)
        while len(kept) > 1 and max(kept[-1].versions, default=-1) < 0:
            kept.pop()
        return tuple(
            Segment(
                token_ids=np.asarray(part.ids, np.int32),
                action_mask=np.isfinite(part.logprobs),
                logprobs=np.asarray(part.logprobs, np.float32),
                versions=np.asarray(part.versions, np.int32),
                sampling=sampling,
                parent=part.parent,
            )
            for part in kept
        )

    def _append(self, ids: Sequence[int], logprobs: Sequence[float], versions: Sequence[int]) -> None:
        open_ = self._segments[-1]
        open_.ids += ids
        open_.logprobs += logprobs
        open_.versions += versions
        self.total += len(ids)


def place_turn_rewards(segment: Segment, rewards: Sequence[tuple[int, float]]) -> NDArray[np.float32]:
    """float32[turns] for `Trajectory.turn_rewards`, from (position of a turn's last token, reward) pairs.

    A reward whose turn has no trainable token goes to the turn before it, or to the first one: it is never lost.
    """
    ends = segment.turn_ends()
    placed = np.zeros(len(ends), np.float32)
    for position, reward in rewards:
        inside = bool(segment.action_mask[position])
        index = int(np.searchsorted(ends, position, side="left")) if inside else int(np.searchsorted(ends, position, side="right")) - 1
        placed[max(index, 0)] += np.float32(reward)
    return placed
