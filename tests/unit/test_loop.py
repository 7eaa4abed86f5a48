"""The real loop under schedules made by hypothesis, in virtual time."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sao.config import Config
from sao.errors import EnvironmentFailure
from sao.loop import TrainingLoop
from sao.rollout.staleness import Buffer, Finished
from tests.fakes import CountingLearner, CountingSource, FakeEngines, SilentObserver, TimedWorkers, make_trajectory
from tests.virtual_time import Deadlock, run


def make_config(
    *, staleness: int, batch: int = 4, steps: int = 8, critic_only: int = 0, overdue: str = "wait", retries: int = 1, every: int = 1, group: int = 1
) -> Config:
    config = Config()
    config.rollout.rollouts_per_prompt = group
    config.train.batch_size, config.train.steps = batch, steps
    config.critic.critic_only_steps = critic_only
    config.rollout.staleness, config.rollout.overdue, config.rollout.retries = staleness, overdue, retries
    config.weights.publish_every = every
    return config


def drive(
    config: Config,
    classes=("fast", "slow"),
    latency=lambda request: 1.0,
    fails=lambda request: False,
    limit=float("inf"),
    step_s=lambda step: 1.0,
    publish_s=0.1,
    reason="environment",
):
    engines = FakeEngines(publish_s)
    workers = TimedWorkers(engines, latency, fails, limit, reason)
    learner = CountingLearner(config, step_s)
    loop = TrainingLoop(config, CountingSource(classes), workers, learner, engines, SilentObserver())
    run(loop.run())
    told(loop)
    return loop, learner, workers, engines


def told(loop: TrainingLoop) -> None:
    """The observer heard of every loss that the ledger counts, and of no other."""
    losses, ledger = loop.observer.losses, loop.ledger
    tokens: Counter[str] = Counter()
    for loss in losses:
        tokens[loss.reason] += loss.tokens
        assert loss.message and loss.task_id and loss.environment == "fake"
    assert Counter(loss.reason for loss in losses if not loss.retried) == ledger.dropped
    assert Counter(loss.reason for loss in losses if loss.retried) == ledger.retried
    assert tokens == ledger.dropped_tokens


@settings(max_examples=60)
@given(
    staleness=st.sampled_from([0, 1, 4, 8]),
    batch=st.integers(1, 6),
    critic_only=st.integers(0, 3),
    sigma=st.floats(0.1, 2.0),
    slow=st.floats(1.0, 30.0),
    failure=st.floats(0.0, 0.4),
    limit=st.sampled_from([3.0, 20.0, float("inf")]),
    every=st.integers(1, 3),
    group=st.sampled_from([1, 1, 2, 4]),
    seed=st.integers(0, 2**16),
)
def test_bound_holds_and_nothing_is_dropped_for_age(staleness, batch, critic_only, sigma, slow, failure, limit, every, group, seed):
    batch *= group
    config = make_config(staleness=staleness, batch=batch, critic_only=critic_only, every=min(every, staleness + 1), group=group)
    rng = random.Random(seed)
    loop, learner, workers, _ = drive(
        config,
        latency=lambda request: rng.lognormvariate(0, sigma) * (slow if request.task.workload == "slow" else 1.0),
        fails=lambda request: rng.random() < failure,
        limit=limit,
        step_s=lambda step: rng.uniform(0.1, 3.0),
    )
    assert max(learner.staleness) <= staleness
    assert loop.ledger.dropped["overdue"] == 0
    assert workers.most <= (staleness + 1) * batch
    audit = loop.ledger.audit()
    assert audit["closes"]
    assert loop.ledger.outstanding == 0
    dropped = {name: 0 for name in audit["workloads"]}
    for (_, task), count in loop.ledger.dropped_by_task.items():  # the audit names the 50 commonest alone
        dropped["fast" if int(task.split("-")[1]) % 2 == 0 else "slow"] += count
    for name, share in audit["workloads"].items():
        assert share["submitted"] == share["trained"] + dropped[name]
    trained = [t.episode_id.ordinal for b in learner.batches for t in b]
    assert len(trained) == len(set(trained)) == loop.total_batches * batch
    assert all(b == sorted(b, key=lambda t: t.episode_id.ordinal) for b in learner.batches)
    for trained_together in learner.batches:
        members = Counter(t.episode_id.ordinal // group for t in trained_together)
        assert set(members.values()) == {group}, "a batch holds whole groups"
        assert len({(t.episode_id.ordinal // group, t.task_id) for t in trained_together}) == len(members), "a group has one task"


def test_the_batch_order_rule_is_what_holds_the_bound(monkeypatch):
    """The guard removed: without rule 2 a slow episode is trained beyond the bound."""
    monkeypatch.setattr("sao.rollout.staleness.may_start", lambda *args, **kwargs: True)
    config = make_config(staleness=1, batch=2, steps=12)
    _, learner, _, _ = drive(config, latency=lambda request: 9.0 if request.task.task_id == "task-0" else 0.1)
    assert max(learner.staleness) > 1


def test_the_admission_rule_is_what_keeps_the_loop_alive(monkeypatch):
    monkeypatch.setattr("sao.loop.may_admit", lambda *args, **kwargs: True)
    """The guard removed: more episodes start than the steps within the bound can train, so no step may ever start."""
    with pytest.raises(Deadlock):
        drive(make_config(staleness=1, batch=2, steps=12))


@pytest.mark.parametrize("most", [1, 3])
def test_no_more_episodes_run_than_asked(most):
    config = make_config(staleness=2, batch=4, steps=5)
    config.rollout.max_running = most
    loop, _, workers, _ = drive(config)
    assert workers.most == most and loop.complete


def test_bound_zero_is_synchronous():
    config = make_config(staleness=0, batch=3, steps=5)
    _, learner, _, engines = drive(config, latency=lambda request: 1.0 + request.episode_id.ordinal % 3)
    assert engines.history == [1, 2, 3, 4, 5]
    assert [[t.episode_id.ordinal for t in b] for b in learner.batches] == [[3 * i, 3 * i + 1, 3 * i + 2] for i in range(5)]
    assert all(t.oldest_version == t.newest_version == i for i, b in enumerate(learner.batches) for t in b)


def test_critic_only_steps_do_not_move_the_version():
    config = make_config(staleness=2, batch=2, steps=3, critic_only=4)
    loop, learner, _, engines = drive(config)
    assert len(learner.batches) == 7
    assert engines.history == [1, 2, 3]
    assert loop.version == 3


def test_overdue_drop_counts_by_task():
    config = make_config(staleness=1, batch=2, steps=10, overdue="drop")
    loop, learner, _, _ = drive(config, latency=lambda request: 8.0 if request.task.workload == "slow" else 0.1)
    assert max(learner.staleness) <= 1
    assert loop.ledger.dropped["overdue"] > 0
    assert all(loss.handle.episode_id == loss.episode_id for loss in loop.observer.losses), "what finished can be looked at"
    assert all(entry["reason"] == "overdue" for entry in loop.ledger.audit()["dropped_by_task"])
    assert loop.ledger.audit()["closes"]


def test_a_failed_episode_is_retried_once_and_its_tokens_are_counted():
    config = make_config(staleness=1, batch=2, steps=4)
    loop, _, _, _ = drive(config, fails=lambda request: request.episode_id.ordinal == 3 and request.episode_id.attempt == 0)
    audit = loop.ledger.audit()
    assert audit["prompts"]["retried"] == {"environment": 1}
    assert audit["prompts"]["dropped"] == {}
    assert audit["tokens"]["dropped"] == {"environment": 3}
    assert audit["closes"]


def test_a_prompt_that_is_too_long_is_not_tried_again():
    config = make_config(staleness=1, batch=2, steps=4, retries=3)
    loop, _, _, _ = drive(config, fails=lambda request: request.episode_id.ordinal == 3, reason="prompt_too_long")
    audit = loop.ledger.audit()
    assert audit["prompts"]["retried"] == {}
    assert audit["prompts"]["dropped"] == {"prompt_too_long": 1}
    assert audit["closes"]


def test_endless_failure_ends_the_run_with_its_cause():
    config = make_config(staleness=1, batch=2, steps=4)
    with pytest.raises(BaseExceptionGroup) as caught:
        drive(config, fails=lambda request: True)
    failure = caught.value.subgroup(EnvironmentFailure)
    assert failure is not None and "scripted failure" in str(failure.exceptions[0])


def test_a_raising_learner_ends_the_run():
    config = make_config(staleness=1, batch=2, steps=4)

    class Broken(CountingLearner):
        async def step(self, handles, step):
            raise RuntimeError("boom")

    engines = FakeEngines()
    loop = TrainingLoop(config, CountingSource(), TimedWorkers(engines, lambda request: 0.1), Broken(config), engines, SilentObserver())
    with pytest.raises(BaseExceptionGroup) as caught:
        run(loop.run())
    assert caught.value.subgroup(RuntimeError) is not None


def test_a_publication_waits_for_what_holds_it():
    """An evaluation pinned to the published weights keeps them, and episodes and steps go on meanwhile."""
    config = make_config(staleness=2, batch=2, steps=4)
    engines = FakeEngines()
    learner = CountingLearner(config)
    loop = TrainingLoop(config, CountingSource(), TimedWorkers(engines, lambda request: 0.1), learner, engines, SilentObserver())
    seen = []

    async def evaluation():
        await asyncio.sleep(30.0)
        seen.append((engines.version, len(learner.batches)))

    async def main():
        loop.hold(asyncio.create_task(evaluation()))
        await loop.run()

    run(main())
    assert seen == [(0, 1)] and engines.history == [1, 2, 3, 4]


def test_a_group_waits_for_its_slowest_member_and_batches_take_complete_groups():
    config = make_config(staleness=1, batch=2, steps=3, group=2)
    _, learner, _, _ = drive(config, latency=lambda request: 5.0 if request.episode_id.ordinal == 1 else 0.1)
    assert [t.episode_id.ordinal for t in learner.batches[0]] == [2, 3]
    assert sorted(t.episode_id.ordinal for b in learner.batches for t in b) == list(range(6))


def test_a_group_that_loses_a_member_is_dropped_whole_and_counted():
    """Episode 5 fails for good: 4 was finished and goes at once, 6 and 7 still run and go when they finish; another group takes their place."""
    config = make_config(staleness=1, batch=4, steps=3, group=4, retries=0)
    latency = {4: 0.1, 5: 0.5, 6: 2.0, 7: 3.0}
    loop, learner, _, _ = drive(
        config, latency=lambda request: latency.get(request.episode_id.ordinal, 1.0), fails=lambda request: request.episode_id.ordinal == 5
    )
    audit = loop.ledger.audit()
    assert audit["prompts"]["dropped"] == {"environment": 1, "group_environment": 3} and audit["closes"]
    assert sorted(t.episode_id.ordinal // 4 for b in learner.batches for t in b) == [0] * 4 + [2] * 4 + [3] * 4
    assert not loop._lost_groups


def test_a_retried_member_keeps_its_group():
    config = make_config(staleness=2, batch=4, steps=4, group=4)
    loop, learner, _, _ = drive(config, fails=lambda request: request.episode_id == (5, 0))
    audit = loop.ledger.audit()
    assert audit["prompts"]["retried"] == {"environment": 1} and not audit["prompts"]["dropped"]
    assert any(t.episode_id == (5, 1) for b in learner.batches for t in b)


def test_an_overdue_group_goes_whole():
    config = make_config(staleness=1, batch=4, steps=8, overdue="drop", group=2)
    loop, learner, _, _ = drive(config, latency=lambda request: 8.0 if request.episode_id.ordinal % 8 == 0 else 0.1)
    dropped = loop.ledger.dropped
    assert max(learner.staleness) <= 1 and loop.ledger.audit()["closes"]
    assert dropped["overdue"] > 0 and dropped.total() % 2 == 0 and set(dropped) <= {"overdue", "group_overdue"}


def test_a_mate_of_an_overdue_episode_is_not_called_overdue():
    """Episode 0 of version 0 and its mate of version 3 at version 4, bound 2: one is too old, and the other is lost with it."""
    config = make_config(staleness=2, batch=2, steps=1, overdue="drop", group=2)
    engines = FakeEngines()
    loop = TrainingLoop(config, CountingSource(), TimedWorkers(engines, lambda request: 0.1), CountingLearner(config), engines, SilentObserver())
    for request, version in zip(loop._submit(), (0, 3), strict=True):
        loop._accept(Finished(make_trajectory(request.episode_id.ordinal, versions=(version, version)).meta(), None))
    loop.version = 4

    async def next_batch():
        task = asyncio.create_task(loop._next_batch(advance=True))
        await asyncio.sleep(0.01)
        task.cancel()

    run(next_batch())
    assert loop.ledger.dropped == {"overdue": 1, "group_overdue": 1} and not loop.buffer.items
    told(loop)


@pytest.mark.parametrize("most", [2, 5])
def test_the_cap_on_running_episodes_counts_whole_groups(most):
    config = make_config(staleness=2, batch=4, steps=5, group=2)
    config.rollout.max_running = most
    loop, _, workers, _ = drive(config)
    assert workers.most == most - most % 2 and loop.complete


finished = st.tuples(st.integers(0, 11), st.integers(0, 6))


@settings(max_examples=200)
@given(
    done=st.lists(finished, max_size=12, unique_by=lambda pair: pair[0]),
    running=st.dictionaries(st.integers(0, 11), st.integers(0, 6), max_size=12),
    group=st.sampled_from([1, 2, 3]),
    groups=st.integers(1, 3),
    staleness=st.integers(0, 4),
    after=st.integers(0, 8),
)
def test_a_buffer_of_groups_equals_a_buffer_of_their_oldest_members(done, running, group, groups, staleness, after):
    """A slow reference: groups become single episodes of their oldest version, incomplete ones still running, and the plain buffer decides."""
    running = {ordinal: version for ordinal, version in running.items() if ordinal not in dict(done)}
    items = [Finished(make_trajectory(o, versions=(v, v)).meta(), o) for o, v in done]
    buffer = Buffer(staleness, groups * group, group=group, items=list(items))
    batch = buffer.pop_batch(running, version_after=after)

    versions: dict[int, list[int]] = {}
    for ordinal, version in [*done, *running.items()]:
        versions.setdefault(ordinal // group, []).append(version)
    complete = [g for g in versions if sum(o // group == g for o, _ in done) == group]
    single = Buffer(staleness, groups, items=[Finished(make_trajectory(g, versions=(min(versions[g]),)).meta(), g) for g in complete])
    expected = single.pop_batch({g: min(v) for g, v in versions.items() if g not in complete}, version_after=after)
    if expected is None:
        assert batch is None and buffer.items == items
    else:
        assert [item.handle for item in batch] == [o for f in expected for o in range(f.handle * group, (f.handle + 1) * group)]
        assert sorted(item.handle for item in [*batch, *buffer.items]) == sorted(o for o, _ in done)


def test_truncation_drop_neither_deadlocks_nor_counts_as_trained():
    """A batch that is all truncated makes no actor step: its slots must come free although nothing is published."""
    config = make_config(staleness=1, batch=4, steps=8, every=2)
    config.algo.truncation = "drop"

    class Dropping(CountingLearner):
        async def step(self, handles, step):
            before = self.version
            report = await super().step(handles, step)
            if all(t.finish.kind == "truncated" for t in handles):
                self.version = before
            return replace(report, version=self.version)

    engines = FakeEngines()
    slow = {4, 5, 6, 7, 9}
    workers = TimedWorkers(engines, lambda request: 9.0 if request.episode_id.ordinal in slow else 0.1, limit=5.0)
    loop = TrainingLoop(config, CountingSource(), workers, Dropping(config), engines, SilentObserver())
    run(loop.run())
    audit = loop.ledger.audit()
    assert audit["closes"] and audit["prompts"]["dropped"] == {"truncated": 5}
    told(loop)
    assert all("algo.truncation=drop" in loss.message for loss in loop.observer.losses)


def test_phase_critic_trains_no_actor():
    config = make_config(staleness=1, batch=2, steps=5)
    config.run.phase = "critic"
    loop, learner, _, engines = drive(config)
    assert len(learner.batches) == 5 and loop.version == 0 and engines.history == []
