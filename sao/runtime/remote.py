"""Ray actors seen through SAO's own protocols; Ray's exceptions become typed failures that name the actor."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Sequence
from typing import Any, TypeVar

from sao.errors import EngineFailure, LearnerFailure, SaoError, SystemFailure, WorkerFailure
from sao.inference.protocol import Canary, EngineSnapshot, GenerateRequest, Generation, PublishReport
from sao.learner.protocol import StepReport
from sao.rollout.episodes import EpisodeFailure, EpisodeRequest
from sao.rollout.staleness import Finished

T = TypeVar("T")


async def call(reference: Awaitable[T], actor: str, failure: type[SystemFailure], timeout_s: float) -> T:
    """Await a Ray call. Errors of ours come back as they were raised; a dead or silent actor becomes `failure`."""
    import ray.exceptions as rx

    try:
        return await asyncio.wait_for(as_coroutine(reference), timeout_s)
    except TimeoutError:
        raise failure(f"{actor} did not answer within {timeout_s:.0f} s; see logs/{actor}.log in the run folder") from None
    except rx.RayTaskError as error:
        cause = error.cause
        if isinstance(cause, SaoError):
            raise cause from None
        raise failure(f"{actor} failed with {type(cause).__name__}: {cause}; see logs/{actor}.log in the run folder") from error
    except rx.RayActorError as error:
        raise failure(f"{actor} died ({str(error).splitlines()[0]}); see logs/{actor}.log in the run folder") from None


async def as_coroutine(reference: Awaitable[T]) -> T:
    """asyncio.wait_for takes coroutines; a Ray reference is only awaitable."""
    return await reference


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


class RemoteLearner:
    """The learner actor, as the loop's LearnerHandle."""

    def __init__(self, actor: Any, timeout_s: float, name: str = "learner") -> None:
        self.actor = actor
        self.name = name
        self.timeout_s = timeout_s

    async def step(self, handles: Sequence[Any], step: int) -> StepReport:
        return await call(self.actor.step.remote(step, *handles), self.name, LearnerFailure, self.timeout_s)

    async def gather(self) -> Any:
        """A reference to (bundle, canary) in the object store, ready to be read by every engine."""
        import ray

        reference = self.actor.gather.remote()
        ready, _ = await asyncio.to_thread(ray.wait, [reference], timeout=self.timeout_s, fetch_local=False)
        if not ready:
            raise LearnerFailure(f"{self.name} did not hand over its weights within {self.timeout_s:.0f} s")
        return reference

    async def export(self, directory: str) -> None:
        await call(self.actor.export.remote(directory), self.name, LearnerFailure, self.timeout_s)


class RemoteWorkers:
    """The worker actors, as the loop's EpisodeRunner: each episode goes to the worker with the fewest running."""

    def __init__(self, actors: dict[str, Any], grace_s: float, time_limit_s: float) -> None:
        self.actors = actors
        self.running = dict.fromkeys(actors, 0)
        self.lent: set[str] = set()  # what a worker that comes later has to be told
        self.timeout_s = time_limit_s + grace_s

    async def run(self, request: EpisodeRequest) -> Finished[Any] | EpisodeFailure:
        name = min(self.running, key=lambda n: self.running[n])
        self.running[name] += 1
        try:
            outcome_ref, trajectory_ref = self.actors[name].run.options(num_returns=2).remote(request)
            outcome = await call(outcome_ref, name, WorkerFailure, self.timeout_s)
        finally:
            self.running[name] -= 1
        return Finished(outcome.meta, trajectory_ref) if isinstance(outcome, Finished) else outcome

    async def lend(self, engine: str) -> None:
        """No worker sends a training request to `engine` once this returns; evaluation goes there alone."""
        self.lent.add(engine)
        await self._tell("lend", engine)

    async def restore(self, engine: str) -> None:
        self.lent.discard(engine)
        await self._tell("restore", engine)

    async def _tell(self, method: str, engine: str) -> None:
        calls = [call(getattr(actor, method).remote(engine), name, WorkerFailure, self.timeout_s) for name, actor in self.actors.items()]
        for outcome in await asyncio.gather(*calls, return_exceptions=True):
            if isinstance(outcome, BaseException) and not isinstance(outcome, WorkerFailure):  # a worker that died routes nothing any more
                raise outcome
