"""The first N tasks of a source, over and over: what a baseline that remembers each prompt needs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from sao.environment import Task
from sao.errors import ConfigError
from sao.tasks.fixed_order import FixedOrder

if TYPE_CHECKING:
    from sao.tasks.source import TaskSource


class Pool(FixedOrder):
    """Draws task 0, 1, ..., size - 1 of `source`, then task 0 again. The cursor is the number of draws; the tasks are kept, as the same objects.

    Raises ConfigError when the source has fewer tasks than that.
    """

    def __init__(self, source: TaskSource, size: int) -> None:
        if source.length is not None and source.length < size:
            raise ConfigError(f"data.pool={size} is more than the {source.length} tasks there are; lower it, or set 0 for all")
        self.name = source.name
        self.size = size
        self.drawn = 0
        self._source = source
        self._tasks: list[Task] = []

    @property
    def length(self) -> int | None:
        return self.size

    def next(self) -> Task:
        index = self.drawn % self.size
        while len(self._tasks) <= index:
            self._tasks.append(self._source.next())
        self.drawn += 1
        return self._tasks[index]

    def again(self, place: Any) -> Task:
        return self._source.again(place)

    def held_out(self, n: int) -> list[Task]:
        return self._source.held_out(n)

    def probes(self, n: int) -> list[Task]:
        return self._source.probes(n)

    def state_dict(self) -> dict[str, Any]:
        return {"drawn": self.drawn}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Seek. The source's own cursor stays where it is: only this class draws from it, each of its tasks once."""
        self.drawn = int(state["drawn"])

    def metrics(self) -> dict[str, float]:
        """The source's own, which count each task of the pool once, and `rollout/pool_passes`: how often the pool has been gone through."""
        return self._source.metrics() | {"rollout/pool_passes": self.drawn / self.size}
