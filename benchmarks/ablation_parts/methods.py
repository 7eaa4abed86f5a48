"""The methods: each is the framework's own configuration (conf/algo/NAME.yaml) and its own pure functions (sao/algorithms), applied to S copies at once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch import Tensor

from ablation_parts.sampler import Rollouts
from ablation_parts.stack import ATTENTION
from sao.algorithms import catalogue
from sao.algorithms.advantages import every_position_gae, length_adaptive_lambda, skip_observation_gae, step_level_gae
from sao.algorithms.outcome import Outcomes
from sao.algorithms.policy_loss import LossInputs, TokenLoss
from sao.config import AlgoConfig, Config
from sao.config_load import overlay

VALUE_BASED = (
    "sao",
    "sao_no_dis",
    "sao_k1",
    "sao_full_critic",
    "sao_fixed_lambda",
    "sao_no_skip",
    "sao_step_values",
    "ppo_clip",
    "tis",
    "icepop",
    "vapo",
)
CRITIC_FREE = ("reinforce", "grpo", "grpo_dis", "running_mean", "running_mean_global", "batch_mean", "single_dis")
METHODS = VALUE_BASED + CRITIC_FREE
EIGHTFOLD = ("grpo_x8", "grpo_dis_x8")  # as many PROMPTS a step as the others have rollouts: the equal-steps view


@dataclass(frozen=True, eq=False)
class Method:
    """What the loop asks of a method. critic_updates is 0 without a critic; frozen names the parts of the critic that stay as they are."""

    name: str
    algo: AlgoConfig
    critic_updates: int
    critic_only_steps: int
    frozen: tuple[str, ...]
    group: int
    pool: int
    loss: Callable[..., TokenLoss]
    loss_arguments: dict[str, Any]
    needs_old: bool
    advantage: Callable[..., Any] | None = None
    advantage_arguments: dict[str, Any] = field(default_factory=dict)


@cache
def method(name: str) -> Method:
    config = overlay(Config(), [f"algo={name.removesuffix('_x8')}"])
    algo, critic = config.algo, catalogue.needs_critic(config.algo)
    return Method(
        name=name,
        algo=algo,
        critic_updates=config.critic.updates if critic else 0,
        critic_only_steps=catalogue.critic_only_steps(config),
        frozen=ATTENTION if config.critic.freeze else (),
        group=config.rollout.rollouts_per_prompt,
        pool=config.data.pool,
        loss=catalogue.function_of("loss", algo),
        loss_arguments=catalogue.arguments("loss", algo),
        needs_old=catalogue.needs_old(algo),
        advantage=None if critic else catalogue.function_of("advantage", algo),
        advantage_arguments={} if critic else catalogue.arguments("advantage", algo),
    )


def gae(algo: AlgoConfig, batch: Rollouts, values: Tensor) -> Tensor:
    """Advantages [R, T - 1] of the configured estimator, the outcome on each episode's last action token."""
    mask, lengths = batch.mask, batch.mask.sum(1)
    last = mask & (mask.cumsum(1) == lengths[:, None])
    outcome = torch.where(last, batch.rewards[:, None], 0.0)
    lam: float | Tensor = length_adaptive_lambda(lengths.double(), algo.alpha) if algo.lambda_policy is None else algo.lambda_policy
    if not algo.skip_observation:
        return every_position_gae(outcome, values, mask, gamma=algo.gamma, lam=lam)[0]
    if algo.value_level == "token":
        return skip_observation_gae(outcome, values, mask, gamma=algo.gamma, lam=lam)[0]
    return step_level_gae(outcome, values, mask, how=algo.value_level.removeprefix("step_"), gamma=algo.gamma, lam=lam)[0]


def outcome_advantages(
    chosen: Method, rewards: Tensor, tasks: tuple[str, ...], groups: Tensor, state: dict[str, Any]
) -> tuple[Tensor, dict[str, Any]]:
    """Advantages float32 [B] of one copy's batch without a critic, and the state to keep."""
    assert chosen.advantage is not None
    outcomes = Outcomes(rewards.double(), tasks, groups, torch.ones(len(rewards), dtype=torch.bool))
    advantages, state = chosen.advantage(outcomes, state, **chosen.advantage_arguments)
    return advantages.float(), state


def policy_loss(chosen: Method, logprobs: Tensor, batch: Rollouts, old: Tensor | None, advantages: Tensor, rows: slice) -> tuple[Tensor, TokenLoss]:
    """The loss of one copy, divided by all its action tokens, and each token's fate."""
    mask, outcomes = batch.mask[rows], batch.rewards[rows, None].expand_as(batch.mask[rows])
    token = chosen.loss(
        LossInputs(
            logprobs[rows],
            batch.behaviour[rows],
            advantages[rows],
            mask,
            old=None if old is None else old[rows],
            outcomes=outcomes,
            positive_share=float((mask & (outcomes > 0)).sum() / mask.sum()),
        ),
        **chosen.loss_arguments,
    )
    return token.total / mask.sum(), token
