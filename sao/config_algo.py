"""Checks of the algorithm at the door: loss, advantage, critic and groups must belong together, and every key that is set must be read by something.

Imports no torch; a loss or an advantage of the user's is imported, to see what it takes and needs.
"""

from __future__ import annotations

import math
from typing import Any

from sao.algorithms import catalogue
from sao.config import AlgoConfig, Config
from sao.errors import ConfigError

# Keys of `algo` that one loss or one advantage reads; set under another they would do nothing.
DIS_KEYS = catalogue.LOSSES["dis"].keys
RUNNING_MEAN = "running_mean"
GAE_KEYS = ("gamma", "lambda_critic", "lambda_policy", "alpha", "lambda_length", "skip_observation", "value_level", "values")


def check_algorithm(config: Config) -> None:
    """Raises ConfigError for what cannot be trained as configured."""
    algo = config.algo
    for kind in ("loss", "advantage"):
        _check_arguments(kind, algo)
    if algo.loss == "dis":
        _check_band(algo)
    else:
        _refuse_unread(algo, DIS_KEYS, "algo.loss=dis", "set it in algo.loss_args where the loss has one")
    _refuse(
        algo.loss == "vapo" and algo.denominator != "all",
        f"algo.denominator={algo.denominator} with algo.loss=vapo would misweigh its imitation term, a mean of its own; set all",
    )
    if catalogue.needs_critic(algo):
        _check_critic_based(config)
    else:
        _check_critic_free(config)
    _check_groups(config)


def cautions(config: Config, tasks: int | None) -> list[str]:
    """What is legal and most likely not meant, one sentence each. tasks: how many the source draws before one comes again; None: without end."""
    algo = config.algo
    keys = {"algo.eps_low": algo.eps_low if algo.loss == "dis" else 0.0, "algo.loss_args.eps_low": algo.loss_args.get("eps_low", 0.0)}
    found = [
        f"{key}={value:g} leaves no lower bound: these are epsilons, the ratio counts in (1 - eps_low, 1 + eps_high); "
        "for the bounds (0.7, 6) set eps_low=0.3 and eps_high=5"
        for key, value in keys.items()
        if isinstance(value, (int, float)) and value >= 1
    ]
    prompts = config.train.steps * config.train.batch_size
    if algo.advantage == RUNNING_MEAN and catalogue.arguments("advantage", algo)["per_task"] and (tasks is None or tasks >= prompts):
        found.append(
            f"algo.advantage={algo.advantage} compares with earlier outcomes of the same task, and none of the {prompts} prompts comes twice, so nothing will "
            "be trained; set data.pool=64 (algo=running_mean does), or algo.advantage_args.per_task=false (algo=running_mean_global)"
        )
    return found


def _refuse(condition: bool, message: str) -> None:
    if condition:
        raise ConfigError(message)


def _check_arguments(kind: str, algo: AlgoConfig) -> None:
    given: dict[str, Any] = getattr(algo, f"{kind}_args")
    catalogue.arguments(kind, algo)  # refuses names that the function does not take
    name = getattr(algo, kind)
    entry = catalogue.find(kind, name)
    if entry.target == name:
        return  # of the user's own: the values are theirs to judge
    for argument, value in given.items():
        key, default = f"algo.{kind}_args.{argument}", entry.arguments[argument]
        if isinstance(default, bool):
            _refuse(not isinstance(value, bool), f"{key}={value} must be true or false")
            continue
        whole = isinstance(default, int)
        number = isinstance(value, int if whole else (int, float)) and not isinstance(value, bool)
        _refuse(not number, f"{key}={value} must be a {'whole number' if whole else 'number'}")
        _refuse(not math.isfinite(value) or value < 0, f"{key}={value} must be a finite number and not negative")
        _refuse(value == 0 and argument in ("cap", "window", "mask_low"), f"{key}={value} must be above 0")
    merged = {**entry.arguments, **given}
    _refuse(
        "mask_low" in merged and merged["mask_low"] >= merged["mask_high"],
        f"algo.loss_args.mask_low={merged.get('mask_low')} must be below algo.loss_args.mask_high={merged.get('mask_high')}",
    )


def _check_band(algo: AlgoConfig) -> None:
    for key, bound in (("eps_low", "lower bound of the ratio is 1 - eps_low"), ("eps_high", "upper bound of the ratio is 1 + eps_high")):
        value = getattr(algo, key)
        _refuse(value <= 0, f"algo.{key}={value} must be above 0: it is an epsilon, the {bound}")


def _refuse_unread(algo: AlgoConfig, keys: tuple[str, ...], reader: str, mend: str) -> None:
    for key in keys:
        value, default = getattr(algo, key), getattr(AlgoConfig(), key)
        back = "null" if default is None else str(default).lower() if isinstance(default, bool) else default
        _refuse(value != default, f"algo.{key}={value} is read by {reader} alone; {mend} (where an experiment sets it, give algo.{key}={back})")


def _check_critic_based(config: Config) -> None:
    algo = config.algo
    _refuse(
        config.critic.updates < 1,
        f"critic.updates={config.critic.updates} leaves algo.advantage={algo.advantage} a critic that is never trained; "
        "give at least 1, or choose an algorithm without one (algo=single_dis)",
    )
    _refuse(
        algo.lambda_policy is not None and not 0 <= algo.lambda_policy <= 1, f"algo.lambda_policy={algo.lambda_policy} must lie in [0, 1] or be null"
    )
    _refuse(
        not algo.skip_observation and algo.value_level != "token",
        f"algo.value_level={algo.value_level} needs algo.skip_observation=true: step-level values are per turn",
    )


def _check_critic_free(config: Config) -> None:
    algo = config.algo
    who = f"algo.advantage={algo.advantage} trains no critic"
    _refuse_unread(algo, GAE_KEYS, "algo.advantage=gae", f"{who}, so leave it out")
    _refuse(algo.truncation == "bootstrap", f"algo.truncation=bootstrap needs a value to go on with, and {who}; choose terminal or drop")
    _refuse(config.run.phase == "critic", f"run.phase=critic fits a critic, and {who}; choose algo=sao")
    _refuse(config.critic.path != "", f"critic.path is set, and {who}; empty it")


def _check_groups(config: Config) -> None:
    algo, n = config.algo, config.rollout.rollouts_per_prompt
    _refuse(n < 1, f"rollout.rollouts_per_prompt={n} must be above 0")
    if not catalogue.needs_groups(algo):
        _refuse(
            n > 1,
            f"rollout.rollouts_per_prompt={n} is refused with algo.advantage={algo.advantage}, which uses one rollout per prompt (set 1, or choose algo=grpo)",
        )
        return
    _refuse(
        n < 2, f"algo.advantage={algo.advantage} compares the rollouts of one prompt; set rollout.rollouts_per_prompt to 2 or more (algo=grpo: 8)"
    )
    size, most = config.train.batch_size, config.rollout.max_running
    _refuse(size % n > 0, f"train.batch_size={size} must be a multiple of rollout.rollouts_per_prompt={n}: groups are trained whole")
    _refuse(0 < most < n, f"rollout.max_running={most} is less than one group of rollout.rollouts_per_prompt={n}; raise it, or set 0")
