"""The policy as an accumulator: the configured loss's gradient sums per micro-batch, one optimiser step per batch."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from sao.algorithms import catalogue
from sao.algorithms.policy_loss import LossInputs, TokenLoss, entropy_sum, kl_k3_sum
from sao.config import AlgoConfig, OptimizerConfig
from sao.errors import ConfigError, LearnerFailure
from sao.learner.batching import Packed
from sao.learner.optimizer import GradientSums
from sao.learner.scoring import Scores, score


@dataclass(frozen=True, eq=False)
class PolicyBatch:
    """A packed micro-batch with its per-token data, each [N] in the order of packed.rows; what each means says `LossInputs`."""

    packed: Packed
    behaviour: Tensor
    advantages: Tensor
    mask: Tensor
    old: Tensor | None = None
    versions: Tensor | None = None
    outcomes: Tensor | None = None
    positive_share: float = 0.0


class Policy:
    """Holds the causal model, its optimiser and, with kl_coef > 0, the frozen initial policy. `last`: the latest micro-batch's per-token outcome."""

    def __init__(
        self,
        model: nn.Module,
        algo: AlgoConfig,
        optim: OptimizerConfig,
        *,
        total_steps: int,
        reference: nn.Module | None = None,
        autocast: bool = False,
    ) -> None:
        if algo.denominator not in ("all", "accepted"):
            raise ConfigError(f"algo.denominator is {algo.denominator!r}; choose all or accepted")
        if algo.kl_coef and reference is None:
            raise ConfigError("algo.kl_coef is set, but the policy was given no reference model")
        self.model, self.algo, self.reference, self.autocast = model, algo, reference, autocast
        self.loss = functools.partial(catalogue.function_of("loss", algo), **catalogue.arguments("loss", algo))
        names = ("broken", "counted", "accepted", "loss", "kl", "entropy", "entropy_rows")
        self.gradients = GradientSums(model, optim, total_steps=total_steps, key="optim.policy", names=names)
        self.last: tuple[Scores, TokenLoss] | None = None

    def accumulate(self, micro_batch: PolicyBatch) -> Mapping[str, float]:
        """Add the gradient SUM of one micro-batch; nothing is divided. An all-masked one is scored but changes nothing; an empty one is skipped."""
        if not len(micro_batch.packed.rows):
            self.last = None
            return {}
        coefficient = self.algo.entropy_coef
        trains = bool(micro_batch.mask.any())
        with torch.set_grad_enabled(trains):
            scores = score(self.model, micro_batch.packed, entropy="graph" if coefficient and trains else "sampled", autocast=self.autocast)
            token = self._loss(scores, micro_batch)
            total, kl = token.total, torch.zeros((), dtype=torch.float64)
            if self.algo.kl_coef:
                assert self.reference is not None
                with torch.no_grad():
                    reference = score(self.reference, micro_batch.packed, autocast=self.autocast).logprobs
                kl = kl_k3_sum(scores.logprobs, reference, token.counted)
                total = total + self.algo.kl_coef * kl
            entropy = scores.entropy
            assert entropy is not None
            if coefficient and trains:
                total = total - coefficient * entropy_sum(entropy, token.counted)
        if trains:
            total.backward()
        self.gradients.add(
            broken=(micro_batch.mask.bool() & (torch.isnan(scores.logprobs) | torch.isposinf(scores.logprobs))).sum(),
            counted=token.counted.sum(),
            accepted=token.accepted.sum(),
            loss=token.total,
            kl=kl,
            entropy=entropy.detach().double().sum(),
            entropy_rows=float(len(entropy)),
        )
        self.last = (Scores(scores.logprobs.detach(), None), token)
        return {"tokens": float(len(scores.logprobs))}

    @torch.no_grad()
    def evaluate(self, micro_batch: PolicyBatch) -> tuple[Scores, TokenLoss]:
        """The same scores and per-token fates without a gradient, for steps in which the actor is frozen."""
        scores = score(self.model, micro_batch.packed, entropy="sampled", autocast=self.autocast)
        return scores, self._loss(scores, micro_batch)

    def _loss(self, scores: Scores, batch: PolicyBatch) -> TokenLoss:
        inputs = LossInputs(
            scores.logprobs,
            batch.behaviour,
            batch.advantages,
            batch.mask,
            old=batch.old,
            versions=batch.versions,
            outcomes=batch.outcomes,
            positive_share=batch.positive_share,
        )
        token: TokenLoss = self.loss(inputs)
        fault = _fault(token, inputs)
        if fault:
            raise LearnerFailure(
                f"algo.loss={self.algo.loss} returned {fault}; it must return a TokenLoss: the sum with its graph, and the fate of each token"
            )
        return token

    def reduce(self) -> None:
        self.gradients.reduce()

    def apply(self) -> Mapping[str, float]:
        """One optimiser step over everything accumulated; {} and no step when no token counts.

        Raises LearnerFailure on a non-finite log-prob or gradient; the weights stay as they were.
        """
        totals = self.gradients.totals()
        if totals["broken"]:
            # The loss leaves such tokens out; a policy that produces them is broken all the same, and training on the rest would hide it.
            self.gradients.clear()
            raise LearnerFailure(
                f"optim.policy: {int(totals['broken'])} log-probs of the trained policy are not finite; the weights were left untouched"
            )
        denominator = totals["counted" if self.algo.denominator == "all" else "accepted"]
        if totals["counted"] == 0:
            self.gradients.clear()
            return {}
        # With `accepted` and everything rejected the gradient is zero whatever divides it.
        denominator = max(denominator, 1.0)
        step = self.gradients.apply(denominator)
        metrics = {f"actor/{k}": v for k, v in step.items()}
        metrics["actor/pg_loss"] = totals["loss"] / denominator
        if totals["entropy_rows"]:
            metrics["actor/entropy"] = totals["entropy"] / totals["entropy_rows"]
        if self.algo.kl_coef:
            metrics["actor/kl"] = totals["kl"] / totals["counted"]
        return metrics


def _fault(token: Any, inputs: LossInputs) -> str | None:
    """What is wrong with what a loss returned, or None."""
    if not isinstance(token, TokenLoss):
        return f"a value of type {type(token).__name__}"
    if not isinstance(token.total, Tensor) or token.total.ndim:
        return "a total that is no scalar tensor"
    if torch.is_grad_enabled() and inputs.logprobs.requires_grad and not token.total.requires_grad:
        return "a total without a graph, which trains nothing"
    shape = inputs.mask.shape
    for name in ("counted", "accepted", "low", "high"):
        fate = getattr(token, name)
        if not isinstance(fate, Tensor) or fate.dtype != torch.bool or fate.shape != shape:
            return f"`{name}` that is not a bool for each of the {len(inputs.mask)} tokens"
    for name in ("log_ratio", "weight"):
        number = getattr(token, name)
        if not (number is None and name == "weight") and (not isinstance(number, Tensor) or number.shape != shape):
            return f"`{name}` that is not a number for each of the {len(inputs.mask)} tokens"
    if not torch.equal(token.accepted.int() + token.low.int() + token.high.int(), token.counted.int()):
        return "tokens that are not one of accepted, low and high where they are counted"
    return None
