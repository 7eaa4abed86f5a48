"""Several task sources in fixed proportions, each with its own cursor.

The choice is smooth weighted round-robin: every draw adds each source's share to its credit, takes the source with the most credit and
charges it one task. No random numbers are involved, so a prefix of any length already has the proportions, and the only state besides the
sources' cursors is the credits.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

from sao.environment import Task
from sao.errors import ConfigError

if TYPE_CHECKING:
    from sao.tasks.source import TaskSource
    from sao.trajectory import TrajectoryMeta

T = TypeVar("T")


def shares_of(weights: Mapping[str, float], key: str = "data.mixture") -> dict[str, float]:
    """Weights divided by their sum. Raises ConfigError for a weight that is negative or not finite, or when all are 0."""
    for name, weight in weights.items():
        if isinstance(weight, bool) or not isinstance(weight, int | float) or not math.isfinite(weight) or weight < 0:
            raise ConfigError(f"{key}.{name}={weight!r} is not a weight; give a number of at least 0")
    total = sum(weights.values())
    if total <= 0:
        raise ConfigError(f"{key} has no weight above 0; give at least one environment a share")
    return {name: weight / total for name, weight in weights.items()}


class Credits:
    """Which name comes next, so that after t draws each name was drawn about share * t times, never off by as much as the number of names."""

    def __init__(self, shares: Mapping[str, float]) -> None:
        self._shares = dict(shares)
        self.credit = dict.fromkeys(shares, 0.0)

    def draw(self) -> str:
        for name, share in self._shares.items():
            self.credit[name] += share
        chosen = max((name for name, share in self._shares.items() if share > 0), key=self.credit.__getitem__)
        self.credit[chosen] -= 1.0
        return chosen


class Mixture:
    """Weighted mixture of sources. `weights` is keyed by the sources' names; a weight of 0 keeps a cursor without drawing from it."""

    def __init__(self, sources: Sequence[TaskSource], weights: Mapping[str, float]) -> None:
        self.name = "mixture"
        self._sources = {source.name: source for source in sources}
        if len(self._sources) != len(sources):
            raise ConfigError("data.mixture names an environment twice; give each env.name once")
        for name in weights:
            if name not in self._sources:
                near = difflib.get_close_matches(name, self._sources, n=1)
                raise ConfigError(f"data.mixture.{name}: there is no such environment" + (f"; did you mean {near[0]!r}?" if near else ""))
        self._shares = shares_of({name: weights.get(name, 0.0) for name in self._sources})
        self._credits = Credits(self._shares)
        self._counts = dict.fromkeys(self._sources, 0)

    @property
    def length(self) -> int | None:
        """Tasks of one pass over every source, or None when one of them is endless."""
        lengths = [source.length for source in self._sources.values()]
        return None if any(length is None for length in lengths) else sum(length or 0 for length in lengths)

    def next(self) -> Task:
        name = self._credits.draw()
        task = self._sources[name].next()
        self._counts[name] += 1
        return replace(task, place=[name, task.place])

    def again(self, place: Any) -> Task:
        name, within = place
        return replace(self._sources[name].again(within), place=place)

    def saw(self, batch: Sequence[TrajectoryMeta]) -> None:
        for name, source in self._sources.items():
            source.saw([meta for meta in batch if meta.environment == name])

    def lost(self, environment: str, task_id: str) -> None:
        self._sources[environment].lost(environment, task_id)

    def held_out(self, n: int) -> list[Task]:
        """n held-out tasks in the mixture's proportions, fewer when the sources hold fewer."""
        return interleave({name: source.held_out(n) for name, source in self._sources.items() if self._shares[name] > 0}, self._shares, n)

    def probes(self, n: int) -> list[Task]:
        """n of every source that has a share."""
        return [task for name, source in self._sources.items() if self._shares[name] > 0 for task in source.probes(n)]

    def state_dict(self) -> dict[str, Any]:
        return {
            "credit": dict(self._credits.credit),
            "counts": dict(self._counts),
            "sources": {name: source.state_dict() for name, source in self._sources.items()},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Seek every source. A source that the state does not know starts at its beginning; one that it knows must still be here."""
        gone = [name for name in state["sources"] if name not in self._sources]
        if gone:
            raise ConfigError(f"data.mixture no longer names {', '.join(gone)}, whose cursor the checkpoint holds; keep it with weight 0")
        for name, source_state in state["sources"].items():
            self._sources[name].load_state_dict(source_state)
        self._credits.credit.update({name: float(value) for name, value in state["credit"].items()})
        self._counts.update({name: int(value) for name, value in state["counts"].items()})

    def metrics(self) -> dict[str, float]:
        """The sources' own metrics, and `rollout/share/<environment>`: the part of all tasks drawn so far."""
        metrics: dict[str, float] = {}
        total = sum(self._counts.values())
        for name, source in self._sources.items():
            metrics.update(source.metrics())
            if total:
                metrics[f"rollout/share/{name}"] = self._counts[name] / total
        return metrics


def interleave(lists: Mapping[str, Sequence[T]], shares: Mapping[str, float], n: int) -> list[T]:
    """Up to n items in the proportions of `shares`; when a list is used up, the others share what is left."""
    left = {name: list(reversed(items)) for name, items in lists.items() if items}
    chosen: list[T] = []
    while left and len(chosen) < n:
        credits = Credits(shares_of({name: shares[name] for name in left}))
        while len(chosen) < n and all(left.values()):
            chosen.append(left[credits.draw()].pop())
        left = {name: items for name, items in left.items() if items}
    return chosen
