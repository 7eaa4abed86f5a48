"""What the driver asks of an episode worker and hears back."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from sao.environment import Task
from sao.rollout.staleness import Finished
from sao.trajectory import EpisodeId, Purpose


@dataclass(frozen=True)
class EpisodeRequest:
    """One episode to run. `version`: the weights published when it was admitted. `temperature` None: the training distribution.

    pinned: fail rather than sample under any other version than `version` (evaluation). incarnation: how often the run had been resumed; a version
    number means the same weights only within one.
    """

    episode_id: EpisodeId
    task: Task
    version: int
    purpose: Purpose = "train"
    temperature: float | None = None
    pinned: bool = False
    incarnation: int = 0

    @property
    def name(self) -> str:
        """What tells it from every other episode in flight."""
        return f"{self.purpose}-{self.episode_id}"


@dataclass(frozen=True)
class EpisodeFailure:
    """An attempt that ended without a trajectory. `reason` is what the ledger counts; `tokens` were sampled and are lost."""

    episode_id: EpisodeId
    reason: str
    message: str
    tokens: int = 0


class EpisodeRunner(Protocol):
    """Runs episodes somewhere. Never raises for a failed episode: the failure is the answer."""

    async def run(self, request: EpisodeRequest) -> Finished[Any] | EpisodeFailure: ...
