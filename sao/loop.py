"""The asynchronous loop, top to bottom.

Three things happen at once and none waits for the others beyond the staleness rules: `_dispatch` keeps episodes in flight, `_train` turns
batches into new weights and publishes them, and finished episodes land in the buffer. The loop knows neither Ray nor vLLM nor torch: workers,
learner and engines come in through the protocols below, so that the same loop trains for real and runs under a scripted engine in tests.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from sao.config import Config
from sao.errors import EnvironmentFailure, LearnerFailure
from sao.inference.protocol import EngineSnapshot, PublishReport
from sao.learner.protocol import StepReport
from sao.ledger import Ledger
from sao.rollout.episodes import EpisodeFailure, EpisodeRequest, EpisodeRunner
from sao.rollout.staleness import Buffer, Finished, may_admit
from sao.tasks.source import TaskSource
from sao.trajectory import EpisodeId

# Consecutive failed episodes after which the run is not worth continuing: a multiple of the batch, and never so few that chance explains them.
FAILURE_PATIENCE = 4
LEAST_PATIENCE = 32


class LearnerHandle(Protocol):
    """The learner as the driver reaches it; `handles` are what the workers returned, never arrays."""

    async def step(self, handles: Sequence[Any], step: int) -> StepReport: ...

    async def gather(self) -> Any:
        """A handle on the newest weights and their canary."""
        ...


class EngineHandle(Protocol):
    """The engines as the driver reaches them."""

    async def publish(self, weights: Any, version: int) -> Sequence[PublishReport]:
        """Return once every live engine acknowledged."""
        ...

    async def snapshots(self) -> Sequence[EngineSnapshot]: ...


class Observer(Protocol):
    """Where the loop reports: metrics, the live screen, the log. Must not block."""

    def step(self, row: StepRow) -> None: ...

    def publication(self, version: int, reports: Sequence[PublishReport], seconds: float) -> None: ...

    def failure(self, failure: EpisodeFailure, retried: bool) -> None: ...

    def phase(self, text: str) -> None: ...


@dataclass(frozen=True)
class StepRow:
    """Everything known about one training step when it has been published."""

    step: int
    report: StepReport
    batch: Sequence[Finished[Any]]
    version_before: int
    wait_s: float
    learn_s: float
    publish_s: float
    seconds: float
    held_s: float = 0.0  # how long its publication waited for an evaluation
    metrics: dict[str, float] = field(default_factory=dict)


class TrainingLoop:
    """One run. `run()` returns after `total_batches` steps with every submitted prompt settled."""

    def __init__(
        self,
        config: Config,
        source: TaskSource,
        workers: EpisodeRunner,
        learner: LearnerHandle,
        engines: EngineHandle,
        observer: Observer,
    ) -> None:
        self.config = config
        self.source = source
        self.workers = workers
        self.learner = learner
        self.engines = engines
        self.observer = observer
        self.ledger = Ledger()
        self.buffer: Buffer[Any] = Buffer(config.rollout.staleness, config.train.batch_size, config.rollout.overdue)
        self.version = 0
        self.published_version = 0
        self.batches_done = 0
        self.max_staleness = 0
        critic_only = config.run.phase == "critic"
        self.actor_from = config.train.steps if critic_only else config.critic.critic_only_steps
        self.total_batches = config.train.steps if critic_only else config.train.steps + self.actor_from
        self._next_ordinal = 0
        self._failures_in_a_row = 0
        self._changed = asyncio.Event()
        self._holds: list[asyncio.Future[Any]] = []
        self._stopping = False
        self.after_publication: Callable[[int], Awaitable[None]] | None = None  # awaited with each published version before training goes on

    def hold(self, work: asyncio.Future[Any]) -> None:
        """The next publication waits for `work`, which needs the weights that are published now (an evaluation pinned to them)."""
        self._holds.append(work)

    @property
    def stopping(self) -> bool:
        """Whether the run was asked to end early."""
        return self._stopping

    @property
    def complete(self) -> bool:
        """Whether every step of the run is trained."""
        return self.batches_done == self.total_batches

    async def run(self) -> None:
        async with asyncio.TaskGroup() as group:
            dispatcher = group.create_task(self._dispatch(group), name="dispatcher")
            await self._train()
            dispatcher.cancel()

    # ------------------------------------------------------------------ episodes

    async def _dispatch(self, group: asyncio.TaskGroup) -> None:
        """Start episodes while rule 1 allows and the run still needs them."""
        config = self.config
        while True:
            while self._needed() and may_admit(self.ledger.outstanding, staleness=config.rollout.staleness, batch_size=config.train.batch_size):
                task = self.source.next()
                episode_id = EpisodeId(self._next_ordinal)
                self._next_ordinal += 1
                self.ledger.submit(episode_id, task.task_id, task.environment, task.workload, self.published_version)
                group.create_task(self._episode(EpisodeRequest(episode_id, task, self.published_version)), name=f"episode {episode_id}")
            await self._wait_for_change()

    def _needed(self) -> bool:
        """Whether the steps that remain cannot be filled from what is already in flight."""
        return self.ledger.trained + len(self.ledger.entries) < self.total_batches * self.config.train.batch_size

    async def _episode(self, request: EpisodeRequest) -> None:
        """Run one prompt to a trajectory or to a named loss, with the retries the configuration grants."""
        while True:
            outcome = await self.workers.run(request)
            if isinstance(outcome, Finished):
                self._failures_in_a_row = 0
                self._accept(outcome)
                return
            retried = request.episode_id.attempt < self.config.rollout.retries
            self.observer.failure(outcome, retried)
            self._count_failure(outcome)
            if not retried:
                self.ledger.drop(request.episode_id, outcome.reason, outcome.tokens)
                self._signal()
                return
            episode_id = self.ledger.retry(request.episode_id, outcome.reason, outcome.tokens, self.published_version)
            request = EpisodeRequest(episode_id, request.task, self.published_version)

    def _accept(self, finished: Finished[Any]) -> None:
        self.ledger.finish(finished.meta)
        if finished.meta.action_tokens == 0:
            self.ledger.drop(finished.meta.episode_id, finished.meta.finish.detail or "no_action")
        else:
            self.buffer.add(finished)
        self._signal()

    def _count_failure(self, failure: EpisodeFailure) -> None:
        self._failures_in_a_row += 1
        limit = max(LEAST_PATIENCE, FAILURE_PATIENCE * self.config.train.batch_size)
        if self._failures_in_a_row >= limit:
            raise EnvironmentFailure(f"{limit} episodes failed in a row, the last with {failure.reason}: {failure.message}")

    # ------------------------------------------------------------------ training

    async def _train(self) -> None:
        for step in range(self.total_batches):
            started = time.monotonic()
            batch = await self._next_batch(advance=step >= self.actor_from)
            got_batch = time.monotonic()
            version_before = self.version
            ids = [item.meta.episode_id for item in batch]
            self.ledger.take(ids)
            report = await self.learner.step([item.handle for item in batch], step)
            learned = time.monotonic()
            self._check_version(report, step)
            self.version = report.version
            left_out = self._left_out(batch)
            self.ledger.settle([identity for identity in ids if identity not in left_out], awaits_publication=self.version > version_before)
            for identity in left_out:
                self.ledger.drop(identity, "truncated")
            self.batches_done = step + 1
            held = 0.0
            if self.version > self.published_version and (self.version % self.config.weights.publish_every == 0 or self.complete):
                held = await self._publish()
            self._signal()
            done = time.monotonic()
            times = got_batch - started, learned - got_batch, done - learned - held, done - started
            self.observer.step(StepRow(step, report, batch, version_before, *times, held_s=held))

    async def _next_batch(self, *, advance: bool) -> list[Finished[Any]]:
        """Wait until rule 2 lets a step start; take its batch."""
        while True:
            for late in self.buffer.pop_overdue(self.version):
                self.ledger.drop(late.meta.episode_id, "overdue")
                self._signal()
            batch = self.buffer.pop_batch(self.ledger.running_versions(), version_after=self.version + advance)
            if batch is not None:
                staleness = max(self.version - item.meta.oldest_version for item in batch)
                self.max_staleness = max(self.max_staleness, staleness)
                return batch
            await self._wait_for_change()

    def _left_out(self, batch: Sequence[Finished[Any]]) -> set[EpisodeId]:
        """Episodes of a batch that algo.truncation=drop keeps from every loss."""
        if self.config.algo.truncation != "drop":
            return set()
        return {item.meta.episode_id for item in batch if item.meta.finish.kind == "truncated"}

    def _check_version(self, report: StepReport, step: int) -> None:
        """One actor step at most; none while the actor is frozen, or when truncation=drop left nothing of the batch to train."""
        most = self.version + (step >= self.actor_from)
        if not self.version <= report.version <= most:
            raise LearnerFailure(f"the learner reports version {report.version} after step {step}, which started at {self.version} and allows {most}")

    async def _publish(self) -> float:
        """Give the engines the newest weights. Returns the seconds that an evaluation of the old ones held it up."""
        started, held = time.monotonic(), 0.0
        if self._holds:
            await asyncio.wait(self._holds)
            for work in self._holds:
                if not work.cancelled():  # given up by whoever asked for it
                    work.result()
            self._holds.clear()
            held = time.monotonic() - started
        weights = await self.learner.gather()
        reports = await self.engines.publish(weights, self.version)
        self.published_version = self.version
        self.ledger.published()
        self.observer.publication(self.version, reports, time.monotonic() - started - held)
        if self.after_publication is not None:
            await self.after_publication(self.version)
        return held

    # ------------------------------------------------------------------ waking up

    def _signal(self) -> None:
        self._changed.set()

    async def _wait_for_change(self) -> None:
        """Sleep until something happened. Two waiters share the event, so each wakes the other and re-checks its own condition."""
        await self._changed.wait()
        await asyncio.sleep(0)
        self._changed.clear()
