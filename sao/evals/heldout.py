"""Held-out evaluation through the same workers and engines that train, pinned to one weight version."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from sao.environment import Task
from sao.errors import EnvironmentFailure
from sao.evals.estimators import bootstrap_interval, pass_at_k
from sao.rollout.episodes import EpisodeFailure, EpisodeRequest, EpisodeRunner
from sao.trajectory import EpisodeId, TrajectoryMeta

SOLVED = 1.0  # the reward from which a sample counts as correct in pass@k


@dataclass(frozen=True)
class Problem:
    """One task and the rewards of its samples that finished, in the order they were asked for."""

    task_id: str
    rewards: tuple[float, ...]
    workload: str = "default"


@dataclass(frozen=True)
class EvalResult:
    """Mean reward over problems with a 95 % bootstrap interval over problems.

    k samples were asked for per problem; `n` episodes finished, and the mean is over the `problems` with at least one. Failed episodes are
    counted and left out of the mean; truncated ones count with their reward.
    """

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
    k: int = 1
    problems: tuple[Problem, ...] = field(default=(), repr=False)

    @property
    def coverage(self) -> str:
        """What the mean is over, in words."""
        return coverage(sum(bool(problem.rewards) for problem in self.problems), len(self.problems), self.failed)

    @property
    def truncated_share(self) -> float:
        return self.truncated / self.n

    def pass_at(self) -> dict[int, float]:
        """pass@j for j = 1, 2, 4, ... and k: the mean over the problems that have j finished samples. A reward of at least 1 is a pass."""
        sizes = sorted({*(2**i for i in range(self.k.bit_length())), self.k})
        result = {}
        for size in sizes:
            counts = [(len(p.rewards), sum(r >= SOLVED for r in p.rewards)) for p in self.problems if len(p.rewards) >= size]
            if counts:
                result[size] = float(np.mean([pass_at_k(n, c, size) for n, c in counts]))
        return result

    def by_workload(self) -> dict[str, float]:
        """Mean reward of each workload class, over its problems with a finished sample; empty when all tasks are of one class."""
        names = sorted({problem.workload for problem in self.problems if problem.rewards})
        means = {name: [float(np.mean(p.rewards)) for p in self.problems if p.rewards and p.workload == name] for name in names}
        return {name: float(np.mean(values)) for name, values in means.items()} if len(names) > 1 else {}

    def record(self) -> dict[str, Any]:
        """The figures, JSON-compatible, without the per-problem rewards."""
        figures = {name: value for name, value in asdict(self).items() if name != "problems"}
        split = self.by_workload()
        return figures | {"by_workload": split} if split else figures

    def table(self) -> list[dict[str, Any]]:
        """Per problem: its id, and the rewards of its samples."""
        return [{"task_id": problem.task_id, "rewards": list(problem.rewards)} for problem in self.problems]


def coverage(scored: int, problems: int, failed: int) -> str:
    """How many problems a mean is over, and what is missing from it: a figure over a part must not look like one over all."""
    of_all = "" if scored == problems else f" of {problems}"
    return f"over {scored}{of_all} problems" + (f", {failed} episodes failed and are left out" if failed else "")


async def evaluate(
    runner: EpisodeRunner,
    tasks: Sequence[Task],
    *,
    name: str,
    version: int,
    temperature: float,
    concurrency: int,
    seed: int = 0,
    samples_per_task: int = 1,
) -> EvalResult:
    """`samples_per_task` episodes per task at `temperature`, at most `concurrency` at once. Raises EnvironmentFailure when every one failed.

    Episodes carry ordinals of their own and purpose `eval`: nothing here is known to the training ledger.
    """
    started = time.monotonic()
    gate = asyncio.Semaphore(concurrency)

    async def one(ordinal: int) -> TrajectoryMeta | EpisodeFailure:
        async with gate:
            task = tasks[ordinal // samples_per_task]
            outcome = await runner.run(EpisodeRequest(EpisodeId(ordinal), task, version, purpose="eval", temperature=temperature, pinned=True))
        # The trajectory itself is let go here: thousands of them would fill the object store.
        return outcome if isinstance(outcome, EpisodeFailure) else outcome.meta

    outcomes = await asyncio.gather(*(one(ordinal) for ordinal in range(len(tasks) * samples_per_task)))
    finished = [outcome for outcome in outcomes if isinstance(outcome, TrajectoryMeta)]
    failures = [outcome for outcome in outcomes if isinstance(outcome, EpisodeFailure)]
    if not finished:
        raise EnvironmentFailure(
            f"evaluation {name}: all {len(failures)} episodes failed, the last with {failures[-1].reason}: {failures[-1].message}"
        )
    problems = []
    for index, task in enumerate(tasks):
        samples = outcomes[index * samples_per_task : (index + 1) * samples_per_task]
        rewards = tuple(sample.reward for sample in samples if isinstance(sample, TrajectoryMeta))
        problems.append(Problem(task.task_id, rewards, task.workload))
    means = np.array([np.mean(problem.rewards) for problem in problems if problem.rewards], dtype=np.float64)
    low, high = bootstrap_interval(means, seed=seed)
    return EvalResult(
        eval=name,
        env="+".join(sorted({task.environment for task in tasks})),
        version=version,
        temperature=temperature,
        mean=float(means.mean()),
        low=low,
        high=high,
        n=len(finished),
        truncated=sum(meta.finish.kind == "truncated" for meta in finished),
        failed=len(failures),
        tokens=sum(meta.sampled_tokens for meta in finished),
        seconds=time.monotonic() - started,
        k=samples_per_task,
        problems=tuple(problems),
    )
