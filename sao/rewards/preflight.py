"""Checks of rewards before any actor starts."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from sao.config import EnvConfig, RewardConfig
from sao.environment import Task
from sao.errors import ConfigError, RewardFailure
from sao.rewards.function import NO_GOLD
from sao.rewards.process import RewardProcess
from sao.rewards.runner import check_config
from sao.tasks.row_source import MESSAGES_KEY
from sao.tasks.source import environment_args, load_environment

SCORE_LIMIT_S = 10.0
_KEY_ERROR = re.compile(r" raised KeyError: (['\"])(.+?)\1(?: at |$)")  # as sao.rewards.function.raised words it


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


def check_scores(env_configs: Sequence[EnvConfig], reward: RewardConfig, tasks: Sequence[Task]) -> None:
    """Score an empty answer to one row of every environment that takes a reward, in a process that is killed after SCORE_LIMIT_S.

    Raises ConfigError when the function asks for a column that the row does not have. Anything else that goes wrong is one printed line: an empty
    answer may be a special case, and a class of the user's own may score something other than its row.
    """
    for env in env_configs:
        args = environment_args(env, reward)
        rows = [task for task in tasks if task.environment == env.name and MESSAGES_KEY in task.payload]
        if "reward" not in args or not rows:
            continue
        columns = dict(rows[0].payload)
        messages = columns.pop(MESSAGES_KEY)
        failure = _failure(reward_config(args["reward"]), columns, messages)
        if failure is None:
            continue
        missing = _missing_column(failure, columns)
        if missing and _scores_its_row(env):
            raise ConfigError(
                f"env={env.name}: reward.function={args['reward']['function']} needs the column {missing}, which task {rows[0].task_id} does not have "
                f"(columns: {', '.join(map(str, columns))}); add it to the task file or choose another function"
            )
        print(f"warning: env={env.name}: an empty answer to task {rows[0].task_id} could not be scored: {_words(failure)}")


def _failure(config: RewardConfig, row: Mapping[str, Any], messages: Any) -> RewardFailure | None:
    """What scoring an empty answer ends with. A process also for coroutines: nothing else ends one that never yields."""
    process = RewardProcess(config.function)
    try:
        process.call("", row, messages, SCORE_LIMIT_S)
    except RewardFailure as failure:
        return failure
    finally:
        process.close()
    return None


def _words(failure: RewardFailure) -> str:
    """The failure without the name of a time limit that is not the preflight's."""
    return f"no score within the preflight's {SCORE_LIMIT_S:g} s" if failure.reason == "reward_timeout" else str(failure)


def _missing_column(failure: RewardFailure, row: Mapping[str, Any]) -> str | None:
    """The column whose absence made the function fail; None for another failure, or a key that is no column but, say, looked up by a value of the row."""
    found = _KEY_ERROR.search(str(failure))
    if found is None:
        return None
    key = found[2]
    if key.startswith(NO_GOLD):
        return key.removeprefix(NO_GOLD)
    return None if key in row or key in [str(value) for value in row.values()] else key


def _scores_its_row(env: EnvConfig) -> bool:
    """Whether the environment hands its row to the function as it is in the file, which is known of the one that ships."""
    from sao.envs.single_turn.environment import SingleTurnEnvironment  # it imports this module

    return issubclass(load_environment(env.target), SingleTurnEnvironment)


def reward_config(values: dict[str, object]) -> RewardConfig:
    """A RewardConfig from a mapping. Raises ConfigError for a key that it does not have."""
    try:
        return RewardConfig(**values)  # type: ignore[arg-type]
    except TypeError as error:
        unknown = sorted(set(values) - set(RewardConfig.__dataclass_fields__))
        known = ", ".join(RewardConfig.__dataclass_fields__)
        raise ConfigError(f"env.args.reward has the unknown key {', '.join(map(repr, unknown))}; the keys are {known}") from error
