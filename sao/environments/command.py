"""`sao env list | try | init`: what there is, an episode by hand, and the start of one's own."""

from __future__ import annotations

import argparse
import asyncio
import inspect
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sao.config import Config
from sao.config_load import compose, conf_dir, load_env
from sao.environments.play import at_random, by_hand, play
from sao.environments.skeleton import init
from sao.errors import ConfigError
from sao.rewards.preflight import check_rewards
from sao.tasks.source import build_source, check_arguments, load_environment
from sao.tasks.target import is_program

NO_MODEL = "model.path=none"  # a configuration needs a model, playing by hand does not


def env_command(args: argparse.Namespace) -> int:
    if args.action == "list":
        print("\n\n".join(describe(path) for path in sorted((conf_dir() / "env").glob("*.yaml"))))
        return 0
    if args.action == "init":
        folder = init(args.name, Path.cwd())
        print(f"wrote {args.name}/: {', '.join(sorted(path.name for path in folder.iterdir()))}")
        print(f"play it:   sao env try env={args.name}\ntest it:   python -m pytest {args.name}\ntrain it:  sao train env={args.name}")
        return 0
    return try_command(args.overrides, random=args.random, index=args.task)


def try_command(overrides: Sequence[str], *, random: bool = False, index: int = 0) -> int:
    """Play one episode; the exit code is 0 also when the answers end before it does. Failures of the environment are raised, typed."""
    config = _config(overrides)
    kind = load_environment(config.env.target)
    if is_program(kind):
        raise ConfigError(f"env={config.env.name} is an agent program, which asks the policy itself; check it with `sao train ... run.dry_run=true`")
    check_arguments(config.env, config.reward)
    check_rewards([config.env], config.reward)
    source = build_source(config, [config.env])
    for _ in range(index):
        source.next()
    task = source.next()
    print(f"env        {config.env.name} ({config.env.target})\ntask       {task.task_id}, seed {task.seed}")
    answer = at_random(kind, config.env.args, task.seed) if random else by_hand
    trajectory = asyncio.run(play(config, task, answer))
    if trajectory is None:
        print("the answers ended before the episode")
    else:
        print(f"episode    {trajectory.finish}, reward {trajectory.reward:g}, {len(trajectory.timings)} turns")
    return 0


def describe(path: Path) -> str:
    """One shipped environment or adapter: name and what it is, its arguments, how to start it."""
    env = load_env(path.stem)
    about = next((line.removeprefix("# ") for line in path.read_text().splitlines() if line.startswith("# ")), "")
    if not env.target:
        return f"{path.stem}\n  {about}\n  start  sao train env=package.module:Class ..., or `sao env init NAME` for a start"
    lines = [path.stem, f"  {about}", f"  args   {_arguments(load_environment(env.target), env.args) or 'none'}"]
    return "\n".join([*lines, f"  start  {_start(path.stem)}"])


def _config(overrides: Sequence[str]) -> Config:
    if not any(text.startswith("env=") or text.startswith("experiment=") for text in overrides):
        raise ConfigError("name the environment to try: env=NAME (`sao env list`), env=module:Class, or an experiment")
    named = any(text.startswith(("model=", "model.", "experiment=")) for text in overrides)
    config = compose([*([] if named else [NO_MODEL]), *overrides])
    if config.data.mixture:
        raise ConfigError("data.mixture has several environments; try one of them by env=NAME")
    return config


def _arguments(kind: type, chosen: dict[str, Any]) -> str:
    parts = []
    for name, parameter in list(inspect.signature(kind).parameters.items())[1:]:
        if name == "reward":
            continue
        value = chosen.get(name, parameter.default)
        parts.append(f"{name}=..." if value is parameter.empty else f"{name}={value!r}")
    return ", ".join(parts)


def _start(name: str) -> str:
    """An experiment that chooses this environment, else the plain command."""
    for path in sorted((conf_dir() / "experiment").glob("*.yaml")):
        text = path.read_text()
        if re.search(rf"override /env: {re.escape(name)}\s*$", text, re.MULTILINE):
            verb = "online" if re.search(r"^online:", text, re.MULTILINE) else "train"
            return f"sao {verb} experiment={path.stem}"
    return f"sao train env={name} ..., by hand: sao env try env={name} ..."
