"""How a curriculum chooses among its buckets (tasks, or levels of difficulty) by what was lately earned in each.

A sampler knows nothing but the recent mean reward of every bucket: on a resume it is told them again, so whatever it keeps must follow from them and
not from the order in which they came.
"""

from __future__ import annotations

import random
from array import array
from collections.abc import Sequence
from operator import index
from typing import Any, Protocol

from sao.errors import ConfigError
from sao.tasks.target import one_line

ROUNDING = 1e-3  # by which the shares of a user's sampler may miss 1


class Sampler(Protocol):
    """Built as `Class(buckets, recent, **data.curriculum_args)`; buckets are numbered from 0, levels from the easiest."""

    def update(self, bucket: int, mean: float, count: int) -> None:
        """The mean of the bucket's last rewards is now `mean`. count: how many of them, at most `recent`."""
        ...

    def draw(self, rng: random.Random) -> int:
        """A bucket. Whatever is random in the choice comes from rng."""
        ...

    def shares(self) -> Sequence[float]:
        """The probability of each bucket at the next draw; they sum to 1."""
        ...


class SumTree:
    """Weights that are changed and drawn from in O(log n). Inner nodes are sums of their children, computed anew, so no rounding error piles up."""

    def __init__(self, size: int, weight: float) -> None:
        self.size = size
        self._leaves = 1 << max(0, size - 1).bit_length()
        self._nodes = array("d", bytes(16 * self._leaves))
        for leaf in range(size):
            self._nodes[self._leaves + leaf] = weight
        for node in range(self._leaves - 1, 0, -1):
            self._nodes[node] = self._nodes[2 * node] + self._nodes[2 * node + 1]

    @property
    def total(self) -> float:
        return self._nodes[1]

    def __getitem__(self, index: int) -> float:
        return self._nodes[self._leaves + index]

    def __setitem__(self, index: int, weight: float) -> None:
        node = self._leaves + index
        self._nodes[node] = weight
        while node > 1:
            node //= 2
            self._nodes[node] = self._nodes[2 * node] + self._nodes[2 * node + 1]

    def find(self, mass: float) -> int:
        """The index in whose stretch of the cumulated weights `mass` lies, 0 <= mass < total. Never one of weight 0."""
        node = 1
        while node < self._leaves:
            node *= 2
            if mass >= self._nodes[node] and self._nodes[node + 1] > 0:
                mass -= self._nodes[node]
                node += 1
        return node - self._leaves


class Learnable:
    """Buckets in proportion to p (1 - p), p the recent mean reward: most from what is sometimes solved, nothing from what always or never is.

    With a reward of 0 or 1, p (1 - p) is its variance, and a policy gradient has nothing to learn from where that is 0. p is smoothed by one imagined
    reward of a half, so that a bucket never tried weighs most and one failure does not rule it out. low, high: the rewards that count as 0 and 1.
    """

    def __init__(self, buckets: int, recent: int, *, low: float = 0.0, high: float = 1.0) -> None:
        if not low < high:
            raise ConfigError(f"data.curriculum_args.low={low} must be below high={high}")
        self._low, self._span = low, high - low
        self._weights = SumTree(buckets, 0.25)

    def update(self, bucket: int, mean: float, count: int) -> None:
        solved = min(1.0, max(0.0, (mean - self._low) / self._span))
        p = (solved * count + 0.5) / (count + 1)
        self._weights[bucket] = p * (1 - p)

    def draw(self, rng: random.Random) -> int:
        return self._weights.find(rng.random() * self._weights.total)

    def shares(self) -> Sequence[float]:
        return [self._weights[bucket] / self._weights.total for bucket in range(self._weights.size)]


class Frontier:
    """One level at a time: the one above the hardest that passes, which is the easiest at the start and the hardest in the end.

    A level passes while the mean of its last `recent` rewards is at least `threshold`. Levels below are still drawn by the curriculum's floor; when the
    hardest that passed no longer does, the frontier falls back.
    """

    def __init__(self, buckets: int, recent: int, *, threshold: float = 0.7) -> None:
        self._recent = recent
        self._threshold = threshold
        self._passes = [False] * buckets

    @property
    def level(self) -> int:
        passing = [level for level, passes in enumerate(self._passes) if passes]
        return min(passing[-1] + 1, len(self._passes) - 1) if passing else 0

    def update(self, bucket: int, mean: float, count: int) -> None:
        self._passes[bucket] = count >= self._recent and mean >= self._threshold

    def draw(self, rng: random.Random) -> int:
        return self.level

    def shares(self) -> Sequence[float]:
        return [float(level == self.level) for level in range(len(self._passes))]


class Checked:
    """A user's sampler. Raises ConfigError naming its class for whatever it raises, and for what is no bucket or are no shares."""

    def __init__(self, sampler: Sampler, buckets: int) -> None:
        self._sampler, self._buckets = sampler, buckets
        self._name = f"data.curriculum: {type(sampler).__name__}"

    def update(self, bucket: int, mean: float, count: int) -> None:
        self._ask("update", bucket, mean, count)

    def draw(self, rng: random.Random) -> int:
        drawn = self._ask("draw", rng)
        try:
            bucket = index(drawn)
        except TypeError:
            bucket = -1
        if not 0 <= bucket < self._buckets:
            raise ConfigError(f"{self._name}.draw returned {drawn!r}, not a bucket from 0 to {self._buckets - 1}")
        return bucket

    def shares(self) -> Sequence[float]:
        told = self._ask("shares")
        try:
            shares = [float(share) for share in told]
        except (TypeError, ValueError):
            shares = []
        if len(shares) != self._buckets or not all(0 <= share <= 1 for share in shares) or abs(sum(shares) - 1) > ROUNDING:
            raise ConfigError(f"{self._name}.shares returned {str(told)[:80]}, not {self._buckets} probabilities that sum to 1")
        return shares

    def _ask(self, method: str, *args: Any) -> Any:
        try:
            return getattr(self._sampler, method)(*args)
        except Exception as error:
            raise ConfigError(f"{self._name}.{method} raised {one_line(error)}; mend it") from error


SAMPLERS: dict[str, type[Sampler]] = {"learnable": Learnable, "frontier": Frontier}
