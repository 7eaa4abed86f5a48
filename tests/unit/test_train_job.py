"""A sitting of a run around its loop: which evaluations it begins, and whether a stop has cut it short. In virtual time, with nothing started."""

from __future__ import annotations

import asyncio
import json

import pytest

from sao.loop import TrainingLoop
from sao.runtime import saved
from sao.runtime.run_folder import RunFolder
from sao.runtime.run_store import RunStore
from sao.train import Job
from tests.fakes import CountingLearner, CountingSource
from tests.unit.evals.test_schedule import HELD_OUT, LendableEngines, Reporter, Workers
from tests.unit.test_loop import make_config
from tests.virtual_time import run


class Recording(Reporter):
    """Writes eval.jsonl, as the run's observer does."""

    def __init__(self, folder) -> None:
        super().__init__()
        self.folder = folder

    def evaluation(self, result):
        super().evaluation(result)
        self.folder.append_json("eval.jsonl", result.record())


def sitting(path, *, stop_at=None, version=0, **evaluations):
    """One sitting of a run of four steps, stopped at `stop_at` seconds; `version`: of the checkpoint it goes on from."""
    config = make_config(staleness=2, batch=2, steps=4)
    for key, value in {"temperatures": [1.0, 0.0], **evaluations}.items():
        setattr(config.eval, key, value)
    with RunFolder(path, resume=(path / "run.lock").exists()) as folder:
        reporter, engines = Recording(folder), LendableEngines()
        job = Job(config, CountingSource(), HELD_OUT, "", folder, reporter, RunStore(path, 2, keep_all=True))
        loop = TrainingLoop(config, CountingSource(), Workers(engines, 2.0), CountingLearner(config), engines, reporter)
        loop.version = loop.batches_done = loop.learner.version = version
        job.loop = loop

        async def main():
            this = asyncio.current_task()
            if stop_at is not None:
                asyncio.get_running_loop().call_later(stop_at, lambda: job._stop(this))
            await job._work(loop, engines, job.loop.workers)

        run(main())
    return job, reporter


def names(reporter):
    return [(result.eval, result.version, result.temperature) for result in reporter.results]


def test_a_stop_before_the_last_step_cuts_a_run_short(tmp_path):
    job, _ = sitting(tmp_path, stop_at=1.5)
    assert job.cut_short and not job.loop.complete


def test_a_stop_in_the_evaluation_after_training_leaves_it_to_a_resume(tmp_path):
    job, reporter = sitting(tmp_path, stop_at=5.0, at_end=True)
    assert job.loop.complete and job.cut_short and names(reporter) == []
    assert reporter.missed == [("after", 4, "the run was stopped; a resume evaluates it again")]
    assert saved.evaluation_due(tmp_path, job.config, 4)
    job, reporter = sitting(tmp_path, version=4, at_end=True)
    assert not job.cut_short and names(reporter) == [("after", 4, 1.0), ("after", 4, 0.0)]
    assert not saved.evaluation_due(tmp_path, job.config, 4)


def test_a_stop_when_all_is_done_changes_nothing(tmp_path):
    job, _ = sitting(tmp_path, at_end=True)
    job._stop(None)
    assert job.stopped and not job.cut_short


@pytest.mark.parametrize("placement", ["hold", "replica"])
def test_an_evaluation_before_training_that_was_cut_off_is_done_by_the_resume(tmp_path, placement):
    """Whatever was trained meanwhile: the engines of every sitting start with the weights of version 0."""
    _, reporter = sitting(tmp_path, stop_at=1.5, at_start=True, placement=placement)
    assert names(reporter) == [] and reporter.missed == [("before", 0, "the run was stopped; a resume evaluates it again")]
    job, reporter = sitting(tmp_path, version=2, at_start=True, placement=placement)
    assert job.loop.complete and names(reporter) == [("before", 0, 1.0), ("before", 0, 0.0)]
    assert all(pinned == before == after == 0 for pinned, before, after in job.loop.workers.seen)
    assert names(sitting(tmp_path, version=2, at_start=True, placement=placement)[1]) == []


def test_one_temperature_of_two_is_not_all(tmp_path):
    (tmp_path / "eval.jsonl").write_text(json.dumps({"eval": "after", "version": 4, "temperature": 1.0}) + '\n{"eval": "aft')
    assert saved.evaluated(tmp_path, "after", 4, [1.0]) and not saved.evaluated(tmp_path, "after", 4, [1.0, 0.0])
    assert not saved.evaluated(tmp_path, "after", 3, [1.0]) and not saved.evaluated(tmp_path, "before", 4, [1.0])
