"""Admission and batch order: how the staleness bound holds without throwing anything away.

The staleness of a trajectory is the trainer's version when its step starts minus the oldest version among its action tokens. Two rules keep it
at most tau (`rollout.staleness`):

1. an episode starts only while fewer than (tau + 1) * batch_size episodes hold a slot;
2. batches take the earliest versions first, and a step starts only if it leaves every episode still waiting enough later steps: of those
   left, at most k * batch_size may have to be trained within the next k steps, for every k = 0 .. tau.

Plain functions and one plain object over integers, so that the live loop, a simulator and a property test run the same code.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from sao.trajectory import TrajectoryMeta

Handle = TypeVar("Handle")


def may_admit(outstanding: int, *, staleness: int, batch_size: int) -> bool:
    """Rule 1. `outstanding` counts episodes running, buffered, training, or trained but not yet published."""
    return outstanding < (staleness + 1) * batch_size


def may_start(remaining: Iterable[int], *, version_after: int, staleness: int, batch_size: int) -> bool:
    """Rule 2. `remaining`: versions of the episodes, running or buffered, that this step leaves behind; `version_after`: the trainer's version after it.

    An episode of version u can still be trained at versions up to u + staleness, so those with u <= version_after - 1 + k - staleness have to fit
    into the next k steps.
    """
    ordered = sorted(remaining)
    horizon = version_after - 1 - staleness
    return all(bisect_right(ordered, horizon + k) <= k * batch_size for k in range(staleness + 1))


@dataclass(frozen=True, eq=False)
class Finished(Generic[Handle]):
    """A finished trajectory as the driver holds it: its metadata and a handle on its arrays."""

    meta: TrajectoryMeta
    handle: Handle

    @property
    def key(self) -> tuple[int, int]:
        return self.meta.oldest_version, self.meta.episode_id.ordinal


@dataclass
class Buffer(Generic[Handle]):
    """Finished trajectories that wait for a batch."""

    staleness: int
    batch_size: int
    overdue: str = "wait"
    items: list[Finished[Handle]] = field(default_factory=list)

    def add(self, finished: Finished[Handle]) -> None:
        self.items.append(finished)

    def pop_overdue(self, version: int) -> list[Finished[Any]]:
        """With overdue=drop: remove and return what a step at `version` would exceed the bound with. With wait there is never any."""
        if self.overdue == "wait":
            return []
        late = [item for item in self.items if version - item.meta.oldest_version > self.staleness]
        self.items = [item for item in self.items if version - item.meta.oldest_version <= self.staleness]
        return late

    def pop_batch(self, running: Sequence[int], *, version_after: int) -> list[Finished[Handle]] | None:
        """The next batch, earliest version first, or None when the step has to wait. `running`: versions of the episodes that still run.

        The batch comes back in submission order, so that what the learner sees does not depend on who finished first.
        """
        if len(self.items) < self.batch_size:
            return None
        ordered = sorted(self.items, key=lambda item: item.key)
        batch, rest = ordered[: self.batch_size], ordered[self.batch_size :]
        if self.overdue == "wait":
            remaining = [item.meta.oldest_version for item in rest] + list(running)
            if not may_start(remaining, version_after=version_after, staleness=self.staleness, batch_size=self.batch_size):
                return None
        self.items = rest
        return sorted(batch, key=lambda item: item.meta.episode_id.ordinal)
