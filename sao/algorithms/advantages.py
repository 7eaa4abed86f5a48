"""Advantages: skip-observation GAE and what surrounds it, as pure functions of tensors.

Index convention (sao/trajectory.py): `values[b, t]` is V(s_t), read BEFORE token t, that is from the hidden state of position t - 1.

    token           p0    p1    a2    a3    o4    a5
    action_mask     F     F     T     T     F     T
    delta                       V3-V2 V5-V3       r5-V5      one step from a3 to a5, however long the observation between them

Everything here is a target: results carry no gradient. Arithmetic runs in float64 and comes back in the inputs' floating type (at least float32).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

WHITEN_EPS = 1e-8


def _result_dtype(*tensors: Tensor) -> torch.dtype:
    """float64 when any input is float64, else float32."""
    return torch.float64 if any(t.dtype == torch.float64 for t in tensors) else torch.float32


def _per_row(value: float | Tensor, rows: int, name: str, device: torch.device) -> Tensor:
    """`value` as float64 [rows] from a scalar or [rows] tensor; any other shape is refused, [rows, 1] too (it would broadcast over time)."""
    tensor = torch.as_tensor(value, dtype=torch.float64, device=device)
    if tensor.ndim == 0:
        return tensor.expand(rows)
    if tensor.shape != (rows,):
        raise ValueError(f"{name} must be a scalar or have shape [{rows}], got {list(tensor.shape)}")
    return tensor


def _check_grid(rewards: Tensor, values: Tensor, action_mask: Tensor) -> None:
    if action_mask.ndim != 2:
        raise ValueError(f"action_mask must have shape [B, T], got {list(action_mask.shape)}")
    for name, tensor in (("rewards", rewards), ("values", values)):
        if tensor.shape != action_mask.shape:
            raise ValueError(f"{name} has shape {list(tensor.shape)}, action_mask has {list(action_mask.shape)}")


def _scan_back(addend: Tensor, factor: Tensor) -> Tensor:
    """x[t] = addend[t] + factor[t] * x[t + 1] with x past the end 0, for [B, N] tensors, by doubling in log2(N) passes."""
    total, weight, stride = addend.clone(), factor.clone(), 1
    while stride < total.shape[1]:
        total[:, :-stride] = total[:, :-stride] + weight[:, :-stride] * total[:, stride:]
        weight[:, :-stride] = weight[:, :-stride] * weight[:, stride:]
        weight[:, -stride:] = 0.0
        stride *= 2
    return total


@torch.no_grad()
def skip_observation_gae(
    rewards: Tensor,
    values: Tensor,
    action_mask: Tensor,
    *,
    gamma: float = 1.0,
    lam: float | Tensor = 1.0,
    bootstrap: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Generalised advantage estimation over the action tokens alone (SAO, arXiv 2607.07508, section 3.2).

    Observation positions are deleted, ordinary GAE runs over what remains, and the result is scattered back with zeros elsewhere:

        delta_i = r_i + gamma * V_{i+1} - V_i
        A_i     = delta_i + gamma * lam * A_{i+1}           i counts action tokens

    Args:
        rewards, values: [B, T] float; whatever stands off the mask (NaN included) is ignored.
        action_mask: [B, T] bool.
        gamma: discount per action token.
        lam: scalar or [B]; [B, 1] is refused.
        bootstrap: [B], V after the last token present, for rows that were cut off; None or 0 means terminal.

    Returns:
        (advantages, returns), both [B, T], 0 off the mask; returns = advantages + values for the `lam` given.
    """
    _check_grid(rewards, values, action_mask)
    mask = action_mask.bool()
    batch, length = mask.shape
    dtype = _result_dtype(rewards, values)
    lam_b = _per_row(lam, batch, "lam", mask.device)
    end = torch.zeros(batch, dtype=torch.float64, device=mask.device) if bootstrap is None else _per_row(bootstrap, batch, "bootstrap", mask.device)
    counts = mask.sum(1)
    actions = int(counts.max()) if batch and length else 0
    if actions == 0:
        zeros = torch.zeros(batch, length, dtype=dtype, device=mask.device)
        return zeros, zeros.clone()

    order = torch.argsort((~mask).to(torch.uint8), dim=1, stable=True)[:, :actions]
    present = torch.arange(actions, device=mask.device) < counts[:, None]
    zero = torch.zeros((), dtype=torch.float64, device=mask.device)
    reward = torch.where(present, rewards.gather(1, order).double(), zero)
    value = torch.where(present, values.gather(1, order).double(), zero)
    following = torch.cat([value[:, 1:], zero.expand(batch, 1)], 1)
    is_last = torch.arange(actions, device=mask.device) == counts[:, None] - 1
    following = torch.where(is_last, end[:, None], following)

    delta = torch.where(present, reward + gamma * following - value, zero)
    advantage = _scan_back(delta, torch.where(present, gamma * lam_b[:, None], zero))
    full = torch.zeros(2, batch, length, dtype=torch.float64, device=mask.device)
    full[0].scatter_(1, order, torch.where(present, advantage, zero))
    full[1].scatter_(1, order, torch.where(present, advantage + value, zero))
    return full[0].to(dtype), full[1].to(dtype)


@torch.no_grad()
def every_position_gae(
    rewards: Tensor,
    values: Tensor,
    action_mask: Tensor,
    *,
    gamma: float = 1.0,
    lam: float | Tensor = 1.0,
    bootstrap: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Ordinary GAE over every position from the first to the last action token, observations included (the variant SAO argues against).

    Shapes as in `skip_observation_gae`; `values` must hold V at the observation positions in between as well. Rewards there are ignored.
    """
    _check_grid(rewards, values, action_mask)
    mask = action_mask.bool()
    started = mask.cumsum(1) > 0
    unfinished = mask.flip(1).cumsum(1).flip(1) > 0
    placed = torch.where(mask, rewards, torch.zeros_like(rewards))
    advantages, returns = skip_observation_gae(placed, values, started & unfinished, gamma=gamma, lam=lam, bootstrap=bootstrap)
    return torch.where(mask, advantages, 0.0), torch.where(mask, returns, 0.0)


@torch.no_grad()
def step_level_gae(
    rewards: Tensor,
    values: Tensor,
    action_mask: Tensor,
    *,
    how: str,
    gamma: float = 1.0,
    lam: float | Tensor = 1.0,
    bootstrap: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """GAE with one value per turn (a maximal run of action tokens), shared by the turn's tokens: the rejected variants of SAO's appendix.

    how: `mean` takes the average of the turn's token values, `last` the value of its last token. A turn's reward is the sum over its tokens, and
    one factor gamma * lam stands between consecutive turns. Shapes as in `skip_observation_gae`; a turn's advantage is given to each of its tokens.
    """
    if how not in ("mean", "last"):
        raise ValueError(f"how must be mean or last, got {how!r}")
    _check_grid(rewards, values, action_mask)
    mask = action_mask.bool()
    dtype = _result_dtype(rewards, values)
    before = torch.nn.functional.pad(mask[:, :-1], (1, 0)) if mask.shape[1] else mask
    turn = ((mask & ~before).cumsum(1) - 1).clamp_min(0)
    turns = int((mask & ~before).sum(1).max()) if mask.numel() else 0
    if turns == 0:
        return torch.zeros(mask.shape, dtype=dtype, device=mask.device), torch.zeros(mask.shape, dtype=dtype, device=mask.device)
    zero = torch.zeros((), dtype=torch.float64, device=mask.device)
    value = torch.where(mask, values.double(), zero)
    after = torch.nn.functional.pad(mask[:, 1:], (0, 1))
    weight = mask.double() if how == "mean" else (mask & ~after).double()

    def per_turn(tokens: Tensor) -> Tensor:
        return torch.zeros(mask.shape[0], turns, dtype=torch.float64, device=mask.device).scatter_add_(1, turn, tokens)

    tokens_in_turn = per_turn(weight)
    turn_value = per_turn(value * weight) / tokens_in_turn.clamp_min(1.0)
    turn_reward = per_turn(torch.where(mask, rewards.double(), zero))
    advantages, returns = skip_observation_gae(turn_reward, turn_value, tokens_in_turn > 0, gamma=gamma, lam=lam, bootstrap=bootstrap)
    spread = [torch.where(mask, x.gather(1, turn), zero).to(dtype) for x in (advantages, returns)]
    return spread[0], spread[1]


def length_adaptive_lambda(action_tokens: Tensor | Sequence[int], alpha: float = 1.5) -> Tensor:
    """lambda_policy = 1 - 1 / (alpha * l), clamped to [0, 1] (SAO section 3.2).

    action_tokens: [B] counts l per trajectory (all its segments together); 0 gives 0. Returns float [B], float64 for float64 input.
    """
    if alpha <= 0:
        raise ValueError(f"alpha must be positive, got {alpha}")
    counts = torch.as_tensor(action_tokens)
    dtype = torch.float64 if counts.dtype == torch.float64 else torch.float32
    return (1.0 - 1.0 / (alpha * counts.double())).clamp(0.0, 1.0).to(dtype)


@torch.no_grad()
def whiten(advantages: Tensor, action_mask: Tensor, *, group: dist.ProcessGroup | None = None) -> Tensor:
    """(A - mean) / sqrt(var + 1e-8) over all action tokens, unbiased variance; same shape, 0 off the mask.

    group: a process group whose ranks share one mean and variance; None: this process alone. Below 2 tokens in all, the advantages stay as
    they are on the mask (there is no variance). Whether whitening makes sense at all (it does not when every return is equal) is the caller's to say.
    """
    mask = action_mask.bool()
    zero = torch.zeros((), dtype=torch.float64, device=mask.device)
    kept = torch.where(mask, advantages.double(), zero)
    sums = torch.stack([mask.sum().double(), kept.sum()])
    if group is not None:
        dist.all_reduce(sums, group=group)
    count, total = float(sums[0]), sums[1]
    dtype = _result_dtype(advantages)
    if count < 2:
        return kept.to(dtype)
    centred = torch.where(mask, kept - total / count, zero)
    squares = centred.square().sum()
    if group is not None:
        dist.all_reduce(squares, group=group)
    return (centred * torch.rsqrt(squares / (count - 1) + WHITEN_EPS)).to(dtype)


def later_action_tokens(action_tokens: Sequence[int], parents: Sequence[int | None] | None = None) -> list[int]:
    """Action tokens in the segments that come after each segment of one episode.

    action_tokens: per segment, in episode order. parents[s]: the segment s forked off (a sub-agent, a rewritten history), or None: segments
    without a parent form the main chain, each following the one before. A segment counts its descendants only, so parallel branches do not
    count each other.

        chain 0 - 1 - 2 with 3, 2, 4 tokens          -> 6, 4, 0
        0 with branches 1 and 2 (both parents 0)     -> 6, 0, 0
    """
    parents = [None] * len(action_tokens) if parents is None else parents
    if len(parents) != len(action_tokens):
        raise ValueError(f"{len(parents)} parents for {len(action_tokens)} segments")
    later = [0] * len(action_tokens)
    ancestor: list[int | None] = []
    tail: int | None = None
    for segment, parent in enumerate(parents):
        if parent is not None and not 0 <= parent < segment:
            raise ValueError(f"segment {segment} names parent {parent}, which does not precede it")
        if parent is None:
            parent, tail = tail, segment
        ancestor.append(parent)
    for segment, tokens in enumerate(action_tokens):
        above = ancestor[segment]
        while above is not None:
            later[above] += tokens
            above = ancestor[above]
    return later


def combine_segments(local: Tensor, later: Sequence[int] | Tensor, *, gamma: float = 1.0, lam: float | Tensor = 1.0) -> Tensor:
    """A[s, i] = (gamma * lam)^(action tokens in later segments) * A_local[s, i] (Compaction, GLM-5.2).

    local: [S, T], each segment's own advantages with the episode's outcome on its last action token. later: [S] from `later_action_tokens`.
    lam: scalar or [S]. With lam = 1 the same factor, gamma^later, carries returns across segments.
    """
    rows = local.shape[0]
    base = gamma * _per_row(lam, rows, "lam", local.device)
    exponent = torch.as_tensor(later, dtype=torch.float64, device=local.device)
    if exponent.shape != (rows,):
        raise ValueError(f"later has shape {list(exponent.shape)}, expected [{rows}]")
    return (local.double() * torch.pow(base, exponent)[:, None]).to(_result_dtype(local))
