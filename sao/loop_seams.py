"""What the loop is connected to: learner, engines, checkpoints, the guard of an online run, and whoever watches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from sao.inference.protocol import PublishReport
from sao.learner.protocol import StepReport
from sao.rollout.episodes import EpisodeFailure, Loss
from sao.rollout.staleness import Finished
from sao.trajectory import TrajectoryMeta


@dataclass(frozen=True)
class StepRow:
    """Everything known about one training step when it has been published."""

    step: int
    report: StepReport
    batch: Sequence[Finished[Any]]
    version_before: int
    wait_s: float
    learn_s: float
    publish_s: float
    seconds: float
    held_s: float = 0.0  # how long its publication waited for an evaluation
    metrics: dict[str, float] = field(default_factory=dict)


class LearnerHandle(Protocol):
    """The learner as the driver reaches it; `handles` are what the workers returned, never arrays."""

    async def step(self, handles: Sequence[Any], step: int) -> StepReport: ...

    async def gather(self) -> Any:
        """A handle on the newest weights and their canary."""
        ...


class Checkpointer(Protocol):
    """Keeps what a run needs to go on after a crash."""

    async def save(self, state: dict[str, Any], buffered: Sequence[Any], *, needed: bool = False) -> None:
        """Store the loop's state, the learner's, and the trajectories behind the `buffered` handles, all of the same moment.

        One that cannot be stored is left out, unless it is `needed`: then it raises what is in the way.
        """
        ...


class EngineHandle(Protocol):
    """The engines as the driver reaches them."""

    async def publish(self, weights: Any, version: int) -> Sequence[PublishReport]:
        """Return once every live engine acknowledged."""
        ...


class Guard(Protocol):
    """Decides whether new weights may serve (`sao.online.guard.Guard`)."""

    def saw(self, batch: Sequence[TrajectoryMeta]) -> None:
        """A batch was trained."""
        ...

    async def critic_ready(self, version: int) -> None:
        """The steps that train the critic alone are done."""
        ...

    async def passes(self, version: int, weights: Any) -> bool: ...

    async def go_back(self, version: int) -> tuple[int, int]:
        """Restore good weights in the learner as `version`; returns their own version and how many episodes had been trained in them."""
        ...

    async def published(self) -> None: ...

    def metrics(self) -> dict[str, float]: ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...


class Observer(Protocol):
    """Where the loop reports: metrics, the live screen, the log. Must not block."""

    def step(self, row: StepRow) -> None: ...

    def publication(self, version: int, reports: Sequence[PublishReport], seconds: float) -> None: ...

    def failure(self, failure: EpisodeFailure, retried: bool) -> None: ...

    def lost(self, loss: Loss) -> None:
        """Called for every dropped episode and every failed attempt, failures included."""
        ...

    def phase(self, text: str) -> None: ...
