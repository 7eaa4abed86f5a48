"""The asynchronous loop, top to bottom.

Three things happen at once and none waits for the others beyond the staleness rules: `_dispatch` keeps episodes in flight, `_train` turns
batches into new weights and publishes them, and finished episodes land in the buffer. The loop knows neither Ray nor vLLM nor torch: workers,
learner and engines come in through the protocols of sao/loop_seams.py, so that the same loop trains for real and runs under a scripted engine in tests.

A resumed run is the same object given a checkpoint's state and the batches that were trained after it: those train again, in the same batches
and order, before anything new is asked of the engines.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from sao.algorithms.catalogue import critic_only_steps
from sao.config import Config
from sao.environment import Task
from sao.errors import EnvironmentFailure, LearnerFailure
from sao.learner.protocol import StepReport
from sao.ledger import Entry, Ledger
from sao.loop_seams import Checkpointer, EngineHandle, Guard, LearnerHandle, Observer, StepRow
from sao.rollout.episodes import EpisodeFailure, EpisodeRequest, EpisodeRunner, Loss
from sao.rollout.staleness import Buffer, Finished, may_admit
from sao.tasks.source import TaskSource
from sao.trajectory import EpisodeId

# Consecutive failed episodes after which the run is not worth continuing: a multiple of the batch, and never so few that chance explains them.
FAILURE_PATIENCE = 4
LEAST_PATIENCE = 32
# Reasons that a fresh attempt at the same task cannot change: a prompt is as long the second time.
PERMANENT_REASONS = frozenset({"prompt_too_long"})


def total_batches(config: Config) -> int:
    """Training steps of a whole run, those included that train the critic alone."""
    return config.train.steps + (0 if config.run.phase == "critic" else critic_only_steps(config))


class TrainingLoop:
    """One run. `run()` returns after `total_batches` steps with every submitted prompt settled, or earlier after `stop()`."""

    def __init__(
        self,
        config: Config,
        source: TaskSource,
        workers: EpisodeRunner,
        learner: LearnerHandle,
        engines: EngineHandle,
        observer: Observer,
        checkpointer: Checkpointer | None = None,
        incarnation: int = 0,
    ) -> None:
        self.config = config
        self.source = source
        self.workers = workers
        self.learner = learner
        self.engines = engines
        self.observer = observer
        self.checkpointer = checkpointer
        self.incarnation = incarnation
        self.ledger = Ledger()
        self.group_size = config.rollout.rollouts_per_prompt
        self.buffer: Buffer[Any] = Buffer(config.rollout.staleness, config.train.batch_size, config.rollout.overdue, self.group_size)
        self.version = 0
        self.published_version = 0
        self.batches_done = 0
        self.max_staleness = 0
        self.total_batches = total_batches(config)
        self.actor_from = self.total_batches if config.run.phase == "critic" else critic_only_steps(config)
        self._next_ordinal = 0
        self._failures_in_a_row = 0
        self._changed = asyncio.Event()
        self._holds: list[asyncio.Future[Any]] = []
        self._issued: dict[int, Task] = {}  # of the episodes that have no trajectory yet
        self._lost_groups: dict[int, str] = {}  # groups with a member lost for good, and why, while others of them still run
        self._replay: Sequence[Sequence[Finished[Any]]] = ()
        self._checkpointed = 0
        self._stopping = False
        self.guard: Guard | None = None
        self.after_publication: Callable[[int], Awaitable[None]] | None = None  # awaited with each published version before training goes on

    def hold(self, work: asyncio.Future[Any]) -> None:
        """The next publication waits for `work`, which needs the weights that are published now (an evaluation pinned to them)."""
        self._holds.append(work)

    def stop(self) -> None:
        """End after the step that is being trained, with a checkpoint."""
        self._stopping = True
        self._signal()

    @property
    def stopping(self) -> bool:
        """Whether the run was asked to end early."""
        return self._stopping

    @property
    def complete(self) -> bool:
        """Whether every step of the run is trained."""
        return self.batches_done >= self.total_batches

    async def run(self) -> None:
        if self._replay or self.version:
            await self._catch_up()
        async with asyncio.TaskGroup() as group:
            episodes = [group.create_task(self._episode(self._reissue(ordinal))) for ordinal in sorted(self._issued)]
            dispatcher = group.create_task(self._dispatch(group, episodes), name="dispatcher")
            await self._train()
            dispatcher.cancel()
            if self._stopping:
                for episode in episodes:
                    episode.cancel()
        if self.batches_done > self._checkpointed:
            await self._checkpoint()

    # ------------------------------------------------------------------ episodes

    async def _dispatch(self, group: asyncio.TaskGroup, episodes: list[asyncio.Task[None]]) -> None:
        """Start episodes while rule 1 allows and the run still needs them."""
        while True:
            while self._needed() and self._may_start():
                for request in self._submit():
                    episodes.append(group.create_task(self._episode(request), name=f"episode {request.episode_id}"))
            episodes[:] = [episode for episode in episodes if not episode.done()]
            await self._wait_for_change()

    def _may_start(self) -> bool:
        rollout = self.config.rollout
        if rollout.max_running and self.ledger.count("running") + self.group_size > rollout.max_running:
            return False
        after = self.ledger.outstanding + self.group_size
        return may_admit(after - 1, staleness=rollout.staleness, batch_size=self.config.train.batch_size)

    def _submit(self) -> list[EpisodeRequest]:
        """Draw the next task and enter its episode, or its group of them, in the ledger."""
        task = self.source.next()
        requests = []
        for _ in range(self.group_size):
            episode_id = EpisodeId(self._next_ordinal)
            self._next_ordinal += 1
            self.ledger.submit(episode_id, task.task_id, task.environment, task.workload, self.published_version)
            self._issued[episode_id.ordinal] = task
            requests.append(self._request(episode_id, task))
        return requests

    def _reissue(self, ordinal: int) -> EpisodeRequest:
        """An episode that was running when the run stopped begins anew under the weights of now."""
        episode_id = self.ledger.entries[ordinal].episode_id
        self.ledger.restart(episode_id, self.published_version)
        return self._request(episode_id, self._issued[ordinal])

    def _request(self, episode_id: EpisodeId, task: Task) -> EpisodeRequest:
        return EpisodeRequest(episode_id, task, self.published_version, incarnation=self.incarnation)

    def _needed(self) -> bool:
        """Whether the steps that remain cannot be filled from what is already in flight."""
        still_wanted = sum(self.buffer.group_of(ordinal) not in self._lost_groups for ordinal in self.ledger.entries)
        return still_wanted + self.group_size <= self._remaining()

    def _remaining(self) -> int:
        """Episodes that the steps not yet done take, the one being trained included."""
        return (self.total_batches - self.batches_done) * self.config.train.batch_size

    async def _episode(self, request: EpisodeRequest) -> None:
        """Run one prompt to a trajectory or to a named loss, with the retries the configuration grants."""
        while True:
            outcome = await self.workers.run(request)
            if isinstance(outcome, Finished):
                self._failures_in_a_row = 0
                self._accept(outcome)
                return
            hopeless = outcome.reason in PERMANENT_REASONS or self.buffer.group_of(request.episode_id.ordinal) in self._lost_groups
            retried = not hopeless and request.episode_id.attempt < self.config.rollout.retries
            self.observer.failure(outcome, retried)
            self._count_failure(outcome)
            if not retried:
                self._drop(request.episode_id, outcome.reason, outcome.message, outcome.handle, tokens=outcome.tokens)
                del self._issued[request.episode_id.ordinal]
                self._lose_group(request.episode_id, outcome.reason)
                self._signal()
                return
            self._lose(request.episode_id, outcome.reason, outcome.message, outcome.handle, outcome.tokens, retried=True)
            episode_id = self.ledger.retry(request.episode_id, outcome.reason, outcome.tokens, self.published_version)
            request = self._request(episode_id, request.task)

    def _accept(self, finished: Finished[Any]) -> None:
        episode_id = finished.meta.episode_id
        self.ledger.finish(finished.meta)
        del self._issued[episode_id.ordinal]
        if finished.meta.action_tokens == 0:
            reason = finished.meta.finish.detail or "no_action"
            self._drop(episode_id, reason, "no token was sampled", finished.handle)
            self._lose_group(episode_id, reason)
        else:
            self.buffer.add(finished)
            lost = self._lost_groups.get(self.buffer.group_of(episode_id.ordinal))
            if lost is not None:
                self._lose_group(episode_id, lost)
        self._signal()

    def _drop(self, episode_id: EpisodeId, reason: str, message: str, handle: Any = None, *, tokens: int = 0) -> None:
        """An episode leaves the ledger untrained. `tokens`: as for `Ledger.drop`."""
        self._lose(episode_id, reason, message, handle, tokens)
        entry = self.ledger.entries[episode_id.ordinal]
        self.ledger.drop(episode_id, reason, tokens)
        self.source.lost(entry.environment, entry.task_id)

    def _lose(self, episode_id: EpisodeId, reason: str, message: str, handle: Any, tokens: int, *, retried: bool = False) -> None:
        """Tell the observer of an attempt or an episode that is about to leave the ledger, or to begin anew."""
        entry = self.ledger.entries[episode_id.ordinal]
        where = entry.task_id, entry.environment, entry.workload
        self.observer.lost(Loss(episode_id, *where, reason, message, tokens or entry.tokens, entry.version, self.batches_done, retried, handle))

    def _lose_group(self, episode_id: EpisodeId, reason: str) -> None:
        """A group that lost a member is never trained: its finished members are dropped as group_<reason>, those that still run when they finish."""
        group = self.buffer.group_of(episode_id.ordinal)
        for mate in self.buffer.pop_group(group):
            self._drop(mate.meta.episode_id, f"group_{reason}", f"episode {episode_id} of its group was lost ({reason})", mate.handle)
        if any(ordinal in self.ledger.entries for ordinal in self._members(group)):
            self._lost_groups.setdefault(group, reason)
        else:
            self._lost_groups.pop(group, None)

    def _members(self, group: int) -> range:
        return range(group * self.group_size, (group + 1) * self.group_size)

    def _count_failure(self, failure: EpisodeFailure) -> None:
        self._failures_in_a_row += 1
        limit = max(LEAST_PATIENCE, FAILURE_PATIENCE * self.config.train.batch_size)
        if self._failures_in_a_row >= limit:
            raise EnvironmentFailure(f"{limit} episodes failed in a row, the last with {failure.reason}: {failure.message}")

    # ------------------------------------------------------------------ training

    async def _train(self) -> None:
        while not self.complete and not self._stopping:
            step, started = self.batches_done, time.monotonic()
            batch = await self._next_batch(advance=step >= self.actor_from)
            if batch is None:
                return
            got_batch = time.monotonic()
            version_before = self.version
            report = await self._learn(batch, step)
            learned = time.monotonic()
            held = 0.0
            if self.version > self.published_version and (self.version % self.config.weights.publish_every == 0 or self.complete):
                held = await self._publish()
            self._signal()
            done = time.monotonic()
            times = got_batch - started, learned - got_batch, done - learned - held, done - started
            metrics = self.guard.metrics() if self.guard is not None else {}
            self.observer.step(StepRow(step, report, batch, version_before, *times, held_s=held, metrics=metrics))
            if self.batches_done - self._checkpointed >= self.config.checkpoint.every > 0:
                await self._checkpoint()

    async def _learn(self, batch: Sequence[Finished[Any]], step: int) -> StepReport:
        """One training step on a batch, from buffered to trained."""
        version_before = self.version
        ids = [item.meta.episode_id for item in batch]
        self.ledger.take(ids)
        report = await self.learner.step([item.handle for item in batch], step)
        self._check_version(report, step)
        self.version = report.version
        left_out = self._left_out(batch)
        self.ledger.settle([identity for identity in ids if identity not in left_out], awaits_publication=self.version > version_before)
        for identity in sorted(left_out):
            self._drop(identity, "truncated", f"cut off, which algo.truncation=drop keeps from training; its tokens are in the file of step {step}")
        self.batches_done = step + 1
        self.source.saw([item.meta for item in batch if item.meta.episode_id not in left_out])
        if self.guard is not None:
            self.guard.saw([item.meta for item in batch])
            if self.batches_done == self.actor_from:
                await self.guard.critic_ready(self.version)
        return report

    async def _next_batch(self, *, advance: bool) -> list[Finished[Any]] | None:
        """Wait until rule 2 lets a step start; take its batch. None when the run is to stop."""
        while not self._stopping:
            for late in self.buffer.pop_overdue(self.version):
                age, bound = self.version - late.meta.oldest_version, self.config.rollout.staleness
                self._drop(late.meta.episode_id, "overdue", f"{age} versions old where rollout.staleness={bound} (rollout.overdue=drop)", late.handle)
                self._lose_group(late.meta.episode_id, "overdue")
                self._signal()
            running = {o: v for o, v in self.ledger.running_versions().items() if self.buffer.group_of(o) not in self._lost_groups}
            batch = self.buffer.pop_batch(running, version_after=self.version + advance)
            if batch is not None:
                staleness = max(self.version - item.meta.oldest_version for item in batch)
                self.max_staleness = max(self.max_staleness, staleness)
                return batch
            await self._wait_for_change()
        return None

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
        """Give the engines the newest weights, or the last good ones when the guard refuses those. Returns the seconds that an evaluation held it up."""
        started, held = time.monotonic(), 0.0
        if self._holds:
            await asyncio.gather(*self._holds, return_exceptions=True)  # whoever started them hears of their failures
            self._holds.clear()
            held = time.monotonic() - started
        weights, undone = await self.learner.gather(), None
        if self.guard is not None and not await self.guard.passes(self.version, weights):
            weights, undone = await self._go_back(self.guard)
        reports = await self.engines.publish(weights, self.version)
        self.published_version = self.version
        self.ledger.published()
        if self.guard is not None:
            await self.guard.published()
        self.observer.publication(self.version, reports, time.monotonic() - started - held)
        if self.after_publication is not None:
            await self.after_publication(self.version)
        if undone is not None:
            await self._checkpoint(needed=True)  # a recovery must not train again what was undone
            for loss in undone:
                self.observer.lost(loss)
        return held

    async def _go_back(self, guard: Guard) -> tuple[Any, list[Loss]]:
        """Undo what was trained since the last good version. Returns its weights, which take the number of the refused ones, and what was undone."""
        good, trained = await guard.go_back(self.version)
        message = f"trained, then undone: version {self.version} was refused and version {good} came back; its tokens are in the file of its step"
        losses = []
        for entry in self.ledger.undo(trained, "rolled_back"):
            where = entry.task_id, entry.environment, entry.workload
            losses.append(Loss(entry.episode_id, *where, "rolled_back", message, entry.tokens, entry.version, self.batches_done - 1, False, None))
        return await self.learner.gather(), losses

    # ------------------------------------------------------------------ going on after a crash

    def state_dict(self) -> dict[str, Any]:
        """What the driver knows between two steps, JSON-compatible. Weights and trajectories are the learner's and the buffer's."""
        return {
            "version": self.version,
            "batches_done": self.batches_done,
            "max_staleness": self.max_staleness,
            "next_ordinal": self._next_ordinal,
            "ledger": self.ledger.state_dict(),
            "source": self.source.state_dict(),
            "issued": {str(ordinal): task.place for ordinal, task in self._issued.items()},
            **({"guard": self.guard.state_dict()} if self.guard is not None else {}),
            "lost_groups": {str(group): reason for group, reason in self._lost_groups.items()},
        }

    def load_state_dict(
        self, state: Mapping[str, Any], buffered: Sequence[Finished[Any]] = (), replay: Sequence[Sequence[Finished[Any]]] = ()
    ) -> None:
        """Go back to a checkpoint. `buffered`: its waiting trajectories; `replay`: the batches trained after it, in order."""
        self.version = state["version"]
        self.batches_done = self._checkpointed = state["batches_done"]
        self.max_staleness = state["max_staleness"]
        self._next_ordinal = state["next_ordinal"]
        self.ledger.load_state_dict(state["ledger"])
        self.source.load_state_dict(state["source"])
        for ordinal, place in state["issued"].items():
            self._issued[int(ordinal)] = self.source.again(place)
        if self.guard is not None and "guard" in state:
            self.guard.load_state_dict(state["guard"])
        for group, reason in state["lost_groups"].items():
            for ordinal in self._members(int(group)):
                if ordinal in self._issued:
                    self._drop(
                        self.ledger.entries[ordinal].episode_id,
                        f"group_{reason}",
                        f"its group had lost a member ({reason}) before the run was resumed",
                    )
                    del self._issued[ordinal]
        self.buffer.items = list(buffered)
        self._replay = replay

    async def _catch_up(self) -> None:
        """Train the replayed batches again, then give the engines the weights."""
        for batch in self._replay:
            step, version, started = self.batches_done, self.version, time.monotonic()
            self._readmit(batch)
            report = await self._learn(batch, step)
            seconds = time.monotonic() - started
            metrics = self.guard.metrics() if self.guard is not None else {}
            self.observer.step(StepRow(step, report, batch, version, 0.0, seconds, 0.0, seconds, metrics=metrics))
        self._drop_surplus()
        await self._publish()

    def _drop_surplus(self) -> None:
        """Let go what no step can take any more: an episode that was dropped after the checkpoint, and replaced, is in flight again with its replacement trained."""
        groups: dict[int, list[Entry]] = {}
        for ordinal, entry in self.ledger.entries.items():
            groups.setdefault(self.buffer.group_of(ordinal), []).append(entry)
        by_loss = sorted(groups, key=lambda group: (any(entry.state == "running" for entry in groups[group]), group), reverse=True)
        surplus = (len(self.ledger.entries) - self._remaining()) // self.group_size
        for group in by_loss[: max(0, surplus)]:
            handles = {item.meta.episode_id: item.handle for item in self.buffer.pop_group(group)}
            for entry in groups[group]:
                message = "the run was resumed, and the episode that had taken its place is trained"
                self._drop(entry.episode_id, "surplus", message, handles.get(entry.episode_id))
                self._issued.pop(entry.episode_id.ordinal, None)

    def _readmit(self, batch: Sequence[Finished[Any]]) -> None:
        """Bring the episodes of a replayed batch to where a step finds them, those included that were submitted after the checkpoint."""
        newest = max(item.meta.episode_id.ordinal for item in batch)
        while self._next_ordinal <= newest:
            self._submit()
        for item in batch:
            ordinal, attempt = item.meta.episode_id
            entry = self.ledger.entries[ordinal]
            while entry.episode_id.attempt < attempt:
                self.ledger.retry(entry.episode_id, "replayed", 0, self.published_version)
            if entry.state == "running":
                self.ledger.finish(item.meta)
                del self._issued[ordinal]
        replayed = {item.meta.episode_id for item in batch}
        self.buffer.items = [item for item in self.buffer.items if item.meta.episode_id not in replayed]

    async def _checkpoint(self, *, needed: bool = False) -> None:
        if self.checkpointer is not None:
            await self.checkpointer.save(self.state_dict(), [item.handle for item in self.buffer.items], needed=needed)
            self._checkpointed = self.batches_done

    # ------------------------------------------------------------------ waking up

    def _signal(self) -> None:
        self._changed.set()

    async def _wait_for_change(self) -> None:
        """Sleep until something happened. Two waiters share the event, so each wakes the other and re-checks its own condition."""
        await self._changed.wait()
        await asyncio.sleep(0)
        self._changed.clear()
