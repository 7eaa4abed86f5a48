"""Where tasks come from: the protocol, and the sources that a configuration asks for.

Which source an environment gets: rows of its own `env.data_path` if that is set; alone, rows of `data.path` if that is set; in a mixture its
generator if it has one, else rows of `data.path`; otherwise its generator. With `online.phases` it is a stream from the generator. An environment class
with `own_rows(split, **env.args)`, such as an adapter to a library that brings tasks, has rows of its own instead of a generator. With
`data.curriculum` what it has to choose among, levels or rows or the tasks of a pool, is drawn by recent reward.
"""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any, Protocol

from sao.config import Config, EnvConfig, RewardConfig
from sao.environment import Task
from sao.errors import ConfigError
from sao.online.stream import StreamSource
from sao.tasks.curriculum import Curriculum, with_curriculum
from sao.tasks.mixture import Mixture, interleave, shares_of
from sao.tasks.pool import Pool
from sao.tasks.procedural import HELD_OUT, TRAIN, ProceduralSource
from sao.tasks.row_source import RowSource, held_out_of_rows
from sao.tasks.rows import RowFormat, Rows, open_rows
from sao.tasks.target import load_environment
from sao.trajectory import TrajectoryMeta

__all__ = ["TaskSource", "build_held_out", "build_source", "check_arguments", "environment_args", "load_environment"]


class TaskSource(Protocol):
    """A stream of tasks that never ends. Its state is a cursor, and with a curriculum what it knows of rewards: loading one seeks, nothing is drawn again."""

    name: str

    @property
    def length(self) -> int | None:
        """Tasks of one epoch, or None for a generator."""
        ...

    def next(self) -> Task:
        """The task at the cursor, which moves on by one."""
        ...

    def again(self, place: Any) -> Task:
        """The task that `next` returned with this `place`, wherever the cursor stands; the cursor stays."""
        ...

    def saw(self, batch: Sequence[TrajectoryMeta]) -> None:
        """These episodes were trained, in this order. Batches that a resumed run trains again come again; those before its checkpoint are in the state."""
        ...

    def lost(self, environment: str, task_id: str) -> None:
        """An episode of this task ended untrained, for whatever reason."""
        ...

    def held_out(self, n: int) -> list[Task]:
        """At most n tasks that `next` never returns, the same ones at any time; empty when there are none."""
        ...

    def probes(self, n: int) -> list[Task]:
        """At most n training tasks of every environment drawn from, on which a preflight can try it; the cursor stays where it is."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """The cursor, JSON-compatible."""
        ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...

    def metrics(self) -> dict[str, float]:
        """`rollout/tasks/<environment>`, `rollout/epoch/<environment>` (rows), `rollout/share/<environment>` (mixtures) and `curriculum/...`."""
        ...


def build_source(config: Config, env_configs: Sequence[EnvConfig]) -> TaskSource:
    """The training stream of a configuration; also opens and checks the held-out files.

    env_configs: the resolved environments of `data.mixture`, or `config.env` alone. Raises ConfigError or DataError with the mend.
    """
    weights = _weights(config, env_configs)
    data = config.data
    sources = [_source(config, env, alone=len(env_configs) == 1) for env in env_configs]
    if data.pool:
        return with_curriculum(data, Pool(Mixture(sources, weights) if weights else sources[0], data.pool), config.seed)
    chosen = [with_curriculum(data, source, config.seed) for source in sources]
    if data.curriculum != "off" and not any(isinstance(source, Curriculum) for source in chosen):
        raise ConfigError(
            f"data.curriculum={data.curriculum} has nothing to choose among: env={env_configs[0].name} offers no levels; set data.pool=N for N tasks"
        )
    return Mixture(chosen, weights) if weights else chosen[0]


def build_held_out(config: Config, env_configs: Sequence[EnvConfig], n: int | None = None) -> list[Task]:
    """At most n held-out tasks (default `eval.tasks`), without reading the training rows: equal to `build_source(...).held_out(n)`."""
    n = config.eval.tasks if n is None else n
    weights = _weights(config, env_configs)
    shares = shares_of({env.name: weights.get(env.name, 0.0) for env in env_configs}) if weights else {env.name: 1.0 for env in env_configs}
    lists = {env.name: _held_out(config, env, len(env_configs) == 1, n) for env in env_configs if shares[env.name] > 0}
    return interleave(lists, shares, n)


def environment_args(env: EnvConfig, reward: RewardConfig) -> dict[str, Any]:
    """The keyword arguments of an environment class: `env.args`, and `reward` where its constructor takes one.

    A `reward` with a default is given only where a function is named: without one the environment scores by rules of its own. Keys of
    `env.args.reward` win over the run's reward configuration, so that environments of a mixture can have different rewards.
    """
    args = dict(env.args)
    parameter = inspect.signature(load_environment(env.target)).parameters.get("reward")
    if parameter is not None:
        values = {**asdict(reward), **dict(args.pop("reward", None) or {})}
        if values["function"] or parameter.default is inspect.Parameter.empty:
            args["reward"] = values
    return args


def check_arguments(env: EnvConfig, reward: RewardConfig) -> None:
    """Refuse `env.args` that the environment class does not take, or that its own `check_args(**env.args)`, if it has one, refuses."""
    environment, args = load_environment(env.target), environment_args(env, reward)
    try:
        inspect.signature(environment).bind(None, **args)
    except TypeError as error:
        raise ConfigError(f"env.args of {env.name}: {error}; {env.target.rsplit(':', 1)[-1]} takes other arguments") from None
    check = getattr(environment, "check_args", None)
    if check is not None:
        check(**args)


def _weights(config: Config, env_configs: Sequence[EnvConfig]) -> dict[str, float]:
    """The mixture's weights, empty for a single environment."""
    names = [env.name for env in env_configs]
    if not names:
        raise ConfigError("no environment is configured; set env=NAME")
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ConfigError(f"two environments are called {twice[0]!r}; give each its own env.name")
    weights = dict(config.data.mixture)
    if not weights:
        if len(names) > 1:
            raise ConfigError(f"{len(names)} environments but no data.mixture; give each a weight")
        return {}
    for name in weights:
        if name not in names:
            near = difflib.get_close_matches(name, names, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(names)}"
            raise ConfigError(f"data.mixture.{name}: there is no such environment; {hint}")
    shares_of(weights)
    return weights


def _generator(env: EnvConfig) -> type | None:
    environment = load_environment(env.target)
    return environment if callable(getattr(environment, "generate_payload", None)) else None


def _own_rows(env: EnvConfig, split: str) -> Rows | None:
    """The rows of `split` that the environment class brings; None where it brings none at all."""
    own = getattr(load_environment(env.target), "own_rows", None)
    if own is None:
        return None
    rows: Rows = own(split, **_generator_args(env))
    return rows


def _task_file(config: Config, env: EnvConfig, alone: bool) -> tuple[str, str]:
    """The path and its configuration key; an empty path where the environment generates its tasks."""
    if env.data_path:
        return env.data_path, "env.data_path"
    if config.data.path and (alone or _generator(env) is None):
        return config.data.path, "data.path"
    if _generator(env) is None:
        raise ConfigError(f"env={env.name} makes no tasks of its own; set data.path to a file of tasks (.jsonl, .parquet) or to a data set")
    return "", ""


def _eval_file(config: Config, env: EnvConfig, task_key: str) -> tuple[str, str]:
    if env.eval_path:
        return env.eval_path, "env.eval_path"
    return (config.data.eval_path, "data.eval_path") if task_key == "data.path" else ("", "")


def _generator_args(env: EnvConfig) -> dict[str, Any]:
    return {name: value for name, value in env.args.items() if name != "reward"}


def _open(config: Config, env: EnvConfig, path: str, key: str) -> Rows:
    form = RowFormat(config.data.prompt_column, config.data.max_prompt_chars, getattr(load_environment(env.target), "check_row", None))
    return open_rows(path, key=key, split=config.data.split, form=form)


def _source(config: Config, env: EnvConfig, alone: bool) -> TaskSource:
    if config.online.phases:
        return StreamSource(load_environment(env.target), replace(env, args=_generator_args(env)), config.online, seed=config.seed)
    own = _own_rows(env, TRAIN)
    if own is not None:
        held_out = _own_rows(env, HELD_OUT)
        return RowSource(
            own,
            name=env.name,
            seed=config.seed,
            held_out_rows=held_out if held_out else None,
            shuffle=config.data.shuffle,
            workload=env.workload,
        )
    path, key = _task_file(config, env, alone)
    if not path:
        return ProceduralSource(load_environment(env.target), name=env.name, seed=config.seed, args=_generator_args(env), workload=env.workload)
    eval_path, eval_key = _eval_file(config, env, key)
    return RowSource(
        _open(config, env, path, key),
        name=env.name,
        seed=config.seed,
        held_out_rows=_open(config, env, eval_path, eval_key) if eval_path else None,
        shuffle=config.data.shuffle,
        prompt_column=config.data.prompt_column,
        workload=env.workload,
    )


def _held_out(config: Config, env: EnvConfig, alone: bool, n: int) -> list[Task]:
    own = None if config.online.phases else _own_rows(env, HELD_OUT)
    if own is not None:
        return held_out_of_rows(own, n, name=env.name, seed=config.seed, prompt_column="prompt", workload=env.workload)
    path, key = ("", "") if config.online.phases else _task_file(config, env, alone)
    if not path:
        return _source(config, env, alone).held_out(n)
    eval_path, eval_key = _eval_file(config, env, key)
    if not eval_path:
        return []
    rows = _open(config, env, eval_path, eval_key)
    return held_out_of_rows(rows, n, name=env.name, seed=config.seed, prompt_column=config.data.prompt_column, workload=env.workload)
