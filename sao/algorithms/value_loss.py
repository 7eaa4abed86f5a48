"""The value loss and the critic's quality: pure functions of tensors of any shape."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from sao.algorithms.policy_loss import LossOutput, at_least_fp32


def mse_sum(values: Tensor, returns: Tensor, action_mask: Tensor) -> Tensor:
    """Sum over the mask of (V - R)^2; scalar with graph to `values` alone."""
    mask = action_mask.bool()
    values, returns = at_least_fp32(values), at_least_fp32(returns.detach())
    zero = values.new_zeros(())
    return (torch.where(mask, values, zero) - torch.where(mask, returns, zero)).square().sum()


def mse(values: Tensor, returns: Tensor, action_mask: Tensor, *, denominator: float | Tensor | None = None) -> LossOutput:
    """Mean squared error over action tokens, unclipped, without a factor 1/2 (SAO section 3.2).

    denominator: the action tokens of the whole optimiser batch; None counts this call's (1 when there is none, so that the loss is 0).
    """
    mask = action_mask.bool()
    count = int(mask.sum())
    loss = mse_sum(values, returns, mask) / (max(count, 1) if denominator is None else denominator)
    metrics = {"critic/tokens": float(count)}
    if count:
        metrics["critic/vf_loss"] = float(loss.detach())
        metrics["critic/values_mean"] = float(values.detach()[mask].double().mean())
        metrics["critic/returns_mean"] = float(returns.detach()[mask].double().mean())
    return LossOutput(loss, metrics)


@torch.no_grad()
def masked_variance(x: Tensor, mask: Tensor, *, group: dist.ProcessGroup | None = None) -> float | None:
    """Population variance over the mask (all ranks of `group`), or None without a token. Exactly 0 when all entries are equal."""
    mask = mask.bool()
    kept = x[mask].double()
    sums = torch.stack([kept.new_tensor(float(kept.numel())), kept.sum()])
    span = torch.stack([kept.max(), -kept.min()]) if kept.numel() else kept.new_full((2,), -torch.inf)
    if group is not None:
        dist.all_reduce(sums, group=group)
        dist.all_reduce(span, op=dist.ReduceOp.MAX, group=group)
    if sums[0] == 0:
        return None
    if span[0] == -span[1]:
        return 0.0
    squares = (kept - sums[1] / sums[0]).square().sum()
    if group is not None:
        dist.all_reduce(squares, group=group)
    return float(squares / sums[0])


def explained_variance(values: Tensor, returns: Tensor, action_mask: Tensor, *, group: dist.ProcessGroup | None = None) -> float | None:
    """1 - Var(R - V) / Var(R) over action tokens; None (undefined, not 0) when Var(R) = 0 or there is no token."""
    total = masked_variance(returns, action_mask, group=group)
    residual = masked_variance(returns.double() - values.double(), action_mask, group=group)
    if not total or residual is None:
        return None
    return 1.0 - residual / total
