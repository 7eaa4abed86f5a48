"""What is checked before a run's folder is entered, in a dry run as in a real one: the folder, W&B's key, and whether prompts fit."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sao.agents.limits import check_programs
from sao.agents.observations import check_messages, check_tools
from sao.agents.renderer import Renderer
from sao.config import Config, EnvConfig
from sao.environment import Context, Environment, Task
from sao.errors import ConfigError, UserError
from sao.report.wandb_mirror import check_wandb
from sao.runtime.checkpoints import FOLDER
from sao.runtime.models import ModelFacts, facts
from sao.runtime.run_folder import refuse_used
from sao.runtime.saved import FINAL
from sao.sandbox.episode import sandbox_for
from sao.sandbox.protocol import Sandbox
from sao.tasks.source import environment_args, load_environment
from sao.tasks.target import is_program, one_line

RESET_LIMIT_S = 10.0
VALUE_HEAD = "value_head.safetensors"  # as `sao.learner.models.save_critic` writes it


class _TooSlow(Exception):
    """RESET_LIMIT_S passed; a TimeoutError of the environment's own is an error of it."""


def check_start(config: Config, *, resume: bool) -> None:
    """Refuse what a start would refuse after its first files are written: a folder that holds a run, W&B online without a key. Writes nothing."""
    if config.run.dir and not resume:
        refuse_used(Path(config.run.dir).expanduser().resolve())
    check_wandb(config.logger.wandb, os.environ)


def check_critic(config: Config, model: ModelFacts) -> None:
    """Refuse a `critic.path` that is no fitted critic of this model. Reads headers alone."""
    if not config.critic.path:
        return
    path = Path(config.critic.path).expanduser()
    within = path / FOLDER / FINAL / "critic"
    if (within / VALUE_HEAD).is_file():
        raise ConfigError(f"critic.path={config.critic.path} is the folder of a run; name its fitted critic, critic.path={within}")
    if not (path / VALUE_HEAD).is_file():
        raise ConfigError(
            f"critic.path={config.critic.path} holds no {VALUE_HEAD}; name the critic of a checkpoint, for instance RUN/{FOLDER}/{FINAL}/critic"
        )
    critic = facts(str(path), "critic.path")
    for name in ("layers", "width", "vocabulary"):
        theirs, ours = getattr(critic, name), getattr(model, name)
        if theirs != ours:
            raise ConfigError(
                f"critic.path={config.critic.path} is of another model than the policy ({name} {theirs}, the policy's {ours}); fit one by run.phase=critic"
            )


def check_openings(config: Config, env_configs: Sequence[EnvConfig], tasks: Sequence[Task], renderer: Renderer) -> None:
    """Open every environment on its tasks, as an episode does, and see whether the prompts leave room for a token.

    tasks: a few of every environment (`TaskSource.probes`). Raises ConfigError when no prompt of an environment fits, or when one raises where it is
    built or in `reset`; where some do not fit, or `reset` takes over RESET_LIMIT_S, one line is printed.
    """
    if all(is_program(load_environment(env.target)) for env in env_configs):
        check_programs(config)
    for env in env_configs:
        own = [task for task in tasks if task.environment == env.name]
        if is_program(load_environment(env.target)):
            _build_program(env, environment_args(env, config.reward), own[:1])  # what it will ask is known when it runs
            continue
        lengths = asyncio.run(_prompt_lengths(env, environment_args(env, config.reward), own, renderer))
        _check_room(config, env.name, lengths)


def _build_program(env: EnvConfig, args: dict[str, Any], tasks: Sequence[Task]) -> None:
    """Raises ConfigError where an agent program cannot be built for a task."""
    for task in tasks:
        try:
            load_environment(env.target)(task, **args)
        except UserError:
            raise
        except Exception as error:
            raise ConfigError(f"env={env.name} cannot be built for task {task.task_id} ({one_line(error)}); mend the class or env.args") from error


def _check_room(config: Config, name: str, lengths: Sequence[int]) -> None:
    """lengths: tokens of each prompt looked at. A prompt fits where one more token does, as in the turn loop."""
    limits = {"rollout.max_tokens": config.rollout.max_tokens}
    if config.engine.max_model_len:
        limits["engine.max_model_len"] = config.engine.max_model_len
    if config.rollout.context_tokens:
        limits["rollout.context_tokens"] = config.rollout.context_tokens
    too_long = [length for length in lengths if length >= min(limits.values())]
    if not too_long:
        return
    shortest = min(lengths)
    if len(too_long) == len(lengths):
        short = {key: value for key, value in limits.items() if value <= shortest}
        given = " and ".join(f"{key}={value}" for key, value in short.items())
        raise ConfigError(
            f"env={name}: no prompt leaves room for an answer, the shortest of {len(lengths)} has {shortest} tokens with {given}; "
            f"raise {' and '.join(short)} above {shortest}"
        )
    given = " and ".join(f"{key}={value}" for key, value in limits.items())
    print(
        f"warning: env={name}: {len(too_long)} of the {len(lengths)} prompts looked at leave no room for an answer (up to {max(lengths)} tokens "
        f"with {given}); their episodes will be dropped as prompt_too_long"
    )


async def _prompt_lengths(env: EnvConfig, args: dict[str, Any], tasks: Sequence[Task], renderer: Renderer) -> list[int]:
    """Tokens of each task's opening; fewer than `tasks` where a reset took too long, which is said."""
    environment_class = load_environment(env.target)
    lengths: list[int] = []
    try:
        for task in tasks:
            async with sandbox_for(environment_class, env.sandbox) as sandbox:
                lengths.append(await _prompt_length(env.name, environment_class, args, task, renderer, sandbox))
    except _TooSlow:
        print(f"warning: env={env.name}: reset took over {RESET_LIMIT_S:g} s, so whether its prompts fit was not checked")
    finally:
        shutdown = getattr(environment_class, "shutdown", None)
        if shutdown is not None:
            await shutdown()
    return lengths


async def _prompt_length(name: str, environment_class: type, args: dict[str, Any], task: Task, renderer: Renderer, sandbox: Sandbox | None) -> int:
    """Raises ConfigError naming the environment and its error, _TooSlow when our limit passed."""
    done = f"be built for task {task.task_id}"
    try:
        environment: Environment = environment_class(task, **args)
        done = f"open task {task.task_id}"
        try:
            return await _opening(environment, task, renderer, sandbox)
        finally:
            await asyncio.wait_for(environment.close(), RESET_LIMIT_S)
    except (UserError, _TooSlow):
        raise
    except Exception as error:
        raise ConfigError(f"env={name} cannot {done} ({one_line(error)}); mend the class or env.args") from error


async def _opening(environment: Environment, task: Task, renderer: Renderer, sandbox: Sandbox | None) -> int:
    """Tokens of the prompt that the turn loop would send first."""
    who = type(environment).__name__
    scope = asyncio.timeout(RESET_LIMIT_S)
    try:
        async with scope:
            opening = await environment.reset(Context(seed=task.seed, sandbox=sandbox, deadline=time.monotonic() + RESET_LIMIT_S))
    except TimeoutError:
        if scope.expired():
            raise _TooSlow from None
        raise
    messages = check_messages(opening, f"{who}.reset")
    if not messages:
        raise ValueError(f"{who}.reset returned no message")
    return len(renderer.open(messages, check_tools(environment.tools(), f"{who}.tools")))
