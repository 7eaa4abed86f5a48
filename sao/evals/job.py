"""`sao eval`: a checkpoint, or any Hugging Face directory, on held-out tasks, through the engines and workers of training and without a learner."""

from __future__ import annotations

import asyncio
import json
import math
import re
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from sao.config import Config, EnvConfig, OnlineConfig
from sao.config_load import LOWEST_TEMPERATURE, check, compose, conf_dir, environments, load_env, overlay
from sao.config_yaml import from_yaml
from sao.environment import Task
from sao.errors import ConfigError, SystemFailure, UserError
from sao.evals.heldout import EvalResult, coverage, evaluate
from sao.rewards.preflight import check_rewards
from sao.rollout.episodes import EpisodeFailure, EpisodeRequest, EpisodeRunner
from sao.runtime import saved, sweeper
from sao.runtime.checkpoints import FINAL
from sao.runtime.cluster import Cluster
from sao.runtime.models import check_tokenizer, facts, prepare
from sao.runtime.plan import check_plan, machine, make_plan
from sao.runtime.run_folder import choose, write_atomically
from sao.sandbox.episode import check_sandboxes
from sao.tasks.source import build_held_out, check_arguments
from sao.tasks.target import load_environment

ARGUMENTS = ("run", "model", "env", "n", "temperature", "tasks", "checkpoint")
POLICY_KEYS = ("model.path", "model.factory", "model.warmstart", "model.cache_dir", "warmstart.")  # say where a policy comes from
HARDEST = 10  # problems shown on the screen; the file has all of them
SAY_EVERY_S = 10.0


class Subject(NamedTuple):
    """What is evaluated: a name, its configuration, its model directory (empty: still to be made), where results go, and where it comes from."""

    name: str
    config: Config
    model_path: str
    folder: Path
    about: dict[str, Any]


@dataclass(frozen=True)
class Job:
    """An evaluation that was checked and can start. The result lies in `folder`/evals."""

    name: str
    config: Config
    model_path: str
    folder: Path
    samples: int
    temperature: float
    tasks: Sequence[Task]
    about: dict[str, Any]

    @property
    def title(self) -> str:
        where = "+".join(sorted({task.environment for task in self.tasks}))
        return re.sub(r"[^\w.+-]", "_", f"{self.name}-{where}-t{self.temperature:g}-n{self.samples}")


def evaluate_command(arguments: Sequence[str]) -> int:
    """Check everything, start engines and workers, evaluate, print, write `evals/<name>.json`. Returns the exit code.

    Raises UserError before anything starts, SystemFailure when the evaluation breaks or its result cannot be written.
    """
    sweeper.start()  # before the user's environments and rewards are tried
    job = make_job(arguments)
    target = _free_name(job.folder / "evals", job.title)
    try:
        target.mkdir(parents=True)
    except OSError as error:
        raise UserError(f"{target} cannot be written ({error.strerror}); the result of an evaluation goes into the run's folder") from None
    config = job.config
    print(f"evaluating {job.name}: {len(job.tasks)} problems, {job.samples} samples each, temperature {job.temperature:g}")
    print(f"starting {config.engine.replicas} engine(s) and {config.rollout.workers} worker(s)", flush=True)
    try:
        result = asyncio.run(run_job(job, target))
    except BaseExceptionGroup as group:
        raise group.exceptions[0] from group
    except KeyboardInterrupt:
        shutil.rmtree(target, ignore_errors=True)  # no result will come under this name
        raise
    record = result_record(job, result)
    print(summary(record))  # first: whatever the disk does, the figures are not lost
    path = target.with_name(f"{target.name}.json")
    try:
        write_atomically(path, json.dumps(record, indent=1) + "\n")
    except OSError as error:
        raise SystemFailure(f"{path} cannot be written ({error.strerror}), the result is on the screen only; make room before the next one") from None
    print(f"written: {path}")
    return 0


def make_job(arguments: Sequence[str]) -> Job:
    """Everything an evaluation needs, or the UserError that says what is wrong; nothing is started or written."""
    own, overrides = saved.own_arguments(arguments, ARGUMENTS, verb="eval", others=True)
    temperature = temperature_of(own, 1.0)
    samples = number(own, "n", int, 4 if temperature > 0 else 1)
    subject = subject_of(own, overrides)
    count = number(own, "tasks", int, subject.config.eval.tasks)
    for key, value in (("n", samples), ("tasks", count)):
        if value < 1:
            raise ConfigError(f"{key}={value} must be at least 1")
    config = for_evaluation(subject.config)
    check(config, training=False)
    envs = environments(config)
    tasks = build_held_out(config, envs, count)
    if not tasks:
        name = "+".join(env.name for env in envs)
        raise ConfigError(f"env={name} has no held-out tasks: set data.eval_path to a file of tasks the policy was not trained on")
    return checked(subject, config, tasks, samples, temperature)


def checked(subject: Subject, config: Config, tasks: Sequence[Task], samples: int, temperature: float) -> Job:
    """The job, once rewards, environments, model, tokenizer and plan are found to suit it; makes the model where it has to be made."""
    envs = environments(config)
    check_rewards(envs, config.reward)
    for env in envs:
        check_arguments(env, config.reward)
    check_sandboxes(envs)
    path = subject.model_path or prepare(config)
    check_tokenizer(config, path)
    model = facts(path)
    check_plan(config, make_plan(config, model, machine(), training=False), model)
    return Job(subject.name, config, path, subject.folder, samples, temperature, tasks, subject.about)


def subject_of(own: dict[str, str], overrides: Sequence[str]) -> Subject:
    """What `run=` or `model=` names, with the configuration that `overrides` make of it."""
    if ("run" in own) == ("model" in own):
        raise ConfigError("sao eval needs run=FOLDER of a run, or model=DIRECTORY of a Hugging Face model with env=NAME: one of the two")
    return _of_run(own, overrides) if "run" in own else _of_model(own, overrides)


def _of_run(own: dict[str, str], overrides: Sequence[str]) -> Subject:
    run = saved.run_folder(own["run"], "run=")
    name = own.get("checkpoint", FINAL)
    checkpoint = saved.checkpoint(run, name)
    config = from_yaml(run / "config.yaml")
    if "env" in own:
        config = _choose_environment(config, own["env"])
    for override in overrides:
        if override.lstrip("+~").startswith(POLICY_KEYS):
            raise ConfigError(f"{override} has no effect with run=, which takes the policy of a checkpoint; leave it out, or name a model by model=")
    config = overlay(config, overrides)
    about: dict[str, Any] = {"run": str(run), "checkpoint": name, "overrides": list(overrides)}
    if (version := saved.version(checkpoint)) is not None:
        about["version"] = version
    return Subject(name, config, str(checkpoint / "policy"), run, about)


def _of_model(own: dict[str, str], overrides: Sequence[str]) -> Subject:
    """`model=` is a directory, a hub id, or a choice of conf/model."""
    if "checkpoint" in own:
        raise ConfigError(f"checkpoint={own['checkpoint']} names a part of a run and goes with run=, not with model=")
    if "env" not in own:
        raise ConfigError(f"model={own['model']} comes without a run, so its tasks must be named: set env=NAME")
    choice = (conf_dir() / "model" / f"{own['model']}.yaml").is_file() and not Path(own["model"]).is_dir()
    model = f"model={own['model']}" if choice else f"model.path={json.dumps(own['model'])}"
    config = compose([f"env={own['env']}", model, *overrides], training=False)
    if not config.run.dir:
        config.run.name = "eval"
    about = {"model": own["model"], "overrides": list(overrides)}
    return Subject(Path(own["model"]).name, config, "", choose(config), about)


def _choose_environment(config: Config, name: str) -> Config:
    """The run's configuration with `name` as its only environment: as the run has it if it does, else as conf/env/ has it, without the run's data."""
    known: dict[str, EnvConfig] = {env.name: env for env in environments(config)}
    same = name in known
    chosen = known[name] if same else load_env(name)
    # In a mixture an environment with a generator takes its tasks from there, and alone it would take data.path, which belongs to another.
    keeps_data = same and not (config.data.mixture and not chosen.data_path and hasattr(load_environment(chosen.target), "generate_payload"))
    data = replace(config.data, mixture={}) if keeps_data else replace(config.data, mixture={}, path="", eval_path="")
    return replace(
        config, env=chosen, data=data, online=config.online if same else OnlineConfig()
    )  # phases are of the environment they were written for


def for_evaluation(config: Config) -> Config:
    """What only training needs is taken out of the way of the checks; a held-out file alone is enough data."""
    data = config.data
    if data.eval_path and not data.path:
        data = replace(data, path=data.eval_path)  # its own tasks are not read: held-out ones come from eval_path
    return replace(config, data=data, critic=replace(config.critic, freeze=[]), learner=replace(config.learner, device="auto"))


def temperature_of(own: dict[str, str], default: float) -> float:
    """Raises ConfigError for a temperature that nothing samples at."""
    temperature: float = number(own, "temperature", float, default)
    if not math.isfinite(temperature) or temperature < 0 or 0 < temperature < LOWEST_TEMPERATURE:
        raise ConfigError(f"temperature={temperature} is not sampled at; give 0, which is greedy, or at least {LOWEST_TEMPERATURE}")
    return temperature


def number(own: dict[str, str], key: str, kind: Callable[[str], Any], default: Any) -> Any:
    """What an argument says, or the default. Raises ConfigError where that is no number of its kind."""
    try:
        return kind(own[key]) if key in own else default
    except ValueError:
        raise ConfigError(f"{key}={own[key]} is not {'a whole number' if kind is int else 'a number'}") from None


def _free_name(folder: Path, title: str) -> Path:
    """`title`, or with a number when an earlier evaluation has it: results are never overwritten."""
    names = [title, *(f"{title}-{i}" for i in range(2, 10_000))]
    return next(folder / name for name in names if not (folder / name).exists() and not (folder / f"{name}.json").exists())


class _Counting:
    """The workers, with a line on the screen now and then."""

    def __init__(self, runner: EpisodeRunner, total: int) -> None:
        self.runner, self.total = runner, total
        self.done = 0
        self.said = time.monotonic()

    async def run(self, request: EpisodeRequest) -> Any:
        outcome = await self.runner.run(request)
        self.done += 1
        if time.monotonic() - self.said >= SAY_EVERY_S:
            self.said = time.monotonic()
            print(f"{self.done} of {self.total} episodes", flush=True)
        if isinstance(outcome, EpisodeFailure) and self.done == 1:
            print(f"the first episode failed ({outcome.reason}): {outcome.message[:200]}", flush=True)
        return outcome


async def run_job(job: Job, logs: Path, through: Callable[[EpisodeRunner], EpisodeRunner] = lambda workers: workers) -> EvalResult:
    """The engines of a checkpoint start with its weights, under version 0 of their own count, and nothing publishes to them.

    through: what stands between the evaluation and the workers.
    """
    config = job.config
    async with Cluster(config, environments(config), job.model_path, logs, learner=False) as cluster:
        cluster.engines()
        watcher = asyncio.create_task(cluster.watch(lambda snapshots: None))
        work = asyncio.create_task(
            evaluate(
                _Counting(through(cluster.workers()), len(job.tasks) * job.samples),
                job.tasks,
                name=job.name,
                version=0,
                temperature=job.temperature,
                concurrency=config.engine.max_num_seqs * config.engine.replicas,
                seed=config.seed,
                samples_per_task=job.samples,
            )
        )
        try:
            done, _ = await asyncio.wait({watcher, work}, return_when=asyncio.FIRST_COMPLETED)
            if watcher in done:
                watcher.result()
                raise SystemFailure("the engines are no longer watched")
            return work.result()
        finally:
            for task in (watcher, work):
                task.cancel()
            await asyncio.gather(watcher, work, return_exceptions=True)


def result_record(job: Job, result: EvalResult) -> dict[str, Any]:
    """What `evals/<name>.json` holds."""
    return {
        **job.about,
        "policy": job.model_path,
        "env": result.env,
        "temperature": result.temperature,
        "n": job.samples,
        "tasks": len(job.tasks),
        "seed": job.config.seed,
        "mean": result.mean,
        "low": result.low,
        "high": result.high,
        "pass_at": {str(k): value for k, value in result.pass_at().items()},
        "episodes": result.n,
        "failed": result.failed,
        "truncated_share": result.truncated_share,
        "tokens": result.tokens,
        "seconds": result.seconds,
        "problems": result.table(),
    }


def summary(record: dict[str, Any]) -> str:
    """The result for the screen."""
    hardest = sorted((p for p in record["problems"] if p["rewards"]), key=lambda p: sum(p["rewards"]) / len(p["rewards"]))
    over = coverage(sum(bool(p["rewards"]) for p in record["problems"]), len(record["problems"]), record["failed"])
    lines = [
        f"mean@{record['n']:<5} {record['mean']:.3f} [{record['low']:.3f}, {record['high']:.3f}], 95 % interval {over}",
        "  ".join(f"pass@{k} {value:.3f}" for k, value in record["pass_at"].items()),
        f"truncated  {record['truncated_share']:.1%} of {record['episodes']} episodes",
        f"sampled    {record['tokens']:,} tokens in {record['seconds']:.1f} s",
        f"problems with the lowest mean, of {len(record['problems'])}:",
        *(f"  {p['task_id']:<40} {' '.join(f'{reward:g}' for reward in p['rewards'])}" for p in hardest[:HARDEST]),
    ]
    return "\n".join(lines)
