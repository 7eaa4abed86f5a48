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
    number means the same weights only within one. seed: of the sampling, None as in training.
    """

    episode_id: EpisodeId
    task: Task
    version: int
    purpose: Purpose = "train"
    temperature: float | None = None
    pinned: bool = False
    incarnation: int = 0
    seed: int | None = None

    @property
    def name(self) -> str:
        """What tells it from every other episode in flight."""
        return f"{self.purpose}-{self.episode_id}"


@dataclass(frozen=True)
class EpisodeFailure:
    """An attempt that cannot be trained. `reason` is what the ledger counts; `tokens` were sampled and are lost.

    handle: on what the attempt had written when it failed, for people to look at; it may lead to None.
    """

    episode_id: EpisodeId
    reason: str
    message: str
    tokens: int = 0
    handle: Any = None


@dataclass(frozen=True)
class Loss:
    """An attempt or a finished episode that is not trained, for the record of what was dropped.

    step: batches trained when it was lost. version: the weights it was admitted under or, when it had finished, of its oldest token. retried: the same
    prompt goes on in another attempt. handle: on its trajectory as far as there is one.
    """

    episode_id: EpisodeId
    task_id: str
    environment: str
    workload: str
    reason: str
    message: str
    tokens: int
    version: int
    step: int
    retried: bool = False
    handle: Any = None


class EpisodeRunner(Protocol):
    """Runs episodes somewhere. Never raises for a failed episode: the failure is the answer."""

    async def run(self, request: EpisodeRequest) -> Finished[Any] | EpisodeFailure: ...
