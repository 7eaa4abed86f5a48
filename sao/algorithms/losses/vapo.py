"""VAPO's policy loss: clip-higher, and imitation of the answers that were right."""

from __future__ import annotations

import torch

from sao.algorithms.losses.ppo_clip import ppo_clip
from sao.algorithms.policy_loss import LossInputs, TokenLoss, terms_of


def vapo(inputs: LossInputs, *, eps_low: float, eps_high: float, nll_coef: float) -> TokenLoss:
    """ppo_clip with eps_high > eps_low, plus nll_coef times the mean of - log pi_theta over tokens of positive outcome (Yue et al., 2025, arXiv 2504.05118).

    The two means have different counts. The caller divides by all action tokens, so the second sum is divided by `positive_share` here, which makes it a
    mean over the positive tokens of the whole batch. Raises ValueError without `outcomes`, or for a negative coefficient.
    """
    if inputs.outcomes is None:
        raise ValueError("vapo needs LossInputs.outcomes, the reward of each token's episode")
    if nll_coef < 0:
        raise ValueError(f"nll_coef must not be negative, got {nll_coef}")
    token = ppo_clip(inputs, eps_low=eps_low, eps_high=eps_high)
    if not inputs.positive_share:
        return token
    positive = token.counted & (inputs.outcomes > 0)
    imitation = -torch.where(positive, terms_of(inputs).logprobs, 0.0).sum() / inputs.positive_share
    return token._replace(total=token.total + nll_coef * imitation)
