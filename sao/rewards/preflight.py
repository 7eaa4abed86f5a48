"""Checks of rewards before any actor starts."""

from __future__ import annotations

from collections.abc import Sequence

from sao.config import EnvConfig, RewardConfig
from sao.errors import ConfigError
from sao.rewards.runner import check_config
from sao.tasks.source import environment_args


def check_rewards(env_configs: Sequence[EnvConfig], reward: RewardConfig) -> None:
    """Import and check the reward function of every environment that takes one. Raises ConfigError naming the key, the environment and the mend."""
    for env in env_configs:
        args = environment_args(env, reward)
        if "reward" not in args:
            continue
        try:
            check_config(reward_config(args["reward"]))
        except ConfigError as error:
            raise ConfigError(f"env={env.name}: {error}") from error


def reward_config(values: dict[str, object]) -> RewardConfig:
    """A RewardConfig from a mapping. Raises ConfigError for a key that it does not have."""
    try:
        return RewardConfig(**values)  # type: ignore[arg-type]
    except TypeError as error:
        unknown = sorted(set(values) - set(RewardConfig.__dataclass_fields__))
        known = ", ".join(RewardConfig.__dataclass_fields__)
        raise ConfigError(f"env.args.reward has the unknown key {', '.join(map(repr, unknown))}; the keys are {known}") from error
