"""From rewards and values to advantages and critic targets, for a whole batch: the configured estimator over segments and episodes."""

from __future__ import annotations

import torch
from torch import Tensor

from sao.algorithms.advantages import (
    combine_segments,
    every_position_gae,
    later_action_tokens,
    length_adaptive_lambda,
    skip_observation_gae,
    step_level_gae,
)
from sao.config import AlgoConfig
from sao.errors import ConfigError
from sao.learner.batching import Batch

CHOICES = {
    "lambda_length": ("tokens", "turns"),
    "value_level": ("token", "step_mean", "step_last"),
    "values": ("after", "before"),
    "whiten": ("auto", "on", "off"),
    "truncation": ("terminal", "bootstrap", "drop"),
}


def check_algo(algo: AlgoConfig) -> None:
    """Refuse values outside their choices or ranges, and combinations without a meaning."""
    for name, choices in CHOICES.items():
        if getattr(algo, name) not in choices:
            raise ConfigError(f"algo.{name} is {getattr(algo, name)!r}; choose one of {', '.join(choices)}")
    for name in ("gamma", "lambda_critic", "lambda_policy"):
        value = getattr(algo, name)
        if value is not None and not 0 <= value <= 1:
            raise ConfigError(f"algo.{name} is {value}; give a number between 0 and 1")
    if algo.alpha <= 0:
        raise ConfigError(f"algo.alpha is {algo.alpha}; give a number above 0")
    if not algo.skip_observation and algo.value_level != "token":
        raise ConfigError(f"algo.value_level={algo.value_level} has no meaning with algo.skip_observation=false; set value_level=token")


def policy_lambda(batch: Batch, algo: AlgoConfig) -> Tensor:
    """lambda_policy per sample, float64[S]: fixed, or length-adaptive in the whole episode's action tokens or turns."""
    if algo.lambda_policy is not None:
        return torch.full((len(batch.samples),), float(algo.lambda_policy), dtype=torch.float64)
    turns = algo.lambda_length == "turns"
    lengths = [sum(len(s.turn_ends()) for s in t.segments) if turns else t.action_tokens for t in batch.trajectories]
    return length_adaptive_lambda(torch.tensor([lengths[s.trajectory] for s in batch.samples], dtype=torch.float64), algo.alpha)


def _later(batch: Batch) -> list[int]:
    """Per sample, action tokens in the episode's segments after it."""
    per_trajectory = [
        later_action_tokens([s.action_tokens for s in t.segments], [s.parent[0] if s.parent else None for s in t.segments])
        for t in batch.trajectories
    ]
    return [per_trajectory[s.trajectory][s.segment] for s in batch.samples]


def needs_values(batch: Batch, algo: AlgoConfig) -> bool:
    """Whether critic targets depend on values at all; the default, the outcome itself, does not."""
    cut = algo.truncation == "bootstrap" and any(t.finish.kind == "truncated" for t in batch.trajectories)
    return cut or algo.lambda_critic < 1


def bootstraps(batch: Batch, algo: AlgoConfig, state_values: Tensor) -> Tensor:
    """Value after the end per sample, float[S]: V at the last token of the episode's last segment when it was cut off and truncation=bootstrap, else 0.

    All segments of an episode carry one outcome, so they share it.
    """
    ends = torch.zeros(len(batch.samples), dtype=state_values.dtype)
    if algo.truncation != "bootstrap":
        return ends
    last = {s.trajectory: i for i, s in enumerate(batch.samples)}
    for index, sample in enumerate(batch.samples):
        if batch.trajectories[sample.trajectory].finish.kind == "truncated":
            ends[index] = state_values[batch.end_state[last[sample.trajectory]]]
    return ends


def _grids(batch: Batch, algo: AlgoConfig, state_values: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(rewards, values, mask), each [S, width]; mask selects the action tokens in canonical order.

    Token-level skip-observation GAE deletes observations anyway, so only action tokens are laid out; the other variants need every position.
    """
    compressed = algo.skip_observation and algo.value_level == "token"
    counts = torch.tensor([len(s.actions) for s in batch.samples])
    width = int(counts.max()) if compressed else max(s.length for s in batch.samples)
    values = torch.zeros(len(batch.samples), width, dtype=state_values.dtype)
    rewards = torch.zeros_like(values)
    if compressed:
        mask = torch.arange(width) < counts[:, None]
        values[mask] = state_values[batch.state_of]
    else:
        mask = torch.zeros(values.shape, dtype=torch.bool)
        for row, sample in enumerate(batch.samples):
            mask[row, torch.from_numpy(sample.actions)] = True
            values[row, : sample.length] = state_values[sample.state_offset : sample.state_offset + sample.length]
    rewards[mask] = batch.rewards.to(rewards.dtype)
    return rewards, values, mask


def critic_targets(batch: Batch, algo: AlgoConfig, state_values: Tensor) -> Tensor:
    """Returns float[N] with lambda_critic (1: the outcome, discounted): what the critic learns, never whitened.

    Token-level whatever the policy's variant. state_values float[states] matter only when `needs_values`. Across segments they carry gamma^(later tokens).
    """
    if not batch.samples:
        return state_values.new_zeros(0)
    base = AlgoConfig(skip_observation=True, value_level="token")
    rewards, values, mask = _grids(batch, base, state_values)
    ends = bootstraps(batch, algo, state_values)
    _, returns = skip_observation_gae(rewards, values, mask, gamma=algo.gamma, lam=algo.lambda_critic, bootstrap=ends)
    if algo.gamma < 1:
        returns = combine_segments(returns, _later(batch), gamma=algo.gamma)
    return returns[mask]


def policy_advantages(batch: Batch, algo: AlgoConfig, state_values: Tensor, lam: Tensor) -> Tensor:
    """Advantages float[N] of the configured estimator, combined across segments, before whitening."""
    if not batch.samples:
        return state_values.new_zeros(0)
    rewards, values, mask = _grids(batch, algo, state_values)
    ends = bootstraps(batch, algo, state_values)
    if not algo.skip_observation:
        advantages, _ = every_position_gae(rewards, values, mask, gamma=algo.gamma, lam=lam, bootstrap=ends)
    elif algo.value_level == "token":
        advantages, _ = skip_observation_gae(rewards, values, mask, gamma=algo.gamma, lam=lam, bootstrap=ends)
    else:
        how = algo.value_level.removeprefix("step_")
        advantages, _ = step_level_gae(rewards, values, mask, how=how, gamma=algo.gamma, lam=lam, bootstrap=ends)
    later = _later(batch)
    if any(later):
        advantages = combine_segments(advantages, later, gamma=algo.gamma, lam=lam)
    return advantages[mask]
