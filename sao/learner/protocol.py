"""The learner seam: what the driver says to a learner and hears back. Free of torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from sao.inference.protocol import Canary
from sao.trajectory import EpisodeId, Trajectory
from sao.weights.bundle import WeightBundle

# Why a token did or did not contribute to the policy loss.
CONTEXT, TRAINED, REJECTED_LOW, REJECTED_HIGH, NON_FINITE, DROPPED, FROZEN = range(7)
MASK_REASONS = ("context", "trained", "rejected_low", "rejected_high", "non_finite", "dropped", "actor_frozen")


@dataclass(frozen=True, eq=False)
class SegmentRecord:
    """Per-token training record of one segment, length T: float32 NaN off the mask; mask_reason uint8 indexes MASK_REASONS."""

    episode_id: EpisodeId
    segment: int
    trainer_logprobs: NDArray[np.float32]
    values: NDArray[np.float32]
    advantages: NDArray[np.float32]
    returns: NDArray[np.float32]
    mask_reason: NDArray[np.uint8]


@dataclass(frozen=True, eq=False)
class StepReport:
    """One training step: `version` counts the actor optimiser steps contained in the weights now; `step` counts batches, critic-only ones included."""

    step: int
    version: int
    metrics: Mapping[str, float]
    records: Sequence[SegmentRecord] = field(default_factory=tuple)


class Accumulator(Protocol):
    """Policy and critic are two of these on the same ranks.

    accumulate adds SUMS of gradients and counts and never normalises; reduce joins ranks and helpers; apply divides by the global count, clips,
    steps and returns the metrics of the update.
    """

    def accumulate(self, micro_batch: Any) -> Mapping[str, float]: ...

    def reduce(self) -> None: ...

    def apply(self) -> Mapping[str, float]: ...


class Learner(Protocol):
    """Trains policy and critic on batches; deterministic given the batch (sorted by episode ordinal inside) and the seed."""

    def step(self, trajectories: Sequence[Trajectory], step: int) -> StepReport: ...

    def gather(self) -> tuple[WeightBundle, Canary]:
        """The policy's weights and the canary's log-probs under them."""
        ...

    def export(self, directory: str) -> None:
        """Write policy and critic as Hugging Face directories `policy/` and `critic/` under `directory`."""
        ...
