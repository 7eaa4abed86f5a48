"""A run that is cut off at any moment and goes on from its newest checkpoint and the stored batches, in virtual time."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import random
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from sao.learner.protocol import StepReport
from sao.ledger import Ledger
from sao.loop import TrainingLoop
from sao.rollout.staleness import Finished
from tests.fakes import CountingSource, FakeEngines, SilentObserver, TimedWorkers
from tests.unit.test_loop import make_config
from tests.virtual_time import run


class DigestLearner:
    """Its weights are a digest of everything it was trained on, in order."""

    def __init__(self, actor_from: int, step_s) -> None:
        self.actor_from, self.step_s = actor_from, step_s
        self.version, self.weights = 0, ""
        self.stored: dict[int, list[Any]] = {}
        self.at: dict[int, str] = {}
        self.staleness: list[int] = []

    async def step(self, handles, step: int) -> StepReport:
        await asyncio.sleep(self.step_s(step))
        text = [self.weights] + [f"{t.episode_id}{t.task_id}{t.segments[0].versions.tolist()}" for t in handles]
        self.staleness += [self.version - t.oldest_version for t in handles]
        self.weights = hashlib.sha256("".join(text).encode()).hexdigest()
        self.version += step >= self.actor_from
        self.stored[step], self.at[step] = list(handles), self.weights
        return StepReport(step, self.version, {})

    async def gather(self) -> Any:
        return "weights"


@dataclass
class Disk:
    """What survives: the newest checkpoint, and the batches of the learner's steps."""

    learner: DigestLearner
    checkpoint: dict[str, Any] | None = None
    saved: int = 0
    slow: float = 0.0
    history: list[int] = field(default_factory=list)

    async def save(self, state, buffered, *, needed=False) -> None:
        text, learner = json.dumps(state), (self.learner.version, self.learner.weights)
        await asyncio.sleep(self.slow)
        self.checkpoint = {"state": json.loads(text), "buffered": list(buffered), "learner": learner}
        self.history.append(state["batches_done"])


def sitting(config, disk: Disk | None, step_s, latency, fails, until: float | None, source=None, workers=TimedWorkers):
    """One process's life: from nothing or from the disk, to the end or to a sudden death at `until` seconds."""
    actor_from = config.critic.critic_only_steps
    learner = DigestLearner(actor_from, step_s)
    engines = FakeEngines(0.1)
    new_disk = Disk(learner, disk.checkpoint if disk else None, slow=0.05)
    source = source or CountingSource(("fast", "slow"))
    loop = TrainingLoop(config, source, workers(engines, latency, fails), learner, engines, SilentObserver(), checkpointer=new_disk)
    if disk is not None:
        state, buffered = loop.state_dict(), []
        if disk.checkpoint is not None:
            state, buffered = disk.checkpoint["state"], disk.checkpoint["buffered"]
            learner.version, learner.weights = disk.checkpoint["learner"]
        stored = disk.learner.stored
        replay, step = [], state["batches_done"]
        while step in stored:
            replay.append([Finished(t.meta(), t) for t in stored[step]])
            step += 1
        learner.stored = {s: batch for s, batch in stored.items() if s < state["batches_done"]}
        learner.at = {s: digest for s, digest in disk.learner.at.items() if s < state["batches_done"]}
        loop.load_state_dict(state, [Finished(t.meta(), t) for t in buffered], replay)

    async def live() -> None:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(loop.run(), until)

    run(live())
    return loop, learner, new_disk


@settings(max_examples=60)
@given(
    staleness=st.sampled_from([0, 1, 4]),
    batch=st.integers(1, 5),
    critic_only=st.integers(0, 2),
    every=st.integers(0, 4),
    failure=st.sampled_from([0.0, 0.2]),
    deaths=st.lists(st.floats(0.5, 12.0), max_size=4),
    group=st.sampled_from([1, 1, 3]),
    seed=st.integers(0, 2**16),
)
@example(
    staleness=4, batch=5, critic_only=0, every=0, failure=0.2, deaths=[3.0, 1.0, 10.0], group=1, seed=0
)  # a dropped episode came back beside its replacement
def test_any_number_of_sudden_deaths_leaves_one_closed_account(staleness, batch, critic_only, every, failure, deaths, group, seed):
    batch *= group
    config = make_config(staleness=staleness, batch=batch, critic_only=critic_only, steps=6, group=group)
    config.checkpoint.every = every
    rng = random.Random(seed)
    draws = (
        lambda step: rng.uniform(0.1, 2.0),
        lambda request: rng.lognormvariate(0, 0.8),
        lambda request: rng.random() < failure,
    )
    disk = None
    for until in [*deaths, None]:
        before = disk
        loop, learner, disk = sitting(config, before, *draws, until)
        if before is not None:
            for step, digest in before.learner.at.items():
                assert step not in learner.at or learner.at[step] == digest, "a replayed step gave other weights"
    assert loop.complete
    assert max(learner.staleness, default=0) <= staleness
    audit = loop.ledger.audit()
    assert audit["closes"] and loop.ledger.outstanding == 0
    trained = Counter(t.episode_id.ordinal for step in learner.stored.values() for t in step)
    assert trained and max(trained.values()) == 1
    assert len(trained) == audit["prompts"]["trained"] == loop.total_batches * batch
    assert len(trained) + sum(audit["prompts"]["dropped"].values()) == audit["prompts"]["submitted"]
    for step in learner.stored.values():
        assert set(Counter(t.episode_id.ordinal // group for t in step).values()) == {group}


@settings(max_examples=30)
@given(
    every=st.integers(0, 3),
    deaths=st.lists(st.floats(0.5, 10.0), min_size=1, max_size=4),
    group=st.sampled_from([1, 3]),
    seed=st.integers(0, 2**16),
)
def test_at_bound_zero_a_resumed_run_has_the_weights_of_an_undisturbed_one(every, deaths, group, seed):
    config = make_config(staleness=0, batch=3, critic_only=1, steps=6, group=group)
    config.checkpoint.every = every
    rng = random.Random(seed)
    draws = (lambda step: rng.uniform(0.1, 2.0), lambda request: rng.uniform(0.2, 2.0), lambda request: False)
    _, undisturbed, _ = sitting(config, None, *draws, None)
    disk = None
    for until in [*deaths, None]:
        _, learner, disk = sitting(config, disk, *draws, until)
    assert learner.weights == undisturbed.weights


def test_no_more_than_the_bound_is_in_flight_after_a_resume():
    """C34: the capacity is counted from what is in flight, not from a version that jumped."""
    config = make_config(staleness=2, batch=4, steps=10)
    config.checkpoint.every = 2
    steady = (lambda step: 1.0, lambda request: 1.5, lambda request: False)
    _, _, disk = sitting(config, None, *steady, 6.0)
    assert disk.history
    engines = FakeEngines(0.1)
    workers = TimedWorkers(engines, lambda request: 1.5)
    learner = DigestLearner(0, lambda step: 1.0)
    learner.version = disk.checkpoint["learner"][0]
    loop = TrainingLoop(config, CountingSource(("fast", "slow")), workers, learner, engines, SilentObserver())
    loop.load_state_dict(disk.checkpoint["state"], [Finished(t.meta(), t) for t in disk.checkpoint["buffered"]])
    run(loop.run())
    assert workers.most <= (2 + 1) * 4


def test_stop_ends_after_the_step_with_a_checkpoint_and_the_rest_can_be_resumed():
    config = make_config(staleness=1, batch=4, steps=10)
    config.checkpoint.every = 0
    learner, engines = DigestLearner(0, lambda step: 1.0), FakeEngines(0.1)
    disk = Disk(learner)
    loop = TrainingLoop(config, CountingSource(), TimedWorkers(engines, lambda request: 2.0), learner, engines, SilentObserver(), checkpointer=disk)

    async def stopped() -> None:
        running = asyncio.create_task(loop.run())
        await asyncio.sleep(7.0)
        loop.stop()
        await running

    run(stopped())
    assert 0 < loop.batches_done < 10 and disk.history == [loop.batches_done]
    assert loop.ledger.audit()["closes"]
    resumed, _, _ = sitting(config, disk, lambda step: 1.0, lambda request: 2.0, lambda request: False, None)
    assert resumed.complete and resumed.ledger.audit()["closes"]


def test_a_ledger_reads_back_equal():
    ledger = Ledger()
    from sao.trajectory import EpisodeId

    for ordinal in range(4):
        ledger.submit(EpisodeId(ordinal), f"task-{ordinal}", "fake", "slow", ordinal)
    ledger.retry(EpisodeId(1), "environment", 3, 5)
    ledger.drop(EpisodeId(2), "worker", 7)
    again = Ledger()
    again.load_state_dict(json.loads(json.dumps(ledger.state_dict())))
    assert again.audit() == ledger.audit() and again.entries == ledger.entries
    with pytest.raises(Exception, match="not in flight"):
        again.drop(EpisodeId(2), "again")
