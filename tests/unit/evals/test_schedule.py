"""Evaluation while the real loop trains, in virtual time: which versions, on whose weights, and that training's account does not notice."""

from __future__ import annotations

import asyncio

import pytest

from sao.environment import Task
from sao.evals.schedule import Evaluations
from sao.loop import TrainingLoop
from sao.rollout.episodes import EpisodeFailure
from tests.fakes import CountingLearner, CountingSource, FakeEngines, SilentObserver, TimedWorkers
from tests.unit.test_loop import make_config
from tests.virtual_time import run

HELD_OUT = [Task(f"held-{i}", "fake", {"index": i}) for i in range(3)]


class LendableEngines(FakeEngines):
    """Two engines: `lent` remembers which version the second one was lent with."""

    live = ("engine-0", "engine-1")

    def __init__(self, seconds: float = 0.1) -> None:
        super().__init__(seconds)
        self.lent: int | None = None
        self.calls: list[tuple[str, str]] = []

    async def lend(self, engine):
        self.calls.append(("engines lend", engine))
        self.lent = self.version

    async def restore(self, engine):
        self.calls.append(("engines restore", engine))
        self.lent = None

    async def still_lent(self, engine):
        return self.lent is not None


class Workers(TimedWorkers):
    """Training episodes as usual; evaluation episodes take `eval_s` and record the weights they were asked for and met."""

    def __init__(self, engines, eval_s, broken=False, **options):
        super().__init__(engines, lambda request: eval_s if request.purpose == "eval" else 0.3, **options)
        self.broken = broken
        self.seen: list[tuple[int, int, int]] = []

    def weights(self):
        return self.engines.version if self.engines.lent is None else self.engines.lent

    async def run(self, request):
        if request.purpose == "train":
            return await super().run(request)
        before = self.weights()
        outcome = await super().run(request)
        self.seen.append((request.version, before, self.weights()))
        return EpisodeFailure(request.episode_id, "environment", "scripted") if self.broken else outcome

    async def lend(self, engine):
        self.engines.calls.append(("workers lend", engine))

    async def restore(self, engine):
        self.engines.calls.append(("workers restore", engine))


class Reporter(SilentObserver):
    def __init__(self):
        super().__init__()
        self.results, self.missed = [], []

    def evaluation(self, result):
        self.results.append(result)

    def evaluation_missed(self, name, version, why):
        self.missed.append((name, version, why))


def train(
    *,
    every,
    placement="hold",
    eval_s=2.0,
    broken=False,
    steps=6,
    at_start=False,
    at_end=False,
    on_result=None,
    publish_every=1,
    workers_class=Workers,
):
    """One run with its evaluations, as sao.train does it."""
    config = make_config(staleness=2, batch=2, steps=steps, every=publish_every)
    config.eval.every, config.eval.placement, config.eval.at_end = every, placement, at_end
    config.eval.temperatures, config.eval.samples, config.engine.replicas = [1.0, 0.0], 2, 2
    engines = LendableEngines()
    workers, learner, reporter = workers_class(engines, eval_s, broken), CountingLearner(config), Reporter()
    loop = TrainingLoop(config, CountingSource(), workers, learner, engines, reporter)

    async def main():
        async with asyncio.TaskGroup() as group:
            evaluations = Evaluations(config, loop, engines, workers, HELD_OUT, reporter, group)
            if at_start:
                await evaluations.begin("before")
            loop.after_publication = evaluations.published
            if on_result:
                reporter.evaluation = lambda result: (reporter.results.append(result), on_result(loop, evaluations))
            await loop.run()
            if at_end:
                await evaluations.finish("after")

    run(main())
    return loop, workers, engines, reporter, learner


def versions(reporter):
    return [(r.eval, r.version) for r in reporter.results if r.temperature == 1.0]


def test_every_second_version_is_evaluated_on_its_own_weights():
    _, workers, _, reporter, _ = train(every=2)
    assert versions(reporter) == [("during", 2), ("during", 4), ("during", 6)]
    assert all(pinned == before == after for pinned, before, after in workers.seen)
    assert [(r.temperature, r.k, r.n) for r in reporter.results[:2]] == [(1.0, 2, 6), (0.0, 1, 3)]
    assert reporter.missed == []


@pytest.mark.parametrize("placement", ["hold", "replica"])
def test_training_and_its_account_do_not_notice(placement):
    plain, *_, learner = train(every=0)
    loop, *_, reporter, evaluated = train(every=2, placement=placement, eval_s=0.5)
    assert len(versions(reporter)) == 3
    assert loop.ledger.audit() == plain.ledger.audit() and loop.ledger.audit()["closes"]
    ids = [[t.episode_id for t in batch] for batch in evaluated.batches]
    assert ids == [[t.episode_id for t in batch] for batch in learner.batches]
    assert max(evaluated.staleness) <= 2


def test_the_last_version_is_left_to_the_evaluation_after_training():
    assert versions(train(every=2, at_end=True)[3]) == [("during", 2), ("during", 4), ("after", 6)]


def test_the_evaluation_after_training_waits_for_the_lent_replica():
    """Six versions take about seven seconds, this evaluation of version 4 as long again."""
    _, workers, engines, reporter, _ = train(every=4, at_end=True, placement="replica", eval_s=4.0)
    assert versions(reporter) == [("during", 4), ("after", 6)]
    assert all(pinned == before == after for pinned, before, after in workers.seen)
    assert engines.lent is None


def test_a_resumed_run_does_not_evaluate_again_what_it_goes_on_from():
    config = make_config(staleness=2, batch=2, steps=4)
    config.eval.every = 2
    engines, reporter = LendableEngines(), Reporter()
    workers = Workers(engines, 0.5)
    loop = TrainingLoop(config, CountingSource(), workers, CountingLearner(config), engines, reporter)
    loop.version = 3

    async def main():
        async with asyncio.TaskGroup() as group:
            evaluations = Evaluations(config, loop, engines, workers, HELD_OUT, reporter, group)
            for version in (3, 4):
                loop.published_version = engines.version = version
                await evaluations.published(version)

    run(main())
    assert {r.version for r in reporter.results} == {4}


def test_a_multiple_that_falls_between_publications_is_caught_up():
    """Published versions are 3, 6 and 7: with every=2 the first two pass a multiple."""
    _, _, engines, reporter, _ = train(every=2, steps=7, publish_every=3)
    assert engines.history == [3, 6, 7]
    assert versions(reporter) == [("during", 3), ("during", 6)]


def test_an_evaluation_before_training_holds_the_first_publication():
    _, workers, _, reporter, _ = train(every=0, at_start=True)
    assert versions(reporter) == [("before", 0)]
    assert {pinned for pinned, _, _ in workers.seen} == {0} and all(a == b == 0 for _, a, b in workers.seen)


def test_a_run_that_is_stopping_begins_no_evaluation():
    def stop(loop, evaluations):
        loop._stopping = True

    *_, reporter, _ = train(every=1, on_result=stop)
    assert {r.version for r in reporter.results} == {1}


def test_an_evaluation_that_is_given_up_holds_nobody():
    def give_up(loop, evaluations):
        evaluations.stop()

    _, _, engines, reporter, _ = train(every=3, on_result=give_up)
    assert engines.history == [1, 2, 3, 4, 5, 6]
    assert [(r.version, r.temperature) for r in reporter.results] == [(3, 1.0), (6, 1.0)]
    assert reporter.missed == [("during", 3, "the run was stopped"), ("during", 6, "the run was stopped")]


def test_one_that_fails_is_reported_and_the_run_goes_on():
    _, _, engines, reporter, _ = train(every=3, broken=True)
    assert engines.history == [1, 2, 3, 4, 5, 6] and reporter.results == []
    assert [(name, version) for name, version, _ in reporter.missed] == [("during", 3), ("during", 6)]
    assert all("all 6 episodes failed" in why for _, _, why in reporter.missed)


def test_one_that_fails_before_training_ends_the_run():
    with pytest.raises(ExceptionGroup):
        train(every=0, at_start=True, broken=True)


def test_the_time_a_publication_was_held_is_told_apart():
    config = make_config(staleness=2, batch=2, steps=2)
    engines = FakeEngines(0.0)
    observer = SilentObserver()
    loop = TrainingLoop(config, CountingSource(), TimedWorkers(engines, lambda r: 0.0), CountingLearner(config, lambda s: 0.0), engines, observer)

    async def main():
        loop.hold(asyncio.create_task(asyncio.sleep(0.3)))
        await loop.run()

    asyncio.run(main())
    first, second = observer.rows
    assert 0.2 < first.held_s <= 0.5 and first.publish_s < 0.1 and second.held_s == 0.0


def test_a_lent_replica_holds_nobody_and_comes_back():
    _, workers, engines, reporter, _ = train(every=2, placement="replica", eval_s=0.5)
    assert versions(reporter) == [("during", 2), ("during", 4), ("during", 6)]
    assert all(pinned == before == after for pinned, before, after in workers.seen)
    assert engines.calls == [
        ("engines lend", "engine-1"), ("workers lend", "engine-1"), ("engines restore", "engine-1"), ("workers restore", "engine-1"),
    ] * 3  # fmt: skip
    assert engines.lent is None


@pytest.mark.parametrize("all_fail", [False, True])
def test_an_evaluation_that_loses_its_engine_is_missing_not_a_mean_of_what_was_left(all_fail):
    """At version 2 the lent engine dies under the evaluation: what it had not answered yet is refused elsewhere."""

    class Dying(Workers):
        async def run(self, request):
            outcome = await super().run(request)
            if request.purpose == "train" or request.version != 2 or not (all_fail or request.episode_id.ordinal > 2):
                return outcome
            self.engines.lent = None
            return EpisodeFailure(request.episode_id, "engine", "pinned")

    for first in (False, True):
        _, _, _, reporter, _ = train(every=2, placement="replica", eval_s=0.5, workers_class=Dying, at_start=first)
        assert ("during", 2) not in versions(reporter) and ("during", 4) in versions(reporter)
        assert [(name, version) for name, version, _ in reporter.missed] == [("during", 2)]
        assert not all_fail or "3 episodes" in reporter.missed[0][2] or "6 episodes" in reporter.missed[0][2]
        assert all_fail or "engine-1, which was lent to it, was lost, and 3 of its episodes failed" in reporter.missed[0][2]


def test_a_first_evaluation_that_loses_its_engine_does_not_end_the_run():
    class Dying(Workers):
        async def run(self, request):
            outcome = await super().run(request)
            if request.purpose == "train" or request.version:
                return outcome
            self.engines.lent = None
            return EpisodeFailure(request.episode_id, "engine", "pinned")

    loop, _, _, reporter, _ = train(every=0, placement="replica", at_start=True, workers_class=Dying)
    assert loop.complete and [(name, version) for name, version, _ in reporter.missed] == [("before", 0)]


def test_training_goes_on_beside_a_slow_replica_and_the_next_one_is_missed():
    _, workers, engines, reporter, _ = train(every=1, placement="replica", eval_s=2.0)
    assert engines.history == [1, 2, 3, 4, 5, 6]
    assert all(pinned == before == after for pinned, before, after in workers.seen)
    done, missed = [v for _, v in versions(reporter)], [v for _, v, _ in reporter.missed]
    assert sorted(done + missed) == [1, 2, 3, 4, 5, 6] and done[0] == 1 and 2 in missed
    assert all("still runs" in why for _, _, why in reporter.missed)


def test_the_only_engine_is_not_lent():
    class Alone(LendableEngines):
        live = ("engine-0",)

    config = make_config(staleness=2, batch=2, steps=2)
    config.eval.every, config.eval.placement = 1, "replica"
    engines, reporter = Alone(), Reporter()
    workers = Workers(engines, 0.5)
    loop = TrainingLoop(config, CountingSource(), workers, CountingLearner(config), engines, reporter)

    async def main():
        async with asyncio.TaskGroup() as group:
            loop.after_publication = Evaluations(config, loop, engines, workers, HELD_OUT, reporter, group).published
            await loop.run()

    run(main())
    assert engines.calls == [] and [why for _, _, why in reporter.missed] == ["no engine can be spared, only one is alive"] * 2
