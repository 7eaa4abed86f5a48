"""Held-out evaluation with fake workers: what is asked of them, and what is made of their answers."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from sao.environment import Task
from sao.errors import EnvironmentFailure
from sao.evals.heldout import evaluate
from sao.rollout.episodes import EpisodeFailure
from sao.rollout.staleness import Finished
from sao.trajectory import FinishReason
from tests.fakes import make_trajectory
from tests.virtual_time import run

TASKS = [Task(f"task-{i}", "fake", {"index": i}) for i in range(6)]


class Scorer:
    """Answers with the reward that `score(task index, sample)` gives; None is a failed episode."""

    def __init__(self, score, k, finish=None):
        self.score, self.k, self.finish = score, k, finish
        self.requests = []
        self.running = self.most = 0

    async def run(self, request):
        import asyncio

        self.requests.append(request)
        self.running += 1
        self.most = max(self.most, self.running)
        await asyncio.sleep(1.0)
        self.running -= 1
        reward = self.score(request.task.payload["index"], request.episode_id.ordinal % self.k)
        if reward is None:
            return EpisodeFailure(request.episode_id, "environment", "scripted")
        trajectory = make_trajectory(request.episode_id, task=request.task.task_id, reward=reward, finish=self.finish)
        return Finished(trajectory.meta(), trajectory)


def ask(scorer, **options):
    settings = {"name": "x", "version": 3, "temperature": 0.6, "concurrency": 4, "samples_per_task": scorer.k} | options
    return run(evaluate(scorer, TASKS, **settings))


def test_every_task_is_asked_k_times_pinned_and_apart_from_training():
    scorer = Scorer(lambda task, sample: 1.0, k=3)
    result = ask(scorer)
    assert Counter(r.task.task_id for r in scorer.requests) == {task.task_id: 3 for task in TASKS}
    assert len({r.episode_id for r in scorer.requests}) == 18
    assert all(r.pinned and r.purpose == "eval" and r.version == 3 and r.temperature == 0.6 for r in scorer.requests)
    assert scorer.most == 4
    assert (result.n, result.k, result.failed, result.mean) == (18, 3, 0, 1.0)
    assert (result.tokens, result.env) == (36, "fake")


def test_the_mean_the_interval_and_pass_at_k_are_by_problem():
    scorer = Scorer(lambda task, sample: float(sample == 0 and task < 3), k=4)
    result = ask(scorer)
    assert result.mean == pytest.approx(0.125)
    assert result.pass_at() == pytest.approx({1: 0.125, 2: 0.25, 4: 0.5})
    assert [p.rewards for p in result.problems[:1]] == [(1.0, 0.0, 0.0, 0.0)]
    assert result.table()[5] == {"task_id": "task-5", "rewards": [0.0] * 4}
    # Six problems with means 0.25 or 0: had the 24 samples been resampled, the interval would be another.
    possible = np.arange(7) / 24
    assert min(abs(possible - result.low)) < 1e-12 and min(abs(possible - result.high)) < 1e-12
    assert result.low < result.mean < result.high


def test_failed_samples_are_counted_and_left_out():
    scorer = Scorer(lambda task, sample: None if task == 0 or (task == 1 and sample == 1) else 1.0 if task == 1 else 0.0, k=2)
    result = ask(scorer)
    assert (result.n, result.failed) == (9, 3)
    assert result.mean == pytest.approx(1 / 5)  # five problems have an answer; the failed ones are no zeros
    assert result.pass_at() == pytest.approx({1: 1 / 5, 2: 0.0})  # pass@2 only where two samples finished
    assert [len(p.rewards) for p in result.problems] == [0, 1, 2, 2, 2, 2]


def test_truncated_samples_count_with_their_reward():
    result = ask(Scorer(lambda task, sample: 0.5, k=1, finish=FinishReason.truncated("tokens")))
    assert result.truncated == 6 and result.truncated_share == 1.0 and result.mean == 0.5


def test_a_record_has_the_figures_and_not_the_table():
    record = ask(Scorer(lambda task, sample: 1.0, k=1)).record()
    assert set(record) == {
        "eval", "env", "version", "temperature", "mean", "low", "high", "n", "truncated", "failed", "tokens", "seconds", "k",
    }  # fmt: skip


def test_nothing_but_failures_is_an_error_and_no_score():
    with pytest.raises(EnvironmentFailure, match="all 6 episodes failed"):
        ask(Scorer(lambda task, sample: None, k=1))


def test_results_are_split_by_workload():
    tasks = [Task(f"task-{i}", "fake", {"index": i}, workload="ab"[i % 2]) for i in range(6)]
    scorer = Scorer(lambda index, sample: None if index == 0 else float(index in (2, 3)), k=1)
    result = run(evaluate(scorer, tasks, name="x", version=0, temperature=1.0, concurrency=6))
    assert result.by_workload() == {"a": 0.5, "b": pytest.approx(1 / 3)}  # the failed one is left out
    assert result.record()["by_workload"] == result.by_workload()
    assert "by_workload" not in ask(Scorer(lambda index, sample: 1.0, k=1)).record()
