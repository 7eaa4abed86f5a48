"""REINFORCE on tokens: the policy gradient as if the trained policy had sampled them."""

from __future__ import annotations

import torch

from sao.algorithms.policy_loss import LossInputs, TokenLoss, terms_of


def reinforce(inputs: LossInputs) -> TokenLoss:
    """total = - sum A * log pi_theta (Williams, 1992), whatever policy sampled the token.

    No ratio, no band: every counted token is accepted with weight 1, one of trained probability 0 excepted (low). Shapes as in `LossInputs`.
    """
    terms = terms_of(inputs)
    low = terms.impossible
    accepted = terms.counted & ~low
    weight = accepted.to(terms.log_ratio.dtype)
    total = -(weight * terms.advantages * terms.logprobs).sum()
    return TokenLoss(total, terms.counted, accepted, low, torch.zeros_like(low), terms.log_ratio, weight)
