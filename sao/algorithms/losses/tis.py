"""Truncated importance sampling: a detached weight with a ceiling and no rejection."""

from __future__ import annotations

import math

import torch

from sao.algorithms.policy_loss import LossInputs, TokenLoss, terms_of


def tis(inputs: LossInputs, *, cap: float) -> TokenLoss:
    """total = - sum sg[min(r, cap)] * A * log pi_theta with r = pi_theta / pi_rollout.

    Ionides, "Truncated Importance Sampling" (2008); per token against the engine's log-probs as in Yao et al., "Your Efficient RL Framework Secretly
    Brings You Off-Policy RL Training" (2025), who cap at 2. A token above the cap keeps the weight `cap`: nothing is rejected but a trained
    probability of 0 (low), whose weight is 0. Shapes as in `LossInputs`. Raises ValueError for a cap that is not above 0.
    """
    if cap <= 0:
        raise ValueError(f"cap must be above 0, got {cap}")
    terms = terms_of(inputs)
    low = terms.impossible
    accepted = terms.counted & ~low
    weight = torch.where(accepted, terms.log_ratio.clamp_max(math.log(cap)).exp(), 0.0)
    total = -(weight * terms.advantages * terms.logprobs).sum()
    return TokenLoss(total, terms.counted, accepted, low, torch.zeros_like(low), terms.log_ratio, weight)
