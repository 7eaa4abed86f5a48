"""Ray actors seen through SAO's own protocols; Ray's exceptions become typed failures that name the actor."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol, TypeVar

from sao.errors import EngineFailure, LearnerFailure, SaoError, SystemFailure, WorkerFailure
from sao.inference.protocol import Canary, EngineSnapshot, GenerateRequest, Generation, PublishReport
from sao.learner.protocol import StepReport
from sao.rollout.episodes import EpisodeFailure, EpisodeRequest
from sao.rollout.last_words import last_words, path_of
from sao.rollout.staleness import Finished
from sao.runtime.memory import with_advice
from sao.runtime.run_store import RunStore
from sao.timeouts import time_limit

T = TypeVar("T")
FETCH_S = 5.0


async def call(
    reference: Awaitable[T], actor: str, failure: type[SystemFailure], timeout_s: float, key: str = "", stood_s: Callable[[], float] = lambda: 0.0
) -> T:
    """Await a Ray call. Errors of ours come back as they were raised; a dead or silent actor becomes a `failure` with `lost` set.

    `key` is the configuration's name for the time limit, to be named when it passes; time by which `stood_s` grows does not count.
    """
    import ray.exceptions as rx

    try:
        async with time_limit(timeout_s, stood_s):
            return await reference
    except TimeoutError:
        limit = f"{timeout_s:.0f} s ({key})" if key else f"{timeout_s:.0f} s"
        late = lost(failure, f"{actor} did not answer within {limit}; see logs/{actor}.log in the run folder")
        late.overdue = True
        raise late from None
    except rx.RayTaskError as error:
        cause = error.cause
        if isinstance(cause, SystemFailure) and cause.args:
            cause.args = (with_advice(actor, str(cause)), *cause.args[1:])
        if isinstance(cause, SaoError):
            raise cause from None
        said = f"{actor} failed with {type(cause).__name__}: {cause}; see logs/{actor}.log in the run folder"
        raise failure(with_advice(actor, said)) from error
    except rx.RayError as error:
        said = f"{actor} died ({str(error).splitlines()[0]}); see logs/{actor}.log in the run folder"
        raise lost(failure, with_advice(actor, said)) from None


def lost(failure: type[SystemFailure], message: str) -> SystemFailure:
    error = failure(message)
    error.lost = True
    return error


def fetch(handle: Any) -> Any:
    """What lies behind a reference, for the record of what was dropped; None where it is gone with whoever made it. Blocks."""
    import ray
    import ray.exceptions as rx

    try:
        return ray.get(handle, timeout=FETCH_S)
    except rx.RayError:
        return None


class RemoteEngine:
    """One engine actor, as a pool's member."""

    def __init__(self, name: str, actor: Any, timeout_s: float) -> None:
        self.name = name
        self.actor = actor
        self.timeout_s = timeout_s

    async def generate(self, request: GenerateRequest) -> Generation:
        return await call(self.actor.generate.remote(request), self.name, EngineFailure, self.timeout_s)

    async def publish(self, bundle: Any, version: int, canary: Canary | None = None) -> PublishReport:
        """`bundle` is the learner's reference to (bundle, canary): the engine's process reads it, this one never does."""
        return await call(self.actor.publish.remote(bundle, version), self.name, EngineFailure, self.timeout_s)

    async def drain(self, export: bool = True) -> int:
        return await call(self.actor.drain.remote(export), self.name, EngineFailure, self.timeout_s)

    async def snapshot(self) -> EngineSnapshot:
        return await call(self.actor.snapshot.remote(), self.name, EngineFailure, self.timeout_s)

    async def wake(self) -> None:
        await call(self.actor.wake.remote(), self.name, EngineFailure, self.timeout_s)

    async def begin_incarnation(self, incarnation: int) -> None:
        await call(self.actor.begin_incarnation.remote(incarnation), self.name, EngineFailure, self.timeout_s)


class Replacer(Protocol):
    """Who brings actors back (`sao.runtime.cluster.Cluster`)."""

    actors: dict[str, Any]

    async def replace(self, name: str, dead: Any, reason: str) -> None:
        """Return when `name` is another actor than `dead`, started by this call or by an earlier one. Raises SystemFailure when that is hopeless."""
        ...

    def forgive(self, name: str) -> None:
        """`name` has done what it is for, or its loss is somebody else's doing: earlier losses no longer count as ones in a row."""
        ...


class RemoteLearner:
    """The learner actor, as the loop's LearnerHandle.

    One that dies or hangs is replaced; the new one starts from the newest checkpoint and trains the later batches again, from the run store, so that it
    has the same weights as the one before. The loop only waits longer.
    """

    def __init__(
        self, cluster: Replacer, store: RunStore, timeout_s: float, on_revived: Callable[[], Awaitable[None]], name: str = "learner"
    ) -> None:
        self.cluster = cluster
        self.store = store
        self.name = name
        self.timeout_s = timeout_s
        self.on_revived = on_revived
        self.steps_done = 0
        self._current = cluster.actors[name]
        self._went_back: tuple[str, int, int] | None = None  # directory, version and steps done of the last roll-back
        self._unwritten: dict[int, Sequence[Any]] = {}

    async def step(self, handles: Sequence[Any], step: int) -> StepReport:
        report: StepReport = await self._ask(lambda actor: actor.step.remote(step, *handles))
        self.cluster.forgive(self.name)
        self.steps_done = step + 1
        # The file of a step is complete when the next step has returned; until then its batch is kept here.
        self._unwritten = {s: h for s, h in self._unwritten.items() if s >= step - 1} | {step: handles}
        return report

    async def gather(self) -> Any:
        """A reference to (bundle, canary) in the object store, ready to be read by every engine."""
        weights: list[Any] = []

        def send(actor: Any) -> Any:
            weights[:] = actor.gather.options(num_returns=2).remote()
            return weights[1]

        await self._ask(send)
        return weights[0]

    async def export(self, directory: str) -> None:
        await self._ask(lambda actor: actor.export.remote(directory))

    async def save(self, directory: str, buffered: Sequence[Any]) -> None:
        await self._ask(lambda actor: actor.save.remote(directory, *buffered))

    async def restore(self, directory: str, steps_done: int) -> None:
        await self._ask(lambda actor: actor.restore.remote(directory))
        self.steps_done = steps_done

    async def go_back(self, directory: str, version: int) -> None:
        """Take up the state in `directory` as `version`; the steps done stay done. Engines may be given that number a second time."""
        await self._ask(lambda actor: actor.go_back.remote(directory, version, self.steps_done))
        self._went_back = directory, version, self.steps_done
        await self.on_revived()

    async def _ask(self, send: Callable[[Any], Any]) -> Any:
        while True:
            actor = self.cluster.actors[self.name]
            try:
                await self._bring_up_to_date(actor)
                return await call(send(actor), self.name, LearnerFailure, self.timeout_s)
            except LearnerFailure as failure:
                if not failure.lost:
                    raise
                await self.cluster.replace(self.name, actor, str(failure))

    async def _bring_up_to_date(self, actor: Any) -> None:
        """Give a replacement the newest checkpoint, or what a roll-back since then went back to, and train the batches since then again."""
        if actor is self._current:
            return
        first = 0
        checkpoint = await asyncio.to_thread(self.store.checkpoint)
        if checkpoint is not None:
            await call(actor.restore.remote(str(checkpoint.path)), self.name, LearnerFailure, self.timeout_s)
            first = checkpoint.step
        if self._went_back is not None and self._went_back[2] > first:
            directory, version, first = self._went_back
            await call(actor.go_back.remote(directory, version, first), self.name, LearnerFailure, self.timeout_s)
        for step in range(first, self.steps_done):
            kept = self._unwritten.get(step)
            handles = list(kept) if kept is not None else await asyncio.to_thread(self.store.handles, step)
            await call(actor.step.remote(step, *handles), self.name, LearnerFailure, self.timeout_s)
        self._current = actor
        await self.on_revived()


class RemoteWorkers:
    """The worker actors, as the loop's EpisodeRunner: each episode goes to the worker with the fewest running, and to another when that one is lost.

    The episode that took its worker with it, by crash or by silence, has failed (`worker_lost`); whatever else was there is issued again. So is, once, an
    episode of an evaluation: nobody else would retry it, and a worker that is killed by chance while its code runs is not its fault.
    """

    def __init__(self, cluster: Replacer, names: Sequence[str], timeout_s: float, logs: Path, outage_s: Callable[[], float] = lambda: 0.0) -> None:
        """timeout_s: of one episode, without the time in which `outage_s` (cumulative) grew because no engine was there. logs: where workers leave last words."""
        self.cluster = cluster
        self.logs = logs
        self.outage_s = outage_s
        self.running = dict.fromkeys(names, 0)
        self.timeout_s = timeout_s
        self.reissued = 0

    async def run(self, request: EpisodeRequest) -> Finished[Any] | EpisodeFailure:
        retries = int(request.purpose == "eval")
        while True:
            name = min(self.running, key=lambda n: self.running[n])
            actor = self.cluster.actors[name]
            self.running[name] += 1
            try:
                outcome_ref, trajectory_ref = actor.run.options(num_returns=2).remote(request)
                outcome = await call(outcome_ref, name, WorkerFailure, self.timeout_s, stood_s=self.outage_s)
            except WorkerFailure as failure:
                if not failure.lost:
                    raise
                # Read before a replacement can have begun to write.
                said = last_words(path_of(self.logs, name))
                to_blame = failure.overdue or said.episode == request.name
                if to_blame:
                    self.cluster.forgive(name)
                await self.cluster.replace(name, actor, str(failure))
                if to_blame and not retries:
                    why = f"task {request.task.task_id} took its worker with it: {failure}"
                    return EpisodeFailure(request.episode_id, "worker_lost", f"{why}; {said}" if said.episode == request.name else why)
                retries -= to_blame
                self.reissued += 1
                continue
            finally:
                self.running[name] -= 1
            self.cluster.forgive(name)
            return Finished(outcome.meta, trajectory_ref) if isinstance(outcome, Finished) else replace(outcome, handle=trajectory_ref)

    async def lend(self, engine: str) -> None:
        """No worker sends a training request to `engine` once this returns; evaluation goes there alone."""
        await self._tell("lend", engine)

    async def restore(self, engine: str) -> None:
        await self._tell("restore", engine)

    async def _tell(self, method: str, engine: str) -> None:
        """A worker that is lost routes nothing any more; its replacement is told what is lent when it starts."""
        actors = {name: self.cluster.actors[name] for name in self.running}
        calls = [call(getattr(actor, method).remote(engine), name, WorkerFailure, self.timeout_s) for name, actor in actors.items()]
        for outcome in await asyncio.gather(*calls, return_exceptions=True):
            if isinstance(outcome, BaseException) and not (isinstance(outcome, WorkerFailure) and outcome.lost):
                raise outcome
