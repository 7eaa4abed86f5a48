"""When a stream changes: which phase the prompt at a position belongs to. Plain functions over integers, no clock, no state.

A phase is a name and the arguments that the environment's generator gets while it lasts. The position counts the prompts drawn so far, so a
schedule says the same of a prompt however fast the run is, and a resumed run needs nothing but the position.

    abrupt      each phase begins at its `start`
    gradual     from a phase's start on, the share of its prompts rises from 0 to 1 over `ramp` prompts; the rest are of the phase before
    recurring   the phases come round in order, `period` prompts each, for ever (A B A B ...)
"""

from __future__ import annotations

import random
from bisect import bisect_right
from dataclasses import dataclass

from sao.config import OnlineConfig, PhaseConfig


@dataclass(frozen=True)
class Shift:
    """From the prompt at `position` on another phase is rewarded, or begins to be when the drift is gradual."""

    position: int
    before: str
    after: str


class Schedule:
    """`online` has been checked (`sao.online.check`). seed: decides the draws of a ramp."""

    def __init__(self, online: OnlineConfig, seed: int) -> None:
        self.phases = list(online.phases)
        self._ramp = online.ramp if online.drift == "gradual" else 0
        self._period = online.period if online.drift == "recurring" else 0
        self._starts = [phase.start for phase in self.phases]
        self._seed = seed

    @property
    def regimes(self) -> list[PhaseConfig]:
        """The different phases in order of first appearance; a name that returns is one regime."""
        return list({phase.name: phase for phase in self.phases}.values())

    def phase(self, position: int) -> PhaseConfig:
        """The phase that decides the reward of the prompt at `position`."""
        index = self._index(position)
        since = position - self._starts[index]
        if index and since < self._ramp:  # still being faded in
            index -= random.Random(f"{self._seed}/ramp/{position}").random() >= since / self._ramp
        return self.phases[index]

    def shifts(self, end: int) -> list[Shift]:
        """The changes before position `end`, in order."""
        starts = range(self._period, end, self._period) if self._period else [start for start in self._starts[1:] if start < end]
        return [Shift(start, self.phases[self._index(start - 1)].name, self.phases[self._index(start)].name) for start in starts]

    def _index(self, position: int) -> int:
        """Of the phase whose time it is, a ramp left aside."""
        if self._period:
            return position // self._period % len(self.phases)
        return bisect_right(self._starts, position) - 1
