"""Samples that survive an interruption: counted once, drawn again under the same seed, and never mixed with those of another job."""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
from dataclasses import replace

import pytest

from sao.environment import Task
from sao.errors import SystemFailure, UserError
from sao.evals.heldout import evaluate
from sao.evals.samples import FILE, Drawing, Samples
from sao.evals.symbolic import read_answer
from sao.rollout.episodes import EpisodeFailure
from sao.rollout.staleness import Finished
from sao.trajectory import SamplingSpec
from tests.fakes import make_trajectory

TASKS = [Task(f"t{i}", "math", {"question": "?", "answer": str(i)}) for i in range(4)]
K = 3
IDENTITY = {"policy": "abc", "temperature": 1.0}
STOP = 4  # the last id of make_trajectory's turn


class Policy:
    """Answers as its seed says, so that a sample depends on nothing else; Ctrl-C comes after `lives` episodes; `fails` names samples that fail once."""

    def __init__(self, lives=10**9, fails=()):
        self.lives, self.fails = lives, set(fails)
        self.asked = []

    async def run(self, request):
        await asyncio.sleep(0)
        self.asked.append((request.task.task_id, request.episode_id.ordinal % K, request.seed))
        if len(self.asked) > self.lives:
            os.kill(os.getpid(), signal.SIGINT)  # Ctrl-C
            await asyncio.sleep(60)
        if self.asked[-1][:2] in self.fails:
            return EpisodeFailure(request.episode_id, "environment", "scripted")
        said = random.Random(request.seed).randrange(4)
        trajectory = make_trajectory(request.episode_id, task=request.task.task_id, reward=float(str(said) == request.task.payload["answer"]))
        trajectory = closed(trajectory, said != 3)
        trajectory = replace(trajectory, info={"messages": [{"role": "assistant", "content": rf"\boxed{{{said}}}"}]})
        return Finished(trajectory.meta(), trajectory)


def closed(trajectory, whole):
    """With a turn that ends with a stop id, or was cut off."""
    segment = replace(trajectory.segments[0], sampling=SamplingSpec(stop=(STOP if whole else 99,)))
    return replace(trajectory, segments=(segment,))


def draw(folder, policy, concurrency=1, identity=IDENTITY):
    with Samples(folder, identity) as samples:
        drawing = Drawing(policy, samples, per_task=K, seed=7, read=read_answer, fetch=lambda handle: handle)
        work = evaluate(drawing, TASKS, name="x", version=0, temperature=1.0, concurrency=concurrency, samples_per_task=K)
        return asyncio.run(work), dict(samples.found)


def figures(result):
    return replace(result, seconds=0.0)


def test_an_interrupted_job_goes_on_to_the_same_result(tmp_path):
    whole, all_samples = draw(tmp_path / "whole", Policy(), concurrency=8)
    for lives in (1, 4, 5):
        with pytest.raises(KeyboardInterrupt):
            draw(tmp_path / "cut", Policy(lives))
    last = Policy()
    result, found = draw(tmp_path / "cut", last, concurrency=8)
    assert figures(result) == figures(whole) and found == all_samples
    assert len(last.asked) == len(TASKS) * K - 10
    nobody = Policy(0)
    again, _ = draw(tmp_path / "cut", nobody)
    assert figures(again) == figures(whole) and nobody.asked == []


def test_every_sample_has_a_seed_of_its_own(tmp_path):
    policy = Policy()
    draw(tmp_path, policy)
    assert len({seed for *_, seed in policy.asked}) == len(TASKS) * K


def test_a_sample_cut_off_counts_as_wrong(tmp_path):
    result, found = draw(tmp_path, Policy())
    cut = [sample for sample in found.values() if sample.answer == "3"]
    assert cut and all(sample.truncated and sample.reward == 0.0 for sample in cut)
    assert result.truncated == len(cut)
    assert result.problems[3].rewards == (0.0,) * K  # its right answer, 3, is only ever said in a cut turn


def test_a_failed_sample_is_not_written_and_drawn_again(tmp_path):
    result, found = draw(tmp_path, Policy(fails=[("t1", 2)]))
    assert result.failed == 1 and ("t1", 2) not in found
    policy = Policy()
    result, found = draw(tmp_path, policy)
    assert result.failed == 0 and [asked[:2] for asked in policy.asked] == [("t1", 2)]


def test_a_line_cut_off_by_a_kill_is_drawn_again_and_a_doubled_one_counts_once(tmp_path):
    whole, found = draw(tmp_path, Policy())
    path = tmp_path / FILE
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join([*lines[:5], lines[3], lines[5][:20]]))
    policy = Policy()
    result, again = draw(tmp_path, policy)
    assert figures(result) == figures(whole) and again == found
    assert len(policy.asked) == len(TASKS) * K - 4


def test_samples_of_another_job_are_refused(tmp_path):
    draw(tmp_path, Policy())
    with pytest.raises(UserError, match=r"temperature is 1.0 there and 0.6 here.*out="):
        draw(tmp_path, Policy(), identity=IDENTITY | {"temperature": 0.6})


def test_two_jobs_do_not_write_one_file(tmp_path):
    with Samples(tmp_path, IDENTITY), pytest.raises(UserError, match="by another evaluation"), Samples(tmp_path, IDENTITY):
        pass


def test_what_cannot_be_kept_is_not_counted(tmp_path, monkeypatch):
    from sao.evals import samples as module

    def full(file, record):
        if "task" in record:
            raise OSError(28, "No space left on device")
        file.write(json.dumps(record) + "\n")

    monkeypatch.setattr(module, "write_record", full)
    with pytest.raises(SystemFailure, match="No space left"):
        draw(tmp_path, Policy())


def test_a_trajectory_lost_with_its_worker_is_a_failure(tmp_path):
    with Samples(tmp_path, IDENTITY) as samples:
        drawing = Drawing(Policy(fails=[("t1", 0)]), samples, per_task=K, seed=None, read=read_answer, fetch=lambda handle: None)
        with pytest.raises(SystemFailure, match="lost with its worker"):
            asyncio.run(evaluate(drawing, TASKS[:1], name="x", version=0, temperature=1.0, concurrency=1, samples_per_task=1))
