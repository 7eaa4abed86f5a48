"""Held-out evaluation through the same workers and engines that train, pinned to one weight version."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from sao.environment import Task
from sao.rollout.episodes import EpisodeFailure, EpisodeRequest, EpisodeRunner
from sao.trajectory import EpisodeId


@dataclass(frozen=True)
class EvalResult:
    """Mean reward over tasks with a 95 % bootstrap interval. Failed episodes are counted and left out of the mean; truncated ones count with their reward."""

    eval: str
    env: str
    version: int
    temperature: float
    mean: float
    low: float
    high: float
    n: int
    truncated: int
    failed: int
    tokens: int
    seconds: float

    def record(self) -> dict[str, Any]:
        return asdict(self)


async def evaluate(
    runner: EpisodeRunner, tasks: Sequence[Task], *, name: str, version: int, temperature: float, concurrency: int, seed: int = 0
) -> EvalResult:
    """One episode per task at `temperature`, at most `concurrency` at once. Raises ValueError when every episode failed."""
    started = time.monotonic()
    gate = asyncio.Semaphore(concurrency)

    async def one(index: int, task: Task) -> Any:
        async with gate:
            request = EpisodeRequest(EpisodeId(index), task, version, purpose="eval", temperature=temperature, pinned=True)
            return await runner.run(request)

    outcomes = await asyncio.gather(*(one(index, task) for index, task in enumerate(tasks)))
    finished = [outcome.meta for outcome in outcomes if not isinstance(outcome, EpisodeFailure)]
    failures = [outcome for outcome in outcomes if isinstance(outcome, EpisodeFailure)]
    if not finished:
        from sao.errors import EnvironmentFailure

        raise EnvironmentFailure(
            f"evaluation {name}: all {len(failures)} episodes failed, the last with {failures[-1].reason}: {failures[-1].message}"
        )
    rewards = np.array([meta.reward for meta in finished], dtype=np.float64)
    low, high = bootstrap_interval(rewards, seed=seed)
    environments = sorted({task.environment for task in tasks})
    return EvalResult(
        eval=name,
        env="+".join(environments),
        version=version,
        temperature=temperature,
        mean=float(rewards.mean()),
        low=low,
        high=high,
        n=len(finished),
        truncated=sum(meta.finish.kind == "truncated" for meta in finished),
        failed=len(failures),
        tokens=sum(meta.sampled_tokens for meta in finished),
        seconds=time.monotonic() - started,
    )


def bootstrap_interval(values: np.ndarray[Any, Any], *, seed: int, draws: int = 2000, level: float = 0.95) -> tuple[float, float]:
    """Percentile bootstrap of the mean over the first axis; the values themselves when there is only one."""
    if len(values) < 2:
        return float(values.min()), float(values.max())
    rng = np.random.default_rng(seed)
    means = rng.choice(values, size=(draws, len(values))).mean(axis=1)
    tail = (1 - level) / 2
    return float(np.quantile(means, tail)), float(np.quantile(means, 1 - tail))
