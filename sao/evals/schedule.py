"""The evaluations of a run: before, while and after it trains.

Each is pinned to the weights that are published when it begins, so these weights have to stay somewhere until it ends. `eval.placement` says where:

    hold      in all engines: the next publication waits. Training goes on until the staleness bound stops it; the wait is `timing_s/held_by_eval`.
    replica   in one engine, which leaves the training pools of the driver and of every worker and comes back with the weights of then.
              Training does not wait, with one engine less. An evaluation that is due while another runs there is left out, and said to be.

Training's accounting never sees an evaluation: its episodes have their own ordinals, and neither ledger nor buffer hears of them.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Coroutine, Sequence
from typing import Any, Protocol

from sao.config import Config
from sao.environment import Task
from sao.errors import EngineFailure, SystemFailure
from sao.evals.heldout import EvalResult, evaluate
from sao.loop import TrainingLoop

ENGINE_POLL_S = 0.5


class Lender(Protocol):
    """Takes an engine out of training and back: the driver's pool, which publishes, and the workers' pools, which route."""

    async def lend(self, engine: str) -> None: ...

    async def restore(self, engine: str) -> None: ...


class EngineLender(Lender, Protocol):
    @property
    def live(self) -> tuple[str, ...]: ...

    async def try_on(self, engine: str, weights: Any, version: int) -> None:
        """Give weights to a lent engine alone, its running requests handed back; the next publication reaches it and ends the loan."""
        ...

    async def still_lent(self, name: str) -> bool: ...


class Reporter(Protocol):
    """Where results and what there is to say about them go."""

    def phase(self, text: str) -> None: ...

    def evaluation(self, result: EvalResult) -> None: ...

    def evaluation_missed(self, name: str, version: int, why: str) -> None: ...


class Evaluations:
    """One per run. `begin` starts one beside training, `published` begins those that `eval.every` asks for, `finish` is for when training has ended.

    group: the tasks of the run; an error of an evaluation that is not its own business ends them.
    """

    def __init__(
        self,
        config: Config,
        loop: TrainingLoop,
        engines: EngineLender,
        workers: Lender,
        held_out: Sequence[Task],
        reporter: Reporter,
        group: asyncio.TaskGroup,
    ) -> None:
        self.config = config
        self.loop = loop
        self.engines = engines
        self.workers = workers
        self.held_out = held_out
        self.reporter = reporter
        self.group = group
        self.running: asyncio.Task[None] | None = None
        self._borrowed: list[str] = []
        self._what = ("", 0)  # name and version of `running`
        self._seen = loop.version  # of a resumed run, what it goes on from was evaluated when it was published

    async def begin(self, name: str) -> None:
        """Start an evaluation of the published weights beside training; on return nothing can change them under it."""
        version = self.loop.published_version
        if self.config.eval.placement == "hold":
            self.loop.hold(self._start(name, version, self._beside(name, version, None)))
            return
        if self.running is not None and not self.running.done():
            self.reporter.evaluation_missed(name, version, "the one before it still runs; raise eval.every or lower eval.tasks")
            return
        if len(self.engines.live) < 2:
            self.reporter.evaluation_missed(name, version, "no engine can be spared, only one is alive")
            return
        engine = self.engines.live[-1]
        await self.engines.lend(engine)
        await self.workers.lend(engine)
        self._start(name, version, self._beside(name, version, engine))

    async def published(self, version: int) -> None:
        """The loop's after_publication: begin an evaluation when a multiple of eval.every has been reached since the last publication."""
        every, before = self.config.eval.every, self._seen
        self._seen = version
        if every == 0 or version // every == before // every or self.loop.stopping:
            return
        if self.loop.complete and self.config.eval.at_end:
            return  # the evaluation after training is of the same weights
        await self.begin("during")

    async def finish(self, name: str) -> None:
        """Evaluate the published weights in all engines, once what still runs has ended."""
        if self.running is not None:
            await asyncio.wait({self.running})
        self.reporter.phase(f"evaluation {name} training, {len(self.held_out)} held-out tasks")
        version = self.loop.published_version
        await asyncio.wait({self._start(name, version, self._run(name, version, None))})

    def _start(self, name: str, version: int, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        self._what = (name, version)
        self.running = self.group.create_task(work)
        return self.running

    async def _run(self, name: str, version: int, engine: str | None) -> None:
        """Evaluate at every temperature in one engine (None: in all), and report. Raises EngineFailure when that engine was lost and its episodes with it."""
        for temperature in self.config.eval.temperatures:
            result = await evaluate(
                self.loop.workers,
                self.held_out,
                name=name,
                version=version,
                temperature=temperature,
                concurrency=self.config.engine.max_num_seqs * (self.config.engine.replicas if engine is None else 1),
                seed=self.config.seed,
                samples_per_task=self.config.eval.samples if temperature > 0 else 1,
            )
            if engine is not None and result.failed:
                await self._refuse_if_lost([engine], result)
            self.reporter.evaluation(result)

    async def shadow(self, tasks: Sequence[Task], version: int, weights: Any) -> EvalResult:
        """Evaluate weights that do not serve, at the training temperature, in borrowed engines that the next publication gives back.

        `eval.placement` says which: with hold all of them, and generation for training waits; with replica one, and the others go on. An evaluation
        that still runs is waited for. What fails is tried once more; raises its SystemFailure then.
        """
        return await self._twice(tasks, version, weights)

    async def serving(self, tasks: Sequence[Task]) -> EvalResult:
        """The same of the weights that serve, which the engines keep."""
        return await self._twice(tasks, self.loop.published_version, None)

    async def _twice(self, tasks: Sequence[Task], version: int, weights: Any | None) -> EvalResult:
        if self.running is not None:
            await asyncio.wait({self.running})
        try:
            return await self._shadow(tasks, version, weights)
        except SystemFailure as failure:
            self.reporter.evaluation_missed("shadow", version, f"{failure}; it is tried once more")
            return await self._shadow(tasks, version, weights)

    async def _shadow(self, tasks: Sequence[Task], version: int, weights: Any | None) -> EvalResult:
        for _ in range(math.ceil(self.config.engine.start_timeout_s / ENGINE_POLL_S)):
            if self.engines.live:
                break
            await asyncio.sleep(ENGINE_POLL_S)  # the only engine is being replaced
        live = self.engines.live
        held = tuple(engine for engine in live if engine in self._borrowed)  # by the evaluation before this one, which nothing has followed yet
        borrowed = live if self.config.eval.placement == "hold" else (held or live)[-1:]
        for engine in borrowed:
            await self.engines.lend(engine)
            await self.workers.lend(engine)
            self._borrowed.append(engine)
        for engine in borrowed if weights is not None else ():
            await self.engines.try_on(engine, weights, version)
        result = await evaluate(
            self.loop.workers,
            tasks,
            name="shadow",
            version=version,
            temperature=self.config.rollout.sampling.temperature,
            concurrency=self.config.engine.max_num_seqs * len(borrowed),
            seed=self.config.seed,
        )
        if result.failed:
            await self._refuse_if_lost(borrowed, result)
        return result

    async def _refuse_if_lost(self, engines: Sequence[str], result: EvalResult) -> None:
        """Raise EngineFailure when one that was lent was lost, and episodes with it: what is left of them is no sample."""
        for engine in engines:
            if not await self.engines.still_lent(engine):
                raise EngineFailure(f"{engine}, which was lent to it, was lost, and {result.failed} of its episodes failed")

    async def served(self) -> None:
        """What was borrowed has been published to, and trains again."""
        borrowed, self._borrowed = self._borrowed, []
        for engine in dict.fromkeys(borrowed):
            await self.workers.restore(engine)

    def stop(self) -> None:
        """Give up the evaluation that runs: the run is ending, and nobody is to wait for it. It is said to be missing."""
        if self.running is None or self.running.done():
            return
        self.running.cancel()
        name, version = self._what
        self.reporter.evaluation_missed(name, version, "the run was stopped" + ("" if name == "during" else "; a resume evaluates it again"))

    async def _beside(self, name: str, version: int, engine: str | None) -> None:
        """An evaluation while training goes on. That all of its episodes failed is reported and ends nothing, unless it is the first and its engine is well."""
        self.reporter.phase(f"training; evaluation {name} of version {version}, {len(self.held_out)} held-out tasks")
        try:
            await self._run(name, version, engine)
        except SystemFailure as failure:
            if name == "before" and (engine is None or await self.engines.still_lent(engine)):
                raise
            self.reporter.evaluation_missed(name, version, str(failure))
        if engine is not None:
            await self.engines.restore(engine)
            await self.workers.restore(engine)
        self.reporter.phase("training")
