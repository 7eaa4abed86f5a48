"""How far the learner is from what sampled the tokens: ratio statistics, split by version gap.

Gap 0 (a token sampled under exactly the weights now being trained) shows the difference between engine and trainer; larger gaps add staleness.
Telling the two apart is what these metrics are for.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

# Upper ends of the version-gap buckets; the last one is open.
GAP_EDGES = (0, 1, 2, 3, 4, 8, 16)
GAP_NAMES = ("gap_0", "gap_1", "gap_2", "gap_3", "gap_4", "gap_5_8", "gap_9_16", "gap_17_up")
# exp of a log-ratio beyond this is reported as exp(20): a metric, not part of any loss.
LOG_RATIO_CAP = 20.0


@torch.no_grad()
def ratio_metrics(
    log_ratio: Tensor,
    counted: Tensor,
    low: Tensor,
    high: Tensor,
    gaps: Tensor | None = None,
    *,
    weights: Tensor | None = None,
    group: dist.ProcessGroup | None = None,
) -> dict[str, float]:
    """Statistics of r = exp(log_ratio) over the counted tokens of a whole batch.

    Args:
        log_ratio: log pi_theta - log pi_rollout, any shape; ignored where not counted.
        counted: bool, tokens in the loss's denominator; low, high: bool, rejected below and above the band.
        gaps: int, trainer version minus the version the token was sampled under; None leaves the split out.
        weights: the factor each token's gradient was given, 0 where rejected; None: r inside the band.
        group: joins ranks.

    Returns:
        sao/dis_masked_frac_low and _high; sao/ess = (sum w)^2 / (n sum w^2) of the weights w used (0 where rejected), in [0, 1];
        off_policy/{ratio_mean, abs_log_ratio_mean, abs_log_ratio_max, kl} with kl = mean(r - 1 - log r); and per gap
        off_policy/<gap>/{tokens, ratio_mean, abs_log_ratio_mean, masked_frac}. Undefined ones are absent.
    """
    counted, low, high = (x.reshape(-1).bool() for x in (counted, low, high))
    zero = torch.zeros((), dtype=torch.float64, device=counted.device)
    log_r = torch.where(counted, log_ratio.detach().reshape(-1).double(), zero).clamp(-1e6, 1e6)
    ratio = log_r.clamp(-LOG_RATIO_CAP, LOG_RATIO_CAP).exp()
    weight = torch.where(counted & ~low & ~high, ratio if weights is None else weights.detach().reshape(-1).double(), zero)
    edges = torch.tensor(GAP_EDGES, device=counted.device)
    bucket = torch.zeros_like(counted, dtype=torch.long) if gaps is None else torch.bucketize(gaps.reshape(-1).long(), edges)
    keep = counted.double()
    columns = torch.stack(
        [keep, (low & counted).double(), (high & counted).double(), ratio * keep, log_r.abs(), weight, weight.square(), (ratio - 1 - log_r) * keep]
    )
    sums = torch.zeros(len(columns), len(GAP_NAMES), dtype=torch.float64, device=counted.device)
    sums.scatter_add_(1, bucket.expand(len(columns), -1), columns)
    largest = log_r.abs().max() if log_r.numel() else zero
    if group is not None:
        dist.all_reduce(sums, group=group)
        dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)

    n, low_n, high_n, ratio_sum, abs_sum, w_sum, w_square, kl_sum = sums.sum(1).tolist()
    if n == 0:
        return {}
    metrics = {
        "sao/dis_masked_frac_low": low_n / n,
        "sao/dis_masked_frac_high": high_n / n,
        "off_policy/ratio_mean": ratio_sum / n,
        "off_policy/abs_log_ratio_mean": abs_sum / n,
        "off_policy/abs_log_ratio_max": float(largest),
        "off_policy/kl": kl_sum / n,
    }
    if w_square > 0:
        metrics["sao/ess"] = w_sum * w_sum / (n * w_square)
    if gaps is not None:
        for name, (tokens, below, above, ratios, absolute, *_) in zip(GAP_NAMES, sums.T.tolist(), strict=True):
            if tokens:
                metrics[f"off_policy/{name}/tokens"] = tokens
                metrics[f"off_policy/{name}/ratio_mean"] = ratios / tokens
                metrics[f"off_policy/{name}/abs_log_ratio_mean"] = absolute / tokens
                metrics[f"off_policy/{name}/masked_frac"] = (below + above) / tokens
    return metrics
