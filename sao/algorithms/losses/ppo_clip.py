"""PPO's clipped surrogate, against the policy that sampled."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from sao.algorithms.policy_loss import LossInputs, Terms, TokenLoss, terms_of


class Clipped(NamedTuple):
    """min(r A, clip(r) A) per token with graph; where it was cut from below and above (bool); r, detached."""

    value: Tensor
    low: Tensor
    high: Tensor
    ratio: Tensor


def clipped(terms: Terms, *, eps_low: float, eps_high: float) -> Clipped:
    """The surrogate per token. high: r > 1 + eps_high with A > 0; low: r < 1 - eps_low with A < 0, or a trained probability of 0; neither has a gradient."""
    if eps_low < 0 or eps_high < 0:
        raise ValueError(f"eps_low and eps_high must not be negative, got {eps_low} and {eps_high}")
    graph, gain = terms.ratio(), terms.advantages
    ratio = graph.detach()
    high = terms.counted & (ratio > 1 + eps_high) & (gain > 0)
    low = terms.counted & ((ratio < 1 - eps_low) & (gain < 0) | terms.impossible)
    cut = torch.minimum(ratio * gain, ratio.clamp(1 - eps_low, 1 + eps_high) * gain)
    return Clipped(torch.where(terms.counted & ~low & ~high, graph * gain, torch.where(terms.counted, cut, 0.0)), low, high, ratio)


def ppo_clip(inputs: LossInputs, *, eps_low: float, eps_high: float) -> TokenLoss:
    """total = - sum min(r A, clip(r, 1 - eps_low, 1 + eps_high) A) with r = pi_theta / pi_rollout (Schulman et al., 2017, equation 7).

    Two epsilons as in DAPO (Yu et al., 2025: 0.2 and 0.28). r is taken to the logged behaviour log-prob, not to a recomputed old policy. Differentiated
    through r: a token inside gives A * r * grad log pi; one that would move further the way it went gives none (`clipped`). A token of negative
    advantage has no ceiling; its ratio is capped at exp(20), beyond which it gives no gradient either. Raises ValueError for a negative epsilon.
    """
    terms = terms_of(inputs)
    cut = clipped(terms, eps_low=eps_low, eps_high=eps_high)
    accepted = terms.counted & ~cut.low & ~cut.high
    return TokenLoss(-cut.value.sum(), terms.counted, accepted, cut.low, cut.high, terms.log_ratio, torch.where(accepted, cut.ratio, 0.0))
