"""What happened after the stream changed, in numbers. Pure functions over arrays; no run folder, no clock.

A stream is a sequence of rewards in the order they were trained, each with the position of its prompt and the training step that took it. The moving
average is over the last `WINDOW` rewards (prompts, not steps), so that the figures of runs with different batches can be compared. Rewards before the
shift never enter an average after it.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

WINDOW = 40  # rewards of a moving average
SHARE = 0.8  # of the level before a shift that counts as regained
LEARNED = 0.5  # a level below this was never learned: regaining 80 % of it means nothing
COLLAPSED = 0.9  # share of one and the same answer from which a policy is said to have collapsed

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


@dataclass(frozen=True)
class Stream:
    """Trained rewards. All arrays have length N and are in training order: rewards float64, positions and steps int64."""

    rewards: Floats
    positions: Ints
    steps: Ints

    def between(self, first: int, end: int | float) -> Stream:
        """The rewards of the prompts first <= position < end, in training order."""
        chosen = (self.positions >= first) & (self.positions < end)
        return Stream(self.rewards[chosen], self.positions[chosen], self.steps[chosen])


@dataclass(frozen=True)
class Recovery:
    """One shift. level: mean of the last WINDOW rewards before it; low: the lowest moving average after it; steps, tokens, seconds: from the first step
    with a prompt of the new phase until the moving average has reached SHARE * level. `censored`: it never did before the phase ended; the three
    are then what had passed by its end, a lower bound. `learned`: the level is at least LEARNED; otherwise the rest says nothing about recovery.
    """

    level: float
    low: float
    learned: bool
    censored: bool
    steps: int
    tokens: float
    seconds: float

    @property
    def dip(self) -> float:
        """Depth of the dip: how far the moving average fell below the level."""
        return self.level - self.low


def moving_average(values: Sequence[float] | Floats, window: int = WINDOW) -> Floats:
    """Mean of the last `window` values at each of N places; NaN before there are that many."""
    array = np.asarray(values, np.float64)
    averaged = np.full(len(array), math.nan)
    if len(array) >= window:
        total = np.cumsum(np.insert(array, 0, 0.0))
        averaged[window - 1 :] = (total[window:] - total[:-window]) / window
    return averaged


def dynamic_regret(rewards: Sequence[float] | Floats, optimum: float | Sequence[float] | Floats = 1.0) -> Floats:
    """Cumulative shortfall against the best that was possible for each prompt at its time."""
    return np.cumsum(np.asarray(optimum, np.float64) - np.asarray(rewards, np.float64))


def recovery(
    stream: Stream,
    position: int,
    end: int | float = math.inf,
    *,
    since: int = 0,
    tokens: Mapping[int, float] | None = None,
    seconds: Mapping[int, float] | None = None,
    window: int = WINDOW,
) -> Recovery | None:
    """What a shift at `position` did; the phase before began at `since`, the one after ends at `end`.

    tokens, seconds: by step, cumulative up to its end. None when either side has fewer than `window` rewards: there is no average to speak of.
    """
    before, after = stream.between(since, position), stream.between(position, end)
    if len(before.rewards) < window or len(after.rewards) < window:
        return None
    level = float(before.rewards[-window:].mean())
    averaged = moving_average(after.rewards, window)
    reached = np.flatnonzero(averaged >= SHARE * level)
    censored = not len(reached)
    first, last = int(after.steps[0]), int(after.steps[-1 if censored else reached[0]])

    def passed(cumulative: Mapping[int, float] | None) -> float:
        if cumulative is None or last not in cumulative:
            return math.nan
        return cumulative[last] - cumulative.get(first - 1, 0.0)

    return Recovery(
        level=level,
        low=float(np.nanmin(averaged)),
        learned=level >= LEARNED,
        censored=censored,
        steps=last - first + 1,
        tokens=passed(tokens),
        seconds=passed(seconds),
    )


def forgetting(accuracy: Sequence[tuple[int, float]], ended: int, span: int = 3) -> float | None:
    """Held-out accuracy of a phase when its time ended, at step `ended`, minus the last one; each is the mean of `span` evaluations.

    accuracy: (step, held-out mean) in order. None without an evaluation on either side. The best one of the run is no measure of what was known: of many
    means over few tasks it is the luckiest, and a policy that never changes would have forgotten.
    """
    before = [value for step, value in accuracy if step < ended][-span:]
    after = [value for step, value in accuracy if step >= ended][-span:]
    return float(np.mean(before) - np.mean(after)) if before and after else None


def savings(first: int | None, again: int | None) -> float | None:
    """Share of the steps saved when a regime returns: 1 - again / first, of the steps until its level was reached. None when either never was."""
    return None if not first or again is None else 1.0 - again / first


def steps_to_level(stream: Stream, level: float, first: int, end: int | float, window: int = WINDOW) -> int | None:
    """Steps from the first prompt at or after `first` until the moving average reaches `level`; None when it does not before `end`."""
    part = stream.between(first, end)
    reached = np.flatnonzero(moving_average(part.rewards, window) >= level)
    return int(part.steps[reached[0]] - part.steps[0] + 1) if len(reached) else None


def around(values: Mapping[int, float], step: int, span: int = 10) -> tuple[float, float]:
    """Mean of a per-step quantity over the `span` steps before `step` and over those from it on; NaN where there is none."""
    before = [value for at, value in values.items() if step - span <= at < step]
    after = [value for at, value in values.items() if step <= at < step + span]
    return (float(np.mean(before)) if before else math.nan, float(np.mean(after)) if after else math.nan)


def majority_share(answers: Sequence[Hashable]) -> float:
    """Share of the commonest answer; NaN for none."""
    return Counter(answers).most_common(1)[0][1] / len(answers) if answers else math.nan


def has_collapsed(answers: Sequence[Hashable]) -> bool:
    """Whether a policy gives (nearly) the same answer whatever it is asked. Its reward may look fine where one answer is often right."""
    return majority_share(answers) >= COLLAPSED
