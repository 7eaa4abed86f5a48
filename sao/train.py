"""`sao train`: check everything, start the actors, run the loop, evaluate, leave a report."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from sao.config import Config
from sao.config_algo import cautions
from sao.config_load import environments
from sao.config_yaml import to_yaml
from sao.environment import Task
from sao.errors import INTERRUPTED, ConfigError, SaoError, SystemFailure
from sao.evals.schedule import Evaluations
from sao.inference.pool import EnginePool
from sao.loop import TrainingLoop
from sao.observer import RunObserver
from sao.online.guard import Guard, make_guard
from sao.online.history import closing_lines
from sao.online.optimum import optima
from sao.report.html import write_report
from sao.report.live import DONE
from sao.rewards.preflight import check_rewards, check_scores
from sao.runtime import sweeper
from sao.runtime.checkpoints import Checkpoint
from sao.runtime.cluster import Cluster
from sao.runtime.models import check_tokenizer, facts, prepare
from sao.runtime.plan import check_plan, machine, make_plan
from sao.runtime.preflight import check_critic, check_openings, check_start
from sao.runtime.remote import RemoteLearner, RemoteWorkers, fetch
from sao.runtime.run_folder import RunFolder, choose, started_by
from sao.runtime.run_store import RunCheckpointer, RunStore
from sao.runtime.saved import evaluated, evaluation_due
from sao.sandbox.episode import check_sandboxes
from sao.tasks.source import TaskSource, build_held_out, build_source, check_arguments

OUTCOME = "outcome.json"  # how the run ended, for its report
PROBES = 4  # tasks of each environment that are opened before anything starts


def train(config: Config, overrides: Sequence[str] = (), *, started: float | None = None, resume: bool = False, verb: str = "train") -> int:
    """Run to the end. Returns the process's exit code; mistakes and failures are raised as typed errors.

    started: time.monotonic() from which `perf/first_update_s` counts; now, when it is not given. resume: go on with the run in `run.dir`. verb: by which the user asked.
    """
    started = time.monotonic() if started is None else started
    check_start(config, resume=resume)
    sweeper.start()  # before the user's environments and rewards are tried
    env_configs = environments(config)
    source = build_source(config, env_configs)
    for caution in cautions(config, source.length):
        print(f"warning: {caution}")
    check_rewards(env_configs, config.reward)
    for env in env_configs:
        check_arguments(env, config.reward)
    check_sandboxes(env_configs)
    optima(config)
    held_out = _held_out(config)
    if config.online.shadow_drop > 0 and not source.held_out(1):
        raise ConfigError("online.shadow_drop is on, but there are no held-out tasks to evaluate on; set data.eval_path or set it to 0")
    probes = source.probes(PROBES)
    check_scores(env_configs, config.reward, probes)
    model_path = prepare(config)
    renderer = check_tokenizer(config, model_path)
    model = facts(model_path)
    check_critic(config, model)
    plan = make_plan(config, model, machine())
    check_plan(config, plan, model)
    check_openings(config, env_configs, probes, renderer)
    if config.run.dry_run:
        print(f"model      {model_path}\n           {model.parameters:,} parameters, context {model.context}")
        print(f"data       {source.length if source.length is not None else 'generated'} tasks, {len(held_out)} held out")
        print(plan.text())
        if resume:
            _store(config, choose(config)).checkpoint_of(model)
        print("dry run: everything checks out; nothing was started")
        return 0
    with RunFolder(choose(config), resume=resume) as folder, _disk_faults(folder.path):
        store = _store(config, folder.path)
        checkpoint = store.checkpoint_of(model) if resume else None  # before the first write: what refuses it leaves the folder as it was
        folder.write_text("config.yaml", to_yaml(config))
        folder.write_text("plan.txt", plan.text() + "\n")
        command = {"verb": verb, "overrides": list(overrides), "model": model_path, "incarnation": folder.incarnation, "sao": started_by()}
        folder.write_json("command.json", command)
        observer = RunObserver(folder, config, started, fetch)
        try:
            job = Job(config, source, held_out, model_path, folder, observer, store, checkpoint)
            folder.write_json(OUTCOME, {"state": "running", "message": ""})
            with _telling_outcome(folder, job):
                asyncio.run(job.run())
        finally:
            observer.close()
            if config.logger.report:
                print(f"report: {write_report(folder.path)}")
    for line in closing_lines(folder.path) if config.online.phases else ():
        print(line)
    print(f"stopped; go on with `sao {verb} resume={folder.path}`" if job.cut_short else f"done; look at it with `sao inspect {folder.path}`")
    return INTERRUPTED if job.cut_short else 0


@contextlib.contextmanager
def _telling_outcome(folder: RunFolder, job: Job) -> Iterator[None]:
    """Write how the run ended, for its report; of a group of errors, raise the one that explains it."""
    try:
        yield
    except BaseException as error:
        cause = _first(error) if isinstance(error, BaseExceptionGroup) else error
        if isinstance(cause, asyncio.CancelledError) and job.stopped:  # asked to stop while the actors started
            folder.write_json(OUTCOME, {"state": "stopped", "message": ""})
            return
        with contextlib.suppress(OSError):
            folder.write_json(OUTCOME, {"state": "failed", "message": str(cause) or type(cause).__name__})
        if cause is error:
            raise
        raise cause from error
    folder.write_json(OUTCOME, {"state": "stopped" if job.cut_short else "complete", "message": ""})


@contextlib.contextmanager
def _disk_faults(folder: Path) -> Iterator[None]:
    """A disk that takes no more ends the run in one sentence; what was trained until then is on it."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EIO):
            raise
        where = error.filename or folder
        raise SystemFailure(f"{where} cannot be written ({error.strerror}); mend that and go on with `sao train resume={folder}`") from error


class Job:
    """One sitting of a run: its actors, its loop, its evaluations."""

    def __init__(
        self,
        config: Config,
        source: TaskSource,
        held_out: Sequence[Task],
        model_path: str,
        folder: RunFolder,
        observer: RunObserver,
        store: RunStore,
        checkpoint: Checkpoint | None = None,
    ) -> None:
        """checkpoint: what a resume goes on from."""
        self.config, self.source, self.held_out = config, source, held_out
        self.model_path, self.folder, self.observer = model_path, folder, observer
        self.store, self.checkpoint = store, checkpoint
        self.stopped = False
        self.loop: TrainingLoop | None = None
        self.evaluations: Evaluations | None = None
        self.guard: Guard | None = None

    @property
    def cut_short(self) -> bool:
        """Whether it was asked to stop before all was done: the steps, and the evaluation after them. A resume does the rest."""
        return self.stopped and (self.loop is None or not self.loop.complete or evaluation_due(self.folder.path, self.config, self.loop.version))

    async def run(self) -> None:
        config, folder, observer = self.config, self.folder, self.observer
        observer.phase("starting Ray, engines, learner and workers")
        env_configs = environments(config)
        cluster = Cluster(
            config, env_configs, self.model_path, folder.path, incarnation=folder.incarnation, on_event=observer.event, on_start=observer.phase
        )
        this = asyncio.current_task()
        assert this is not None
        with _stop_on_signals(lambda: self._stop(this)):
            await self._run(cluster)

    async def _run(self, cluster: Cluster) -> None:
        config, folder, observer = self.config, self.folder, self.observer
        async with cluster:
            engines, learner, workers = cluster.engines(), cluster.learner(self.store), cluster.workers()
            checkpointer = RunCheckpointer(self.store, learner, observer.event)
            loop = TrainingLoop(config, self.source, workers, learner, engines, observer, checkpointer, folder.incarnation)
            observer.attach(loop)
            loop.guard = self.guard = make_guard(config, learner, loop.ledger, observer, self.source, self.store.checkpoints)
            if folder.incarnation:
                await self._go_back(loop, learner)
            self.loop = loop
            watcher = asyncio.create_task(cluster.watch(observer.engines))
            work = asyncio.create_task(self._work(loop, engines, workers))
            try:
                done, _ = await asyncio.wait({watcher, work}, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    task.result()
            finally:
                for task in (watcher, work):
                    task.cancel()
                await asyncio.gather(watcher, work, return_exceptions=True)
                folder.write_json("ledger.json", loop.ledger.audit())
                observer.settle()
            if loop.complete:
                observer.phase("writing the final checkpoint")
                await checkpointer.final({"version": loop.version, "batches_done": loop.batches_done})
        if not loop.ledger.audit()["closes"]:
            raise SystemFailure(f"the ledger does not close; see ledger.json in {folder.path}")
        if loop.complete and not self.cut_short:
            observer.phase(DONE)

    async def _go_back(self, loop: TrainingLoop, learner: RemoteLearner) -> None:
        """Bring learner and loop to the newest checkpoint, with the batches trained after it still to be trained again."""
        checkpoint = self.checkpoint
        state, buffered = loop.state_dict(), []
        if checkpoint is not None:
            state, buffered = checkpoint.state(), self.store.buffered(checkpoint)
            await learner.restore(str(checkpoint.path), checkpoint.step)
        replay = self.store.later_batches(state["batches_done"])
        loop.load_state_dict(state, buffered, replay)
        text = f"going on from the checkpoint of step {checkpoint.step}" if checkpoint else "going on from the start"
        self.observer.phase(f"{text}, {len(replay)} later batches are trained again")

    def _stop(self, this: asyncio.Task[Any]) -> None:
        self.stopped = True
        if self.loop is None:
            self.observer.phase("stopping; nothing was trained in this sitting")
            this.cancel()
            return
        self.observer.phase(f"stopping{'' if self.loop.complete else ' after this step'}; once more ends at once")
        self.loop.stop()
        if self.evaluations is not None:
            self.evaluations.stop()

    async def _work(self, loop: TrainingLoop, engines: EnginePool, workers: RemoteWorkers) -> None:
        config = self.config
        async with asyncio.TaskGroup() as group:
            self.evaluations = Evaluations(config, loop, engines, workers, self.held_out, self.observer, group)
            if self.guard is not None:
                self.guard.shadow = self.evaluations
                await self.guard.begin(loop.version)
            self.observer.phase("training")
            if config.eval.at_start and not evaluated(self.folder.path, "before", 0, config.eval.temperatures):
                await self.evaluations.begin("before")  # engines start with the weights of version 0, on a resume as well
            loop.after_publication = self.evaluations.published
            await loop.run()
            if config.eval.at_end and loop.complete and not self.stopped:
                await self.evaluations.finish("after")


@contextlib.contextmanager
def _stop_on_signals(stop: Callable[[], None]) -> Iterator[None]:
    """The first SIGINT or SIGTERM asks for a clean stop, the second ends the process."""
    running = asyncio.get_running_loop()
    asked = False

    def on_signal() -> None:
        nonlocal asked
        if asked:
            os._exit(INTERRUPTED)
        asked = True
        stop()

    for number in (signal.SIGINT, signal.SIGTERM):
        running.add_signal_handler(number, on_signal)
    try:
        yield
    finally:
        for number in (signal.SIGINT, signal.SIGTERM):
            running.remove_signal_handler(number)


def _store(config: Config, folder: Path) -> RunStore:
    return RunStore(folder, config.checkpoint.keep, keep_all=config.logger.trajectories == "all")


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
