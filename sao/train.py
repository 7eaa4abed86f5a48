"""`sao train`: check everything, start the actors, run the loop, evaluate, leave a report."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence

from sao.config import Config
from sao.config_load import environments, to_yaml
from sao.environment import Task
from sao.errors import ConfigError, SaoError, SystemFailure
from sao.evals.schedule import Evaluations
from sao.inference.pool import EnginePool
from sao.loop import TrainingLoop
from sao.observer import RunObserver
from sao.report.html import write_report
from sao.rewards.preflight import check_rewards
from sao.runtime.cluster import Cluster
from sao.runtime.models import check_tokenizer, facts, prepare
from sao.runtime.plan import check_plan, machine, make_plan
from sao.runtime.remote import RemoteWorkers
from sao.runtime.run_folder import RunFolder, choose
from sao.tasks.source import TaskSource, build_held_out, build_source, check_arguments


def train(config: Config, overrides: Sequence[str] = (), *, started: float | None = None) -> int:
    """Run to the end. Returns the process's exit code; mistakes and failures are raised as typed errors.

    started: time.monotonic() from which `perf/first_update_s` counts; now, when it is not given.
    """
    started = time.monotonic() if started is None else started
    env_configs = environments(config)
    source = build_source(config, env_configs)
    check_rewards(env_configs, config.reward)
    for env in env_configs:
        check_arguments(env, config.reward)
    held_out = _held_out(config)
    model_path = prepare(config)
    check_tokenizer(config, model_path)
    model = facts(model_path)
    plan = make_plan(config, model, machine())
    check_plan(config, plan, model)
    if config.run.dry_run:
        print(f"model      {model_path}\n           {model.parameters:,} parameters, context {model.context}")
        print(f"data       {source.length if source.length is not None else 'generated'} tasks, {len(held_out)} held out")
        print(plan.text())
        print("dry run: everything checks out; nothing was started")
        return 0
    with RunFolder(choose(config)) as folder:
        folder.write_text("config.yaml", to_yaml(config))
        folder.write_text("plan.txt", plan.text() + "\n")
        folder.write_json("command.json", {"verb": "train", "overrides": list(overrides), "model": model_path})
        observer = RunObserver(folder, config, started)
        try:
            asyncio.run(_run(config, source, held_out, model_path, folder, observer))
        except BaseExceptionGroup as group:
            raise _first(group) from group
        finally:
            observer.close()
            if config.logger.report:
                print(f"report: {write_report(folder.path)}")
    return 0


async def _run(config: Config, source: TaskSource, held_out: Sequence[Task], model_path: str, folder: RunFolder, observer: RunObserver) -> None:
    observer.phase("starting Ray, engines, learner and workers")
    async with Cluster(config, environments(config), model_path, folder.path) as cluster:
        engines, learner, workers = cluster.engines(), cluster.learner(), cluster.workers()
        loop = TrainingLoop(config, source, workers, learner, engines, observer)
        observer.attach(loop)
        watcher = asyncio.create_task(cluster.watch(engines, observer.engines))
        work = asyncio.create_task(_work(config, loop, engines, workers, held_out, observer))
        try:
            done, _ = await asyncio.wait({watcher, work}, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            for task in (watcher, work):
                task.cancel()
            await asyncio.gather(watcher, work, return_exceptions=True)
            folder.write_json("ledger.json", loop.ledger.audit())
        observer.phase("writing the final checkpoint")
        await learner.export(str(folder.path / "checkpoints" / "final"))
    if not loop.ledger.audit()["closes"]:
        raise SystemFailure(f"the ledger does not close; see ledger.json in {folder.path}")


async def _work(
    config: Config, loop: TrainingLoop, engines: EnginePool, workers: RemoteWorkers, held_out: Sequence[Task], observer: RunObserver
) -> None:
    async with asyncio.TaskGroup() as group:
        evaluations = Evaluations(config, loop, engines, workers, held_out, observer, group)
        observer.phase("training")
        if config.eval.at_start:
            await evaluations.begin("before")
        loop.after_publication = evaluations.published
        await loop.run()
    if config.eval.at_end:
        observer.phase(f"evaluation after training, {len(held_out)} held-out tasks")
        await evaluations.run("after")


def _held_out(config: Config) -> list[Task]:
    if not (config.eval.at_start or config.eval.at_end or config.eval.every):
        return []
    tasks = build_held_out(config, environments(config))
    if not tasks:
        raise ConfigError("eval.at_start, eval.at_end or eval.every is on, but there are no held-out tasks; set data.eval_path or turn them off")
    return tasks


def _first(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """The error that explains a group: one of ours if there is one, else the first."""
    leaves: list[BaseException] = []
    stack: list[BaseException] = [group]
    while stack:
        error = stack.pop(0)
        if isinstance(error, BaseExceptionGroup):
            stack.extend(error.exceptions)
        else:
            leaves.append(error)
    return next((leaf for leaf in leaves if isinstance(leaf, SaoError)), leaves[0])
