"""Policy losses as sums over tokens; whoever calls divides by the count of the whole optimiser batch.

Three policies are told apart by name: the trained one (`logprobs`), the one that sampled (`behaviour`, as the engine logged it), and, for losses that
clip against it, a frozen earlier one (`old`). DIS uses the first two alone.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from sao.algorithms.off_policy import LOG_RATIO_CAP, ratio_metrics


class LossOutput(NamedTuple):
    """A scalar loss with its graph, and plain-float metrics; undefined metrics are absent."""

    loss: Tensor
    metrics: dict[str, float]


@dataclass(frozen=True, eq=False)
class LossInputs:
    """What any policy loss may read; all tensors share one shape (flat [N] in the learner).

    logprobs: log pi_theta with gradient. behaviour: logged at sampling, NaN where missing. advantages: no gradient. mask: bool, action tokens.
    old: the trainer's own log-probs under the weights that sampled each token, NaN where those are no longer known; None unless the loss asks for
    them. reference: under the initial policy. versions: int, weights sampled under. outcomes: the reward of each token's episode.
    positive_share: share of the action tokens of the whole optimiser batch, over all ranks, whose outcome is above 0.
    """

    logprobs: Tensor
    behaviour: Tensor
    advantages: Tensor
    mask: Tensor
    old: Tensor | None = None
    reference: Tensor | None = None
    versions: Tensor | None = None
    outcomes: Tensor | None = None
    positive_share: float = 0.0


class TokenLoss(NamedTuple):
    """A loss before normalisation, and each token's fate.

    total: scalar, the SUM over tokens (to be minimised), with graph. counted: bool, action tokens with finite log-probs, the denominator `all`.
    accepted, low, high: bool, disjoint, together `counted`; a token in low or high gives no gradient. log_ratio: log pi_theta - log pi_rollout,
    detached, 0 where not counted. weight: the detached factor of A * grad log pi, 0 where nothing was accepted; None where it is the ratio itself.
    """

    total: Tensor
    counted: Tensor
    accepted: Tensor
    low: Tensor
    high: Tensor
    log_ratio: Tensor
    weight: Tensor | None = None

    def weights(self) -> Tensor:
        """`weight`, or the ratio of the accepted tokens (at most exp(20), as in all metrics)."""
        return torch.where(self.accepted, self.log_ratio.clamp_max(LOG_RATIO_CAP).exp(), 0.0) if self.weight is None else self.weight


def at_least_fp32(tensor: Tensor) -> Tensor:
    """float64 stays, everything else becomes float32."""
    return tensor if tensor.dtype == torch.float64 else tensor.float()


class Terms(NamedTuple):
    """What every loss starts from, at least float32, all of one shape.

    logprobs (with graph) and advantages: 0 where not counted. counted: bool. log_ratio: log pi_theta - log pi_rollout, detached, 0 where not counted.
    impossible: bool, counted tokens of trained probability 0; their log-prob here is 0, since no loss can take its gradient.
    """

    logprobs: Tensor
    advantages: Tensor
    counted: Tensor
    log_ratio: Tensor
    impossible: Tensor

    def ratio(self, at_most: float = LOG_RATIO_CAP) -> Tensor:
        """exp(log_ratio) with graph, for losses that differentiate it: capped at exp(at_most), beyond which its gradient is 0; 0 if impossible."""
        attached = self.log_ratio + (self.logprobs - self.logprobs.detach())
        return torch.where(self.impossible, 0.0, torch.exp(torch.where(self.impossible, 0.0, attached).clamp_max(at_most)))


def terms_of(inputs: LossInputs) -> Terms:
    """Leave out tokens off the mask, and those whose behaviour log-prob is not finite or whose trained one is NaN or +inf.

    A trained log-prob of -inf is a legitimate probability of 0 and counts.
    """
    logprobs, behaviour, advantages = (at_least_fp32(x) for x in (inputs.logprobs, inputs.behaviour, inputs.advantages))
    trained = logprobs.detach()
    counted = inputs.mask.bool() & torch.isfinite(behaviour) & ~torch.isnan(trained) & (trained != math.inf)
    impossible = counted & (trained == -math.inf)
    zero = logprobs.new_zeros(())
    return Terms(
        logprobs=torch.where(counted & ~impossible, logprobs, zero),
        advantages=torch.where(counted, advantages.detach(), zero),
        counted=counted,
        log_ratio=torch.where(counted, trained - behaviour, zero),
        impossible=impossible,
    )


def dis_sum(inputs: LossInputs, *, eps_low: float, eps_high: float, detach_ratio: bool = True) -> TokenLoss:
    """Direct double-sided importance sampling (SAO section 3.1), summed over tokens.

        r = exp(log pi_theta - log pi_rollout)
        f(r) = r if 1 - eps_low < r < 1 + eps_high else 0        strict, whatever the sign of A
        total = - sum sg[f(r)] * A * log pi_theta

    The band is tested in log space and only accepted tokens are exponentiated; a ratio within rounding (4 units in the last place) of an edge lies
    on it and is rejected. detach_ratio=False differentiates f(r) too, the literal reading, whose gradient carries the factor 1 + log pi.
    """
    if eps_low < 0 or eps_high < 0:
        raise ValueError(f"eps_low and eps_high must not be negative, got {eps_low} and {eps_high}")
    terms = terms_of(inputs)
    counted, log_ratio = terms.counted, terms.log_ratio
    rounding = 4 * torch.finfo(log_ratio.dtype).eps
    floor = math.log(1 - eps_low) if eps_low < 1 else -math.inf
    ceiling = math.log(1 + eps_high)
    low = counted & (log_ratio <= floor + rounding * max(1.0, abs(floor)) if math.isfinite(floor) else terms.impossible)
    high = counted & ~low & (log_ratio >= ceiling - rounding * max(1.0, ceiling))
    accepted = counted & ~low & ~high

    kept = torch.where(accepted, log_ratio, 0.0)
    logp = torch.where(accepted, terms.logprobs, 0.0)
    ratio = torch.exp(kept if detach_ratio else kept + (logp - logp.detach()))
    products = ratio * torch.where(accepted, terms.advantages, 0.0) * logp
    return TokenLoss(-products.sum(), counted, accepted, low, high, log_ratio)


def dis(
    logprobs: Tensor,
    behaviour_logprobs: Tensor,
    advantages: Tensor,
    action_mask: Tensor,
    *,
    eps_low: float,
    eps_high: float,
    denominator: float | Tensor | None = None,
) -> LossOutput:
    """The DIS loss of `dis_sum`, divided. Elementwise over any shape; bf16 and fp16 go up to fp32, float64 stays.

    eps_low, eps_high are epsilons, not bounds: 0.3 and 5.0 give the band (0.7, 6.0). denominator: the action tokens of the whole optimiser
    batch, rejected ones included; None counts the finite action tokens of this call (1 when there is none, so that the loss is 0).
    """
    token = dis_sum(LossInputs(logprobs, behaviour_logprobs, advantages, action_mask), eps_low=eps_low, eps_high=eps_high)
    count = int(token.counted.sum())
    loss = token.total / (max(count, 1) if denominator is None else denominator)
    metrics = ratio_metrics(token.log_ratio, token.counted, token.low, token.high)
    metrics["off_policy/tokens"] = float(count)
    metrics["off_policy/non_finite_tokens"] = float(int(action_mask.bool().sum()) - count)
    if count:
        metrics["actor/pg_loss"] = float(loss.detach())
    return LossOutput(loss, metrics)


def kl_k3_sum(logprobs: Tensor, reference: Tensor, mask: Tensor) -> Tensor:
    """Sum over the mask of exp(d) - 1 - d with d = log pi_ref - log pi_theta: the k3 estimator of KL(pi_theta || pi_ref) on tokens of pi_theta.

    Scalar with graph. d is capped at 20, beyond which its gradient is 0; tokens with a non-finite d do not count.
    """
    logprobs, reference = at_least_fp32(logprobs), at_least_fp32(reference)
    zero = logprobs.new_zeros(())
    kept = mask.bool() & torch.isfinite(reference) & torch.isfinite(logprobs.detach())
    difference = (torch.where(kept, reference, zero) - torch.where(kept, logprobs, zero)).clamp_max(LOG_RATIO_CAP)
    return (torch.exp(difference) - 1 - difference).sum()


def entropy_sum(entropy: Tensor, mask: Tensor) -> Tensor:
    """Sum of per-token entropies (nats) over the mask; scalar with graph. Subtract it, times its coefficient, from the loss."""
    return torch.where(mask.bool(), at_least_fp32(entropy), 0.0).sum()
