"""The critic as an accumulator: squared-error gradient sums, K optimiser steps per batch, and the reading of values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from sao.algorithms.policy_loss import at_least_fp32
from sao.algorithms.value_loss import mse_sum
from sao.config import OptimizerConfig
from sao.learner.batching import Packed
from sao.learner.models import CriticModel
from sao.learner.optimizer import GradientSums
from sao.learner.scoring import hidden_states


@dataclass(frozen=True, eq=False)
class CriticBatch:
    """A packed micro-batch with its targets: returns float[N] and mask bool[N] in the order of packed.rows."""

    packed: Packed
    returns: Tensor
    mask: Tensor


class Critic:
    """Holds the value model and its own optimiser. `last_values` [T]: V of the state AFTER each packed token, from the latest accumulate."""

    def __init__(self, model: CriticModel, optim: OptimizerConfig, *, total_steps: int, autocast: bool = False) -> None:
        self.model, self.autocast = model, autocast
        self.gradients = GradientSums(model, optim, total_steps=total_steps, key="optim.critic", names=("counted", "loss"))
        self.last_values: Tensor | None = None

    def _values(self, packed: Packed) -> Tensor:
        hidden = at_least_fp32(hidden_states(self.model.model, packed, autocast=self.autocast))
        head = self.model.value_head
        return F.linear(hidden, head.weight.to(hidden.dtype), head.bias.to(hidden.dtype))[:, 0]

    @torch.no_grad()
    def evaluate(self, packed: Packed) -> Tensor:
        """V [T] of the state after each packed token; [0] for an empty micro-batch."""
        return self._values(packed) if packed.tokens else torch.zeros(0)

    def accumulate(self, micro_batch: CriticBatch) -> Mapping[str, float]:
        """Add the gradient SUM of (V - R)^2 over the mask, V read from the hidden state before each action token."""
        packed = micro_batch.packed
        trains = bool(micro_batch.mask.any())
        if not trains:
            self.last_values = self.evaluate(packed)
            return {"tokens": 0.0}
        values = self._values(packed)
        loss = mse_sum(values.index_select(0, packed.rows), micro_batch.returns, micro_batch.mask)
        loss.backward()
        self.last_values = values.detach()
        self.gradients.add(counted=micro_batch.mask.sum(), loss=loss)
        return {"tokens": float(len(packed.rows))}

    def reduce(self) -> None:
        self.gradients.reduce()

    def apply(self) -> Mapping[str, float]:
        """One optimiser step; {} and no step when no token counts. Raises LearnerFailure on a non-finite gradient."""
        totals = self.gradients.totals()
        if totals["counted"] == 0:
            self.gradients.clear()
            return {}
        step = self.gradients.apply(totals["counted"])
        return {f"critic/{k}": v for k, v in step.items()} | {"critic/vf_loss": totals["loss"] / totals["counted"]}
