"""Parts of a run that need no engine and no torch, for tests of the loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from sao.config import Config
from sao.environment import Task
from sao.inference.protocol import PublishReport
from sao.learner.protocol import StepReport
from sao.loop_seams import StepRow
from sao.rollout.episodes import EpisodeFailure, EpisodeRequest, Loss
from sao.rollout.staleness import Finished
from sao.tasks.fixed_order import FixedOrder
from sao.trajectory import EpisodeId, FinishReason, Segment, Trajectory


def make_trajectory(
    episode_id: EpisodeId | int = 0,
    *,
    task: str = "task",
    workload: str = "default",
    versions: Sequence[int] = (0, 0),
    reward: float = 1.0,
    admitted: int | None = None,
    finish: FinishReason | None = None,
    prompt: Sequence[int] = (1, 2),
) -> Trajectory:
    """A prompt and one turn whose tokens carry `versions`."""
    identity = episode_id if isinstance(episode_id, EpisodeId) else EpisodeId(episode_id)
    n, m = len(prompt), len(versions)
    segment = Segment(
        token_ids=np.array([*prompt, *range(3, 3 + m)]),
        action_mask=np.array([False] * n + [True] * m),
        logprobs=np.array([np.nan] * n + [-0.5] * m),
        versions=np.array([-1] * n + list(versions)),
    )
    return Trajectory(
        episode_id=identity,
        task_id=task,
        environment="fake",
        segments=(segment,),
        reward=reward,
        finish=finish or (FinishReason.terminal() if m else FinishReason.failed("no_action")),
        admitted_version=min(versions, default=0) if admitted is None else admitted,
        workload=workload,
    )


class CountingSource(FixedOrder):
    """Tasks 0, 1, 2, ... with a workload class chosen by `classes`."""

    length = None

    def __init__(self, classes: Sequence[str] = ("default",)) -> None:
        self.classes = classes
        self.index = 0

    def next(self) -> Task:
        self.index += 1
        return self.again(self.index - 1)

    def again(self, place: int) -> Task:
        return Task(f"task-{place}", "fake", {"index": place}, workload=self.classes[place % len(self.classes)], place=place)

    def state_dict(self) -> dict[str, Any]:
        return {"index": self.index}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.index = state["index"]

    def held_out(self, n: int) -> list[Task]:
        return []


@dataclass
class FakeEngines:
    """Published versions; `seconds` per publication."""

    seconds: float = 0.0
    version: int = 0
    history: list[int] = field(default_factory=list)

    async def publish(self, weights: Any, version: int) -> Sequence[PublishReport]:
        await asyncio.sleep(self.seconds)
        self.version = version
        self.history.append(version)
        return [PublishReport("engine-0", version, 0.0, 0.0, 0.0, 0, 0.0, 1)]


class TimedWorkers:
    """Each episode takes `latency(request)` seconds and fails when `fails(request)`; its tokens carry the versions published meanwhile."""

    def __init__(
        self,
        engines: FakeEngines,
        latency: Callable[[EpisodeRequest], float],
        fails: Callable[[EpisodeRequest], bool] = lambda request: False,
        limit: float = float("inf"),
        reason: str = "environment",
    ) -> None:
        self.engines, self.latency, self.fails, self.limit, self.reason = engines, latency, fails, limit, reason
        self.running = 0
        self.most = 0

    async def run(self, request: EpisodeRequest) -> Finished[Any] | EpisodeFailure:
        self.running += 1
        self.most = max(self.most, self.running)
        seconds = self.latency(request)
        first = self.engines.version
        await asyncio.sleep(min(seconds, self.limit))
        self.running -= 1
        if self.fails(request):
            return EpisodeFailure(request.episode_id, self.reason, "scripted failure", tokens=3)
        finish = FinishReason.terminal() if seconds <= self.limit else FinishReason.truncated("time")
        trajectory = make_trajectory(
            request.episode_id,
            task=request.task.task_id,
            workload=request.task.workload,
            versions=(first, self.engines.version),
            admitted=request.version,
            finish=finish,
        )
        return Finished(trajectory.meta(), trajectory)


class CountingLearner:
    """Takes `seconds` a step; version = actor steps. Records what it was given."""

    def __init__(self, config: Config, seconds: Callable[[int], float] = lambda step: 1.0) -> None:
        self.seconds = seconds
        self.actor_from = config.train.steps if config.run.phase == "critic" else config.critic.critic_only_steps
        self.version = 0
        self.batches: list[list[Trajectory]] = []
        self.staleness: list[int] = []

    async def step(self, handles: Sequence[Any], step: int) -> StepReport:
        self.batches.append(list(handles))
        self.staleness += [self.version - trajectory.oldest_version for trajectory in handles]
        await asyncio.sleep(self.seconds(step))
        self.version += step >= self.actor_from
        return StepReport(step, self.version, {})

    async def gather(self) -> Any:
        return ("weights", self.version)


class SilentObserver:
    def __init__(self) -> None:
        self.rows: list[StepRow] = []
        self.failures: list[tuple[EpisodeFailure, bool]] = []
        self.losses: list[Loss] = []

    def step(self, row: StepRow) -> None:
        self.rows.append(row)

    def publication(self, version: int, reports: Sequence[PublishReport], seconds: float) -> None: ...

    def failure(self, failure: EpisodeFailure, retried: bool) -> None:
        self.failures.append((failure, retried))

    def lost(self, loss: Loss) -> None:
        self.losses.append(loss)

    def phase(self, text: str) -> None: ...
