"""Shadow evaluation and roll-back in the real loop, in virtual time, with faults injected into the learner's updates."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sao.config import OnlineConfig, PhaseConfig
from sao.environment import Task
from sao.errors import CheckpointFailure
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
from tests.unit.test_loop import make_config, told
from tests.virtual_time import run

HELD_OUT = [Task(f"held-{i}", "fake", {"index": i}, workload=name) for i in range(4) for name in ("default", "second")]
BATCH, TAU = 8, 2


class Learner(CountingLearner):
    """An update after one of the `poisoned` steps spoils the weights; they stay spoiled until the learner goes back."""

    def __init__(self, config, poisoned=(), learns=0.0):
        super().__init__(config)
        self.poisoned, self.learns, self.quality, self.went_back = set(poisoned), learns, 0.2 if learns else 0.9, []

    async def step(self, handles, step):
        report = await super().step(handles, step)
        self.quality = min(0.9, self.quality + self.learns)
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
        assert version > self.version or version == 0  # a resume gives the engines what they begin with
        self.version, self.quality, self.tried = version, weights["quality"], None
        self.served.append((version, weights["quality"]))
        self.lent.clear()
        return [PublishReport("engine-0", version, 0.0, 0.0, 0.0, 0, 0.0, 1)]

    async def lend(self, engine):
        self.lent.add(engine)

    async def still_lent(self, engine):
        return engine in self.lent

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
            if self.engines.tried is not None:
                version, quality = self.engines.tried
            assert version == request.version
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
        self.events, self.shadows, self.against, self.missed = [], [], [], []

    def event(self, text):
        self.events.append(text)

    def shadow(self, result, against, passed):
        self.shadows.append((result.version, passed))
        self.against.append(against)

    def evaluation_missed(self, name, version, why):
        self.missed.append((name, version))

    def evaluation(self, result): ...


class Checkpointer:
    def __init__(self):
        self.steps, self.last, self.counts = [], None, {"refused": 0, "rolled_back": 0}

    async def save(self, state, buffered, *, needed=False):
        self.steps.append(state["batches_done"])
        assert needed == (state["guard"]["counts"] != self.counts)  # exactly those that follow a roll-back
        self.counts = state["guard"]["counts"]
        self.last = json.loads(json.dumps(state))


def guarded(folder, config, workers, learner, engines, observer, checkpointer):
    """The loop after a whole run under a guard that keeps its states in `folder`."""
    loop = TrainingLoop(config, CountingSource(), workers, learner, engines, observer, checkpointer)
    guard = loop.guard = Guard(config.online, learner, loop.ledger, observer, HELD_OUT, Checkpoints(folder, keep=2))

    async def main():
        async with asyncio.TaskGroup() as group:
            guard.shadow = Evaluations(config, loop, engines, loop.workers, HELD_OUT, observer, group)
            await guard.begin(loop.version)
            await loop.run()

    run(main())
    return loop


def train(folder, *, poisoned=(), learns=0.0, phases=(), shadow=0.0, fall=0.0, steps=24, placement="hold", **workers):
    config = make_config(staleness=TAU, batch=BATCH, steps=steps)
    config.eval.placement, config.checkpoint.every = placement, 0
    config.online.shadow_drop, config.online.rollback_fall, config.online.rollback_window, config.online.shadow_tasks = shadow, fall, 2 * BATCH, 4
    config.online.phases = [PhaseConfig(name, BATCH * i) for i, name in enumerate(phases)]
    engines, learner, observer, checkpointer = Engines(), Learner(config, poisoned, learns), Observer(), Checkpointer()
    engines.quality = learner.quality
    loop = guarded(folder, config, Workers(engines, **workers), learner, engines, observer, checkpointer)
    audit = loop.ledger.audit()
    assert audit["closes"] and loop.ledger.outstanding == 0 and max(learner.staleness) <= TAU
    told(loop)
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
    assert audit["tokens"]["dropped"]["rolled_back"] == 2 * 3 * BATCH  # two tokens each
    lost = [loss for loss in loop.observer.losses if loss.reason == "rolled_back"]
    assert {loss.episode_id for loss in lost} == {t.episode_id for batch in loop.learner.batches[10:13] for t in batch} and len(lost) == 3 * BATCH
    assert "version 13 was refused and version 10 came back" in lost[0].message


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
    *_, observer, _ = train(tmp_path, shadow=0.3, drifts_at=BATCH * 10, phases=("default", "second"))
    assert all(passed for _, passed in observer.shadows)


@pytest.mark.parametrize("poisoned", [0, 9, 10, 11])
def test_the_first_version_and_the_first_of_a_phase_are_measured_too(tmp_path, poisoned):
    """The batch of step 10 or thereabouts is the first of another phase: the weights that serve are measured on it before."""
    *_, engines, observer, _ = train(tmp_path, poisoned={poisoned}, shadow=0.3, drifts_at=BATCH * 10, phases=("default", "second"))
    assert {quality for _, quality in engines.served} == {0.9}
    assert [version for version, passed in observer.shadows if not passed] == [poisoned + 1]


def test_without_a_stream_the_classes_of_a_batch_change_nothing(tmp_path):
    """A mixture has batches of mostly this and mostly that, by chance; its versions are all measured on the same tasks."""
    *_, engines, observer, _ = train(tmp_path, poisoned={10}, shadow=0.3, drifts_at=BATCH * 10)
    assert {quality for _, quality in engines.served} == {0.9} and sum(not passed for _, passed in observer.shadows) == 1


def test_after_a_refusal_the_weights_that_came_back_are_the_measure(tmp_path):
    """A policy that learns fast is far better than what comes back; measured against that mean, nothing would ever pass again."""
    _, learner, _, observer, _ = train(tmp_path, poisoned={8}, learns=0.1, shadow=0.3)
    assert learner.went_back == [9] and learner.quality == 0.9
    assert observer.against[8] == pytest.approx(0.9) and observer.against[9] == pytest.approx(0.7)  # the state of version 5 came back


def test_going_back_to_the_start_keeps_the_steps_of_the_critic_alone(tmp_path):
    """Kept again when they are done: a critic that is taken back to before them is never given them a second time."""
    config = make_config(staleness=TAU, batch=BATCH, steps=4, critic_only=3)
    config.online.shadow_drop, config.online.shadow_tasks = 0.3, 4
    engines, observer = Engines(), Observer()
    learner = Learner(config, poisoned={4})
    saved = []

    async def save(directory, buffered, original=learner.save):
        saved.append(len(learner.batches))
        await original(directory, buffered)

    learner.save = save
    loop = guarded(tmp_path, config, Workers(engines), learner, engines, observer, Checkpointer())
    assert saved == [0, 3] and learner.went_back == [2]
    assert loop.ledger.audit()["prompts"]["trained"] == 5 * BATCH  # three of the critic alone, and versions 3 and 4


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
    assert observer.missed == [("shadow", 0)] and [version for version, _ in observer.shadows] == [1, 2, 3, 4]


def test_a_mean_over_what_a_lost_engine_left_decides_nothing(tmp_path):
    """One of four episodes fails with its engine, which the pool replaces by one that is not lent: the evaluation is made again."""
    lost = []
    original = Workers.run

    async def run_or_lose(self, request):
        if request.purpose == "eval" and request.version == 3 and not lost:
            lost.append(request)
            self.engines.lent.discard("engine-1")
            return EpisodeFailure(request.episode_id, "engine", "scripted")
        return await original(self, request)

    Workers.run = run_or_lose
    try:
        *_, observer, _ = train(tmp_path, shadow=0.3, steps=4, placement="replica")
    finally:
        Workers.run = original
    assert observer.missed == [("shadow", 3)] and [version for version, _ in observer.shadows] == [1, 2, 3, 4]


def test_one_that_fails_twice_ends_the_run(tmp_path):
    with pytest.raises(ExceptionGroup) as caught:
        train(tmp_path, shadow=0.3, steps=4, broken=8)
    assert "all 4 episodes failed" in str(first_error(caught.value))


def test_a_guard_that_is_resumed_knows_what_it_knew(tmp_path):
    loop, learner, _, observer, checkpointer = train(tmp_path, poisoned={12}, shadow=0.3, fall=0.5)
    again = Guard(loop.config.online, learner, loop.ledger, observer, HELD_OUT, Checkpoints(tmp_path, keep=2))
    again.load_state_dict(checkpointer.last["guard"])
    assert again.state_dict() == loop.guard.state_dict() and again.metrics()["online/refused"] == 1.0


# ------------------------------------------------------------------ what a restart finds on the disk


def make_guard_at(folder, state=None):
    """A guard on reward alone with a window of two, over a learner that keeps what it is told."""
    online = OnlineConfig(rollback_fall=0.5, rollback_window=2)
    config = make_config(staleness=TAU, batch=BATCH)
    guard = Guard(online, Learner(config), Ledger(), Observer(), [], Checkpoints(folder, keep=2))
    if state is not None:
        guard.load_state_dict(json.loads(json.dumps(state)))
    run(guard.begin(0))
    return guard


def pass_on(guard, *versions):
    """These versions are made and pass; each then earns one reward."""
    for version in versions:
        assert run(guard.passes(version, None))
        guard.saw([make_trajectory(version, versions=(version, version)).meta()])


def kept(guard, name):
    path = guard.checkpoints.folder / name / "state.json"
    return json.loads(path.read_text())["version"] if path.exists() else None


def test_a_candidate_that_became_good_after_the_checkpoint_is_not_looked_for_again(tmp_path):
    """Taken up again it was missing, and the good state was removed to make room for it: the run could not go on any more."""
    guard = make_guard_at(tmp_path)
    pass_on(guard, 5)
    checkpoint = guard.state_dict()
    pass_on(guard, 6, 7)
    assert checkpoint["pending"] == 5 and kept(guard, "good") == 5 and kept(guard, "candidate") is None
    again = make_guard_at(tmp_path, checkpoint)
    pass_on(again, 6, 7, 8, 9)
    assert kept(again, "good") == 5 and kept(again, "candidate") is None
    pass_on(again, 10, 11, 12)
    assert kept(again, "good") == 10


def test_a_candidate_kept_after_the_checkpoint_does_not_take_the_proof_of_another(tmp_path):
    guard = make_guard_at(tmp_path)
    pass_on(guard, 5)
    checkpoint = guard.state_dict()
    pass_on(guard, 6, 7, 8, 9, 10)
    assert kept(guard, "good") == 5 and kept(guard, "candidate") == 10
    again = make_guard_at(tmp_path, checkpoint)
    pass_on(again, 6, 7, 8)
    assert kept(again, "good") == 5


@pytest.mark.parametrize("part", ["weights.json", "manifest.json", "state.json"])
def test_a_good_state_that_is_not_whole_is_kept_anew(tmp_path, part):
    guard = make_guard_at(tmp_path)
    (guard.good / part).unlink()
    again = make_guard_at(tmp_path)
    assert damage(again.good) is None and run(again.go_back(3)) is not None


def test_killed_while_the_candidate_takes_the_place_of_the_good_one(tmp_path, monkeypatch):
    guard = make_guard_at(tmp_path)
    pass_on(guard, 5)
    checkpoint = guard.state_dict()
    guard.saw([make_trajectory(9, versions=(5, 5)).meta()])
    original, calls = os.replace, []

    def killed(source, target):
        calls.append(target)
        if Path(target) == guard.good:
            raise KeyboardInterrupt
        original(source, target)

    monkeypatch.setattr("sao.online.guard.os.replace", killed)
    with pytest.raises(KeyboardInterrupt):
        guard._settle_candidate()
    monkeypatch.undo()
    assert kept(guard, "good") is None
    again = make_guard_at(tmp_path, checkpoint)
    assert kept(again, "good") == 5 and damage(again.good) is None


def test_a_disk_that_takes_no_more_leaves_the_good_state_and_the_run(tmp_path):
    guard = make_guard_at(tmp_path)

    async def save(directory, buffered):
        raise CheckpointFailure("the disk is full")

    guard.learner.save, original = save, guard.learner.save
    pass_on(guard, 5, 6, 7, 8)
    assert kept(guard, "good") == 0 and guard.state_dict()["pending"] is None and "disk is full" in guard.reporter.events[-1]
    guard.learner.save = original
    pass_on(guard, 9, 10, 11, 12)
    assert kept(guard, "good") == 10


def test_a_resume_knows_which_phase_it_is_in(tmp_path):
    guard = make_guard_at(tmp_path)
    guard.online.phases = [PhaseConfig("second")]
    guard.saw([make_trajectory(0, workload="second").meta()])
    assert make_guard_at(tmp_path / "other", guard.state_dict()).phase == "second"


class Killable:
    """What a run has on its disk beside the guard's states: the newest checkpoint and the batch of every step."""

    def __init__(self):
        self.checkpoint, self.batches = None, {}

    def sitting(self, folder, until, poisoned, **online):
        """One process's life, to the end or to a sudden death at `until` seconds."""
        config = make_config(staleness=TAU, batch=BATCH, steps=20, critic_only=2)
        config.checkpoint.every = 3
        config.online = OnlineConfig(rollback_window=2 * BATCH, shadow_tasks=4, **online)
        engines, learner, observer = Engines(), Learner(config, poisoned), Observer()
        step = learner.step

        async def stored(handles, at):
            self.batches[at] = handles
            return await step(handles, at)

        learner.step = stored
        loop = TrainingLoop(config, CountingSource(), Workers(engines), learner, engines, observer, self)
        guard = loop.guard = Guard(config.online, learner, loop.ledger, observer, HELD_OUT, Checkpoints(folder, keep=2))
        self.learner = learner
        if self.batches:
            state, buffered = loop.state_dict(), []
            if self.checkpoint is not None:
                state, buffered, learner.version, learner.quality = self.checkpoint
            replay, at = [], state["batches_done"]
            while at in self.batches:
                replay.append([Finished(t.meta(), t) for t in self.batches[at]])
                at += 1
            loop.load_state_dict(json.loads(json.dumps(state)), [Finished(t.meta(), t) for t in buffered], replay)

        async def main():
            async with asyncio.TaskGroup() as group:
                guard.shadow = Evaluations(config, loop, engines, loop.workers, HELD_OUT, observer, group)
                await guard.begin(loop.version)
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(loop.run(), until)

        run(main())
        return loop, engines

    async def save(self, state, buffered, *, needed=False):
        state, learner = json.loads(json.dumps(state)), (self.learner.version, self.learner.quality)
        await asyncio.sleep(0.05)
        self.checkpoint = (state, list(buffered), *learner)


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(deaths=st.lists(st.floats(0.3, 30.0), min_size=1, max_size=4), poisoned=st.integers(2, 15), fall=st.sampled_from([0.0, 0.5]))
def test_killed_at_any_moment_the_poison_never_serves_and_the_account_closes(tmp_path_factory, deaths, poisoned, fall):
    folder, disk = tmp_path_factory.mktemp("run"), Killable()
    for until in [*deaths, None]:
        loop, engines = disk.sitting(folder, until, {poisoned}, shadow_drop=0.3, rollback_fall=fall)
        assert {quality for _, quality in engines.served} <= {0.9}
        assert damage(folder / "checkpoints" / "good") is None
    audit = loop.ledger.audit()
    assert loop.complete and audit["closes"] and loop.ledger.outstanding == 0
    assert loop.guard.counts["refused"] == 1 and loop.learner.quality == 0.9
    assert audit["prompts"]["dropped"].keys() == {"rolled_back"}
    assert audit["prompts"]["trained"] + audit["prompts"]["dropped"]["rolled_back"] == 22 * BATCH


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


def train_one(ledger, ordinal, workload):
    trajectory = make_trajectory(EpisodeId(ordinal), task=f"task-{ordinal}", versions=(0, 0), workload=workload)
    ledger.submit(EpisodeId(ordinal), f"task-{ordinal}", "fake", workload, 0)
    ledger.finish(trajectory.meta())
    ledger.take([EpisodeId(ordinal)])
    ledger.settle([EpisodeId(ordinal)], awaits_publication=False)


def test_what_was_trained_since_is_undone_by_name():
    ledger = Ledger()
    ledger.undoable = []
    for ordinal, workload in enumerate("aab"):
        train_one(ledger, ordinal, workload)
    assert [entry.task_id for entry in ledger.undo(1, "rolled_back")] == ["task-1", "task-2"]
    audit = ledger.audit()
    assert audit["closes"] and audit["prompts"]["trained"] == 1 and audit["prompts"]["dropped"] == {"rolled_back": 2}
    assert audit["workloads"] == {"a": {"submitted": 2, "trained": 1}, "b": {"submitted": 1, "trained": 0}}
    assert {row["task"] for row in audit["dropped_by_task"]} == {"task-1", "task-2"}


def test_what_a_resume_may_yet_undo_is_in_the_ledgers_state():
    ledger, again = Ledger(), Ledger()
    ledger.undoable, again.undoable = [], []
    for ordinal in range(4):
        train_one(ledger, ordinal, "a")
    ledger.for_good(1)
    again.load_state_dict(json.loads(json.dumps(ledger.state_dict())))
    assert again.state_dict() == ledger.state_dict()
    assert [entry.episode_id for entry in again.undo(2, "rolled_back")] == [EpisodeId(2), EpisodeId(3)]
    assert again.undo(2, "rolled_back") == [] and again.audit()["closes"]
