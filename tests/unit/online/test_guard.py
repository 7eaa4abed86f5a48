"""Shadow evaluation and roll-back in the real loop, in virtual time, with faults injected into the learner's updates."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from sao.environment import Task
from sao.evals.schedule import Evaluations
from sao.inference.protocol import PublishReport
from sao.ledger import Ledger
from sao.loop import TrainingLoop
from sao.online.guard import FallWatch, Guard
from sao.rollout.episodes import EpisodeFailure
from sao.rollout.staleness import Finished
from sao.runtime.checkpoints import Checkpoints, damage
from sao.train import _first as first_error
from sao.trajectory import EpisodeId
from tests.fakes import CountingLearner, CountingSource, SilentObserver, make_trajectory
from tests.unit.test_loop import make_config
from tests.virtual_time import run

HELD_OUT = [Task(f"held-{i}", "fake", {"index": i}, workload=name) for i in range(4) for name in ("default", "second")]
BATCH, TAU = 8, 2


class Learner(CountingLearner):
    """An update after one of the `poisoned` steps spoils the weights; they stay spoiled until the learner goes back."""

    def __init__(self, config, poisoned=()):
        super().__init__(config)
        self.poisoned, self.quality, self.went_back = set(poisoned), 0.9, []

    async def step(self, handles, step):
        report = await super().step(handles, step)
        if step in self.poisoned:
            self.quality = 0.1
        return report

    async def gather(self):
        return {"version": self.version, "quality": self.quality}

    async def save(self, directory, buffered):
        (Path(directory) / "weights.json").write_text(json.dumps({"quality": self.quality}))

    async def go_back(self, directory, version):
        self.quality = json.loads((Path(directory) / "weights.json").read_text())["quality"]
        self.version = version
        self.went_back.append(version)


class Engines:
    """Two engines: what serves, what is tried on, and a record of both."""

    live = ("engine-0", "engine-1")

    def __init__(self):
        self.version, self.quality, self.tried = 0, 0.9, None
        self.served, self.lent, self.calls = [], set(), []

    async def publish(self, weights, version):
        await asyncio.sleep(0.1)
        assert version > self.version
        self.version, self.quality, self.tried = version, weights["quality"], None
        self.served.append((version, weights["quality"]))
        self.lent.clear()
        return [PublishReport("engine-0", version, 0.0, 0.0, 0.0, 0, 0.0, 1)]

    async def lend(self, engine):
        self.lent.add(engine)

    async def try_on(self, engine, weights, version):
        assert engine in self.lent
        self.tried = (version, weights["quality"])


class Workers:
    """A reward is the quality of the weights that serve (or are tried on, for evaluation), 0 where another thing is rewarded than they do."""

    def __init__(self, engines, broken=0, drifts_at=None):
        self.engines, self.broken, self.drifts_at, self.lent = engines, broken, drifts_at, set()

    async def run(self, request):
        version, quality = self.engines.version, self.engines.quality
        if request.purpose == "eval":
            await asyncio.sleep(0.2)
            if self.broken > 0:
                self.broken -= 1
                return EpisodeFailure(request.episode_id, "environment", "scripted")
            assert self.engines.tried is not None and self.engines.tried[0] == request.version
            quality = self.engines.tried[1]
        else:
            await asyncio.sleep(0.3)
        drifted = self.drifts_at is not None and request.purpose == "train" and request.task.payload["index"] >= self.drifts_at
        workload = "second" if drifted else request.task.workload
        trajectory = make_trajectory(
            request.episode_id, task=request.task.task_id, workload=workload, versions=(version, self.engines.version), admitted=request.version,
            reward=0.0 if drifted else quality,
        )  # fmt: skip
        return Finished(trajectory.meta(), trajectory)

    async def lend(self, engine):
        self.lent.add(engine)

    async def restore(self, engine):
        self.lent.discard(engine)


class Observer(SilentObserver):
    def __init__(self):
        super().__init__()
        self.events, self.shadows, self.missed = [], [], []

    def event(self, text):
        self.events.append(text)

    def shadow(self, result, against, passed):
        self.shadows.append((result.version, passed))

    def evaluation_missed(self, name, version, why):
        self.missed.append((name, version))

    def evaluation(self, result): ...


class Checkpointer:
    def __init__(self):
        self.steps, self.last = [], None

    async def save(self, state, buffered):
        self.steps.append(state["batches_done"])
        self.last = json.loads(json.dumps(state))


def train(folder, *, poisoned=(), shadow=0.0, fall=0.0, steps=24, placement="hold", **workers):
    config = make_config(staleness=TAU, batch=BATCH, steps=steps)
    config.eval.placement, config.checkpoint.every = placement, 0
    config.online.shadow_drop, config.online.rollback_fall, config.online.rollback_window, config.online.shadow_tasks = shadow, fall, 2 * BATCH, 4
    engines, learner, observer, checkpointer = Engines(), Learner(config, poisoned), Observer(), Checkpointer()
    loop = TrainingLoop(config, CountingSource(), Workers(engines, **workers), learner, engines, observer, checkpointer)
    guard = loop.guard = Guard(config.online, learner, loop.ledger, observer, HELD_OUT, Checkpoints(folder, keep=2))

    async def main():
        async with asyncio.TaskGroup() as group:
            guard.shadow = Evaluations(config, loop, engines, loop.workers, HELD_OUT, observer, group)
            await guard.begin(loop.version)
            await loop.run()

    run(main())
    audit = loop.ledger.audit()
    assert audit["closes"] and loop.ledger.outstanding == 0 and max(learner.staleness) <= TAU
    assert loop.version == steps and not loop.workers.lent
    return loop, learner, engines, observer, checkpointer


def test_a_poisoned_update_never_serves(tmp_path):
    loop, learner, engines, observer, checkpointer = train(tmp_path, poisoned={12}, shadow=0.3)
    assert [version for version, _ in engines.served] == list(range(1, 25))  # versions go on one by one
    assert {quality for _, quality in engines.served} == {0.9}
    assert learner.went_back == [13] and observer.shadows[12] == (13, False) and sum(not passed for _, passed in observer.shadows) == 1
    assert loop.guard.metrics()["online/refused"] == 1.0 and loop.guard.metrics()["online/rolled_back"] == 0.0
    assert damage(tmp_path / "checkpoints/good") is None  # `sao eval checkpoint=good` takes it
    assert 13 in checkpointer.steps  # nothing trains again what was undone


def test_what_a_roll_back_undid_is_dropped_by_name(tmp_path):
    """States are kept every five versions: those of version 10 come back, and the batches of versions 11 to 13 are undone."""
    loop, *_ = train(tmp_path, poisoned={12}, shadow=0.3)
    audit = loop.ledger.audit()
    assert audit["prompts"]["dropped"] == {"rolled_back": 3 * BATCH} and audit["prompts"]["trained"] == 21 * BATCH
    assert audit["tokens"]["dropped"]["rolled_back"] > 0


def test_without_a_guard_the_poison_serves(tmp_path):
    """The control: the fault is one that shadow evaluation has something to find in."""
    _, _, engines, _, _ = train(tmp_path, poisoned={12})
    assert {quality for version, quality in engines.served if version > 12} == {0.1}


def test_reward_that_falls_brings_the_last_good_version_back(tmp_path):
    loop, learner, engines, observer, checkpointer = train(tmp_path, poisoned={12}, fall=0.5)
    bad = [version for version, quality in engines.served if quality < 0.5]
    assert bad and bad[0] == 13 and bad[-1] < 20 and engines.served[-1] == (24, 0.9)
    assert len(learner.went_back) == 1 and loop.guard.metrics()["online/rolled_back"] == 1.0
    assert any("reward fell" in text for text in observer.events)
    assert loop.ledger.audit()["prompts"]["dropped"]["rolled_back"] >= (bad[-1] - 12) * BATCH
    assert learner.went_back[0] in checkpointer.steps


def test_a_state_kept_after_the_poison_is_not_the_one_to_go_back_to(tmp_path):
    """The update that is kept at version 15 is the poisoned one: it never proves itself."""
    _, learner, engines, _, _ = train(tmp_path, poisoned={14}, fall=0.5)
    assert len(learner.went_back) == 1 and engines.served[-1][1] == 0.9


def test_a_change_of_the_task_makes_reward_fall_too_and_going_back_does_not_help(tmp_path):
    """One roll-back, then the new level is what counts: the run does not go back for ever."""
    _, learner, engines, _, _ = train(tmp_path, fall=0.5, steps=40, drifts_at=BATCH * 15)
    assert len(learner.went_back) == 1 and {quality for _, quality in engines.served} == {0.9}


def test_a_change_of_phase_is_no_reason_to_refuse(tmp_path):
    *_, observer, _ = train(tmp_path, shadow=0.3, drifts_at=BATCH * 10)
    assert all(passed for _, passed in observer.shadows)


def test_one_engine_is_borrowed_with_placement_replica_and_all_with_hold(tmp_path):
    for placement, borrowed in (("replica", {"engine-1"}), ("hold", {"engine-0", "engine-1"})):
        seen = set()
        original = Engines.try_on

        async def spy(self, engine, weights, version, seen=seen, original=original):
            seen.add(engine)
            await original(self, engine, weights, version)

        Engines.try_on = spy
        try:
            train(tmp_path / placement, shadow=0.3, steps=4, placement=placement)
        finally:
            Engines.try_on = original
        assert seen == borrowed


def test_an_evaluation_that_fails_is_tried_once_more(tmp_path):
    *_, observer, _ = train(tmp_path, shadow=0.3, steps=4, broken=4)
    assert observer.missed == [("shadow", 1)] and [version for version, _ in observer.shadows] == [1, 2, 3, 4]


def test_one_that_fails_twice_ends_the_run(tmp_path):
    with pytest.raises(ExceptionGroup) as caught:
        train(tmp_path, shadow=0.3, steps=4, broken=8)
    assert "all 4 episodes failed" in str(first_error(caught.value))


def test_a_guard_that_is_resumed_knows_what_it_knew(tmp_path):
    loop, learner, _, observer, checkpointer = train(tmp_path, poisoned={12}, shadow=0.3, fall=0.5)
    again = Guard(loop.config.online, learner, loop.ledger, observer, HELD_OUT, Checkpoints(tmp_path, keep=2))
    again.load_state_dict(checkpointer.last["guard"])
    assert again.state_dict() == loop.guard.state_dict() and again.metrics()["online/refused"] == 1.0


# ------------------------------------------------------------------ the watch, and the ledger's part


def test_a_watch_says_nothing_before_its_window_is_full():
    watch = FallWatch(4, 0.5)
    watch.see([1, 1, 1])
    assert watch.mean is None and not watch.fallen
    watch.see([1, 0])
    assert watch.best == 0.75 and not watch.fallen  # the window was first full with a 0 in it


def test_a_watch_measures_against_its_best():
    watch = FallWatch(2, 0.5)
    for reward in (0.2, 0.2, 1, 1, 0.6, 0.6):
        watch.see([reward])
    assert watch.best == 1.0 and not watch.fallen
    watch.see([0.4])
    assert watch.mean == 0.5 and watch.fallen
    watch.reset()
    assert not watch.fallen and watch.best is None


def test_a_watch_of_0_is_off():
    watch = FallWatch(1, 0.0)
    watch.see([1.0])
    watch.see([-1.0])
    assert not watch.fallen


def test_a_mark_is_what_undo_goes_back_to():
    ledger = Ledger()

    def train_one(ordinal, workload):
        trajectory = make_trajectory(EpisodeId(ordinal), versions=(0, 0), workload=workload)
        ledger.submit(EpisodeId(ordinal), "t", "fake", workload, 0)
        ledger.finish(trajectory.meta())
        ledger.take([EpisodeId(ordinal)])
        ledger.settle([EpisodeId(ordinal)], awaits_publication=False)

    train_one(0, "a")
    mark = json.loads(json.dumps(ledger.mark()))
    train_one(1, "a")
    train_one(2, "b")
    ledger.undo(mark, "rolled_back")
    audit = ledger.audit()
    assert audit["closes"] and audit["prompts"]["trained"] == 1 and audit["prompts"]["dropped"] == {"rolled_back": 2}
    assert audit["workloads"] == {"a": {"submitted": 2, "trained": 1}, "b": {"submitted": 1, "trained": 0}}
