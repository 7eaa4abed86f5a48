"""IcePop: a double-sided mask on the engine's mismatch, and PPO's clipping on staleness."""

from __future__ import annotations

import math
from dataclasses import replace

import torch

from sao.algorithms.losses.ppo_clip import clipped
from sao.algorithms.policy_loss import LossInputs, TokenLoss, at_least_fp32, terms_of


def icepop(inputs: LossInputs, *, mask_low: float, mask_high: float, eps_low: float, eps_high: float) -> TokenLoss:
    """total = - sum M(k) min(r A, clip(r, 1 - eps_low, 1 + eps_high) A) with k = pi_old / pi_rollout, r = pi_theta / pi_old.

        M(k) = k if mask_low <= k <= mask_high else 0

    Ling Team, "Small Leak Can Sink a Great Ship" (2025) and the Ring-1T report (arXiv 2510.18855): band 0.5 to 5. pi_old (`inputs.old`) is the trainer's
    own log-prob under the weights that sampled the token, so k shows the engine's mismatch alone and r staleness alone. M is a constant. low and high:
    outside the band of k, or clipped by r. A token whose old log-prob is missing is not counted. Raises ValueError without `old` or for a band upside down.
    """
    if inputs.old is None:
        raise ValueError("icepop needs LossInputs.old, the log-probs under the weights that sampled")
    if not 0 < mask_low < mask_high:
        raise ValueError(f"icepop needs 0 < mask_low < mask_high, got {mask_low} and {mask_high}")
    known = torch.isfinite(inputs.old)
    terms = terms_of(replace(inputs, mask=inputs.mask.bool() & known))
    to_old = terms_of(replace(inputs, mask=terms.counted, behaviour=inputs.old))
    mismatch = torch.where(terms.counted, at_least_fp32(inputs.old) - at_least_fp32(inputs.behaviour), 0.0)
    below, above = terms.counted & (mismatch < math.log(mask_low)), terms.counted & (mismatch > math.log(mask_high))
    inside = terms.counted & ~below & ~above
    cut = clipped(to_old, eps_low=eps_low, eps_high=eps_high)
    low, high = below | cut.low & ~above, above | cut.high & ~below
    accepted = terms.counted & ~low & ~high
    kept = torch.where(inside, torch.where(inside, mismatch, 0.0).exp(), 0.0)
    return TokenLoss(-(kept * cut.value).sum(), terms.counted, accepted, low, high, terms.log_ratio, torch.where(accepted, kept * cut.ratio, 0.0))
