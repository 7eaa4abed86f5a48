"""Tasks by recent reward: who gets which share, that none is starved, and that a resumed run draws as if it had never stopped."""

from __future__ import annotations

import dataclasses
import json
import math
import random
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sao.config import Config, DataConfig, EnvConfig
from sao.config_load import compose, environments
from sao.environment import Task
from sao.errors import ConfigError, DataError
from sao.rollout.staleness import Finished
from sao.tasks.curriculum import Curriculum, with_curriculum
from sao.tasks.mixture import Mixture
from sao.tasks.pool import Pool
from sao.tasks.procedural import ProceduralSource
from sao.tasks.row_source import RowSource
from sao.tasks.samplers import Checked, Frontier, Learnable, SumTree
from sao.tasks.source import TaskSource, build_source
from tests.fakes import TimedWorkers, make_trajectory
from tests.unit.tasks.test_task_source import SINGLE_TURN, Base, Rows, Sums
from tests.unit.test_loop import make_config
from tests.unit.test_resume import sitting

HERE = __name__
REWARDS = st.sampled_from([0.0, 0.0, 0.5, 1.0])


class Stairs(Base):
    """Levels from easy to hard."""

    @classmethod
    def levels(cls, *, steps: int = 4) -> list[int]:
        return list(range(1, steps + 1))

    @classmethod
    def generate_payload(cls, rng: random.Random, split: str, *, steps: int = 4, level: int = 1) -> dict[str, Any]:
        return {"level": level, "number": rng.randint(0, 10**9)}


class Graded(TimedWorkers):
    """A worker whose reward is a function of the task: the easier the level, the more often 1."""

    async def run(self, request: Any) -> Any:
        outcome = await super().run(request)
        if not isinstance(outcome, Finished):
            return outcome
        passed = random.Random(request.task.task_id).random() < 1.1 - 0.3 * request.task.payload["level"]
        trajectory = dataclasses.replace(outcome.handle, reward=float(passed))
        return Finished(trajectory.meta(), trajectory)


class LastFirst:
    """A strategy of a user's: the last bucket, until it has earned something."""

    def __init__(self, buckets: int, recent: int, *, skip: int = 0) -> None:
        self.buckets, self.chosen = buckets, buckets - 1 - skip

    def update(self, bucket: int, mean: float, count: int) -> None:
        if bucket == self.chosen and mean > 0:
            self.chosen = 0

    def draw(self, rng: random.Random) -> int:
        return self.chosen

    def shares(self) -> list[float]:
        return [float(bucket == self.chosen) for bucket in range(self.buckets)]


class Astray(LastFirst):
    def draw(self, rng: random.Random) -> int:
        return self.buckets


class Incomplete:
    def draw(self, rng: random.Random) -> int:
        return 0


def build(strategy: str = "learnable", source: Any = None, **data: Any) -> Curriculum:
    source = source or ProceduralSource(Stairs, name="stairs", seed=3)
    made = with_curriculum(DataConfig(curriculum=strategy, **data), source, 3)
    assert isinstance(made, Curriculum)
    return made


def rows(n: int, **columns: Any) -> RowSource:
    class Columns(Rows):
        def __getitem__(self, index: int) -> dict[str, Any]:
            return super().__getitem__(index) | {name: values[index] for name, values in columns.items()}

    return RowSource(Columns(n), name="rows", seed=3)


def credit(source: TaskSource, *graded: tuple[Task, float]) -> None:
    source.saw([dataclasses.replace(make_trajectory(task=t.task_id, reward=r).meta(), environment=t.environment) for t, r in graded])


def play(source: TaskSource, rewards: list[float]) -> list[str]:
    """Draw, earn, credit, one by one."""
    drawn = []
    for reward in rewards:
        task = source.next()
        credit(source, (task, reward))
        drawn.append(task.task_id)
    return drawn


# ------------------------------------------------------------------ choosing


@given(weights=st.lists(st.floats(0, 10), min_size=1, max_size=40).filter(lambda w: sum(w) > 0), mass=st.floats(0, 1, exclude_max=True))
def test_the_tree_finds_what_a_walk_over_all_weights_finds(weights: list[float], mass: float) -> None:
    tree = SumTree(len(weights), 0.0)
    for index in random.Random(0).sample(range(len(weights)), len(weights)):
        tree[index] = weights[index]
    assert tree.total == pytest.approx(sum(weights))
    found, point = tree.find(mass * tree.total), mass * tree.total
    assert weights[found] > 0
    assert sum(weights[:found]) <= point + 1e-9 and point <= sum(weights[: found + 1]) + 1e-9


def test_learnable_prefers_what_is_sometimes_solved_and_what_was_never_tried() -> None:
    sampler = Learnable(5, 4)
    for bucket, mean in ((0, 0.0), (1, 0.5), (2, 1.0), (3, 0.25)):
        sampler.update(bucket, mean, 4)
    never, half, always, quarter, untried = sampler.shares()
    assert half == pytest.approx(untried) and never == pytest.approx(always) and half > quarter > never > 0
    scaled = Learnable(1, 4, low=-1.0, high=1.0)
    scaled.update(0, 0.0, 4)
    assert scaled._weights[0] == pytest.approx(0.25)


def test_the_frontier_goes_up_level_by_level_and_falls_back() -> None:
    source = build("frontier", curriculum_recent=8, curriculum_floor=0.2, curriculum_args={"threshold": 0.75})
    levels = []
    for _ in range(4):
        drawn = Counter()
        for _ in range(200):
            task = source.next()
            drawn[task.payload["level"]] += 1
            credit(source, (task, float(task.payload["level"] <= 2)))
        levels.append(drawn.most_common(1)[0][0])
    assert levels[1:] == [3, 3, 3], "two levels pass, so the third is the frontier"
    assert source.metrics()["curriculum/share/stairs/3"] == pytest.approx(0.8 + 0.2 / 4)
    assert source.metrics()["curriculum/reward/stairs/1"] == 1.0 and source.metrics()["curriculum/reward/stairs/3"] == 0.0
    for _ in range(600):
        credit(source, (source.next(), 0.0))
    assert source.shares()[0] == pytest.approx(0.85), "nothing passes any more"


def test_the_last_level_stays_the_frontier_when_all_pass() -> None:
    sampler = Frontier(3, 2)
    for level in range(3):
        assert sampler.level == level
        sampler.update(level, 1.0, 1)
        assert sampler.level == level, "one reward is not yet enough"
        sampler.update(level, 1.0, 2)
    assert sampler.level == 2 and sampler.shares() == [0.0, 0.0, 1.0]


@settings(max_examples=40, deadline=None)
@given(strategy=st.sampled_from(["learnable", "frontier"]), floor=st.floats(0.05, 1.0), rewards=st.lists(REWARDS, max_size=120))
def test_no_history_takes_a_bucket_below_its_share_of_the_floor(strategy: str, floor: float, rewards: list[float]) -> None:
    source = build(strategy, curriculum_floor=floor, curriculum_recent=3)
    play(source, rewards)
    shares = source.shares()
    assert sum(shares) == pytest.approx(1.0) and min(shares) >= floor / 4 * (1 - 1e-9)


@pytest.mark.parametrize("reward", [0.0, 1.0])
def test_nothing_is_starved(reward: float) -> None:
    for source in (build("frontier"), build(source=rows(40)), build(source=Pool(ProceduralSource(Sums, name="sums", seed=3), 40))):
        buckets = 4 if source.metrics().get("curriculum/level/stairs") is not None else 40
        drawn = Counter(task_id.rsplit("/", 2)[1 if buckets == 4 else 2] for task_id in play(source, [reward] * 1500))
        assert len(drawn) == buckets and min(drawn.values()) >= 0.1 / buckets * 1500 / 4


def test_a_task_of_which_every_episode_is_lost_is_left_to_the_floor() -> None:
    source = build(source=rows(10), curriculum_recent=8)
    drawn: Counter[str] = Counter()
    for _ in range(2000):
        task = source.next()
        drawn[task.task_id] += 1
        if task.task_id == "rows/train/7":
            source.lost(task.environment, task.task_id)
        else:
            credit(source, (task, 1.0))
    # The others are all solved and weigh 0.05 each, the one that never came back 0.25: it would get a third of all draws.
    assert 20 < drawn["rows/train/7"] < 200
    credit(source, (source._buckets.task(7, random.Random(0), 0), 0.5))
    assert source.state_dict()["lost"] == []


def test_a_draw_from_a_large_pool_is_cheap() -> None:
    source = build(source=rows(100_000))
    play(source, [0.0, 1.0, 0.5] * 300)
    started = time.process_time()
    for _ in range(200):
        task = source.next()
        credit(source, (task, 1.0))
    assert (time.process_time() - started) / 200 < 1e-3


# ------------------------------------------------------------------ what it chooses among


def test_levels_reach_the_generator_and_come_back_in_the_task() -> None:
    source = build("frontier")
    tasks = [source.next() for _ in range(200)]
    assert {task.payload["level"] for task in tasks} == {1, 2, 3, 4}
    assert all(task.task_id == f"stairs/train/{task.payload['level']}/{index}" for index, task in enumerate(tasks))
    assert [source.again(json.loads(json.dumps(task.place))) for task in tasks[:20]] == tasks[:20]
    assert source.held_out(3) == ProceduralSource(Stairs, name="stairs", seed=3).held_out(3)
    assert {task.payload["level"] for task in source.probes(2)} == {1, 4}


@pytest.mark.parametrize(
    ("values", "labels"), [([3, 1, 2, 1], ["1", "2", "3"]), (["b", "a", "b", "c"], ["a", "b", "c"]), ([10, "x", 2, 2], ["10", "2", "x"])]
)
def test_rows_are_grouped_by_a_column(values: list[Any], labels: list[str]) -> None:
    source = build("frontier", rows(4, level=values), curriculum_column="level")
    assert [name.rsplit("/", 1)[1] for name in source.metrics() if "/share/" in name] == labels
    first = [task for task in (source.next() for _ in range(200)) if str(task.payload["level"]) == labels[0]]
    assert len(first) > 150 and {task.payload["index"] for task in first} == {i for i, v in enumerate(values) if str(v) == labels[0]}


def test_a_column_that_is_not_there_names_the_row() -> None:
    with pytest.raises(DataError, match=r"has no 'level' in row 2, which data\.curriculum_column names"):
        build(source=rows(3, level=[1, None, 2]), curriculum_column="level")
    with pytest.raises(DataError, match="neither numbers nor texts"):
        build(source=rows(2, level=[[1], [2]]), curriculum_column="level")
    with pytest.raises(DataError, match="neither numbers nor texts"):
        build(source=rows(2, level=[1.0, math.nan]), curriculum_column="level")


def test_a_mixture_tells_each_environment_its_own_rewards() -> None:
    stairs, plain = build("learnable"), ProceduralSource(Sums, name="sums", seed=3)
    mixture = Mixture([stairs, plain], {"stairs": 1, "sums": 1})
    play(mixture, [1.0] * 40)
    assert sum(count for _, _, count in stairs.state_dict()["rewards"]) == 20
    mixture.lost("stairs", "stairs/train/2/5")
    assert stairs.state_dict()["lost"] == [[1, 1]]
    task = mixture.next()
    assert mixture.again(task.place) == task


# ------------------------------------------------------------------ going on


@settings(max_examples=60, deadline=None)
@given(
    kind=st.sampled_from(["levels", "rows", "pool", "column"]),
    strategy=st.sampled_from(["learnable", "frontier"]),
    before=st.lists(REWARDS, max_size=80),
    after=st.lists(REWARDS, min_size=1, max_size=40),
)
def test_a_loaded_state_draws_what_the_saved_one_would_have(kind: str, strategy: str, before: list[float], after: list[float]) -> None:
    def made() -> Curriculum:
        if kind == "levels":
            return build(strategy, curriculum_recent=4)
        if kind == "column":
            return build(strategy, rows(9, level=[1, 2, 3] * 3), curriculum_column="level", curriculum_recent=4)
        return build("learnable", rows(9) if kind == "rows" else Pool(ProceduralSource(Sums, name="sums", seed=3), 9))

    source = made()
    play(source, before)
    if before:
        task = source.next()
        source.lost(task.environment, task.task_id)
    resumed = made()
    resumed.load_state_dict(json.loads(json.dumps(source.state_dict())))
    assert play(resumed, after) == play(source, after)
    assert resumed.state_dict() == source.state_dict() and resumed.metrics() == source.metrics() and resumed.shares() == source.shares()


def test_a_state_of_other_tasks_is_refused() -> None:
    with pytest.raises(DataError, match="has 5 tasks or levels but the checkpoint was made with 4"):
        build(source=rows(5)).load_state_dict(build(source=rows(4)).state_dict())


@settings(max_examples=25, deadline=None)
@given(staleness=st.sampled_from([0, 2]), deaths=st.lists(st.floats(0.5, 9.0), max_size=3), every=st.integers(1, 4), seed=st.integers(0, 2**16))
def test_a_run_that_dies_credits_every_trained_episode_once_and_draws_on_from_there(
    staleness: int, deaths: list[float], every: int, seed: int
) -> None:
    config = make_config(staleness=staleness, batch=4, steps=8)
    config.checkpoint.every = every
    rng = random.Random(seed)
    draws = (lambda step: rng.uniform(0.1, 2.0), lambda request: rng.lognormvariate(0, 0.8), lambda request: False)

    def life(disk: Any, until: float | None) -> Any:
        return sitting(config, disk, *draws, until, build("frontier", curriculum_recent=3), Graded)

    disk = None
    for until in [*deaths, None]:
        loop, learner, disk = life(disk, until)
    trained = [t for step in sorted(learner.stored) for t in learner.stored[step]]
    fresh = build("frontier", curriculum_recent=3)
    fresh.saw([t.meta() for t in trained])
    assert loop.source.state_dict()["rewards"] == fresh.state_dict()["rewards"]
    assert len({t.task_id for t in trained}) == len(trained), "no task is made twice"
    if staleness == 0:  # a step's draws come after all of the step before it, so deaths leave no trace at all
        _, undisturbed, _ = life(None, None)
        assert [t.task_id for t in trained] == [t.task_id for step in sorted(undisturbed.stored) for t in undisturbed.stored[step]]


def test_an_episode_in_flight_comes_back_as_the_task_it_was() -> None:
    config = make_config(staleness=3, batch=4, steps=12)
    config.checkpoint.every = 1
    source = build("learnable", curriculum_recent=3)
    _, _, disk = sitting(
        config, None, lambda step: 1.0, lambda request: 1.0 + request.episode_id.ordinal % 3, lambda request: False, 9.0, source, Graded
    )
    issued = disk.checkpoint["state"]["issued"]
    assert len(issued) > 3
    entries = {entry["episode_id"][0]: entry["task_id"] for entry in disk.checkpoint["state"]["ledger"]["entries"]}
    disk.learner.stored.clear()
    resumed = build("learnable", curriculum_recent=3)
    loop, _, _ = sitting(config, disk, lambda step: 1.0, lambda request: 1.0, lambda request: False, 0.01, resumed, Graded)
    again = {ordinal: task.task_id for ordinal, task in loop._issued.items()}
    assert {int(ordinal) for ordinal in issued} <= again.keys()
    assert {ordinal: task for ordinal, task in again.items() if ordinal in entries} == {int(o): entries[int(o)] for o in issued}


def test_the_loop_tells_of_every_episode_it_lost() -> None:
    config = make_config(staleness=2, batch=4, steps=20)
    source = build("learnable", curriculum_recent=1000)
    loop, _, _ = sitting(
        config, None, lambda step: 1.0, lambda request: 1.0, lambda request: request.task.payload["level"] == 4, None, source, Graded
    )
    assert loop.ledger.dropped["environment"] > 3
    assert source.state_dict()["lost"] == [[3, loop.ledger.dropped["environment"]]]


# ------------------------------------------------------------------ what is refused


def test_a_strategy_of_the_users_own() -> None:
    source = build(f"{HERE}:LastFirst", curriculum_args={"skip": 1}, curriculum_floor=0.01)
    assert Counter(source.next().payload["level"] for _ in range(100)).most_common(1)[0][0] == 3
    with pytest.raises(ConfigError, match=r"Astray\.draw returned 4, not a bucket from 0 to 3"):
        play(build(f"{HERE}:Astray", curriculum_floor=0.01), [0.0] * 50)


class Faulty(LastFirst):
    """Does what its argument says: with a method an error, with `says` what shares gives."""

    def __init__(self, buckets: int, recent: int, *, method: str = "", says: Any = None) -> None:
        super().__init__(buckets, recent)
        self.method, self.says = method, says
        self._fail("constructor")

    def _fail(self, method: str) -> None:
        if self.method == method:
            raise ZeroDivisionError("division by zero")

    def update(self, bucket: int, mean: float, count: int) -> None:
        self._fail("update")

    def draw(self, rng: random.Random) -> int:
        self._fail("draw")
        return super().draw(rng)

    def shares(self) -> Any:
        self._fail("shares")
        return super().shares() if self.says is None else self.says


@pytest.mark.parametrize("method", ["constructor", "draw", "shares"])
def test_an_error_of_the_users_strategy_is_named_before_anything_starts(method: str) -> None:
    with pytest.raises(ConfigError, match=r"Faulty.*ZeroDivisionError: division by zero"):
        build(f"{HERE}:Faulty", curriculum_args={"method": method})


def test_an_error_of_the_users_strategy_in_the_run_is_named() -> None:
    source = build(f"{HERE}:Faulty", curriculum_args={"method": "update"})
    with pytest.raises(ConfigError, match=r"data\.curriculum: Faulty\.update raised ZeroDivisionError: division by zero"):
        credit(source, (source.next(), 1.0))


@pytest.mark.parametrize(
    "says", [[], [1.0], [0.25] * 5, [math.nan] * 4, [-1.0, 1.0, 1.0, 0.0], [1.0] * 4, [0.0] * 4, 3, ["a"] * 4, [math.inf, 0, 0, 0]], ids=str
)
def test_shares_that_are_none_are_refused(says: Any) -> None:
    with pytest.raises(ConfigError, match=r"Faulty\.shares returned .*, not 4 probabilities that sum to 1"):
        build(f"{HERE}:Faulty", curriculum_args={"says": says})


def test_numbers_of_numpy_are_buckets_and_shares() -> None:
    class Numpy(LastFirst):
        def draw(self, rng: random.Random) -> Any:
            return np.int64(2)

        def shares(self) -> Any:
            return np.full(4, 0.25, np.float32)

    sampler = Checked(Numpy(4, 1), 4)
    assert sampler.draw(random.Random(0)) == 2 and sampler.shares() == [0.25] * 4


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"curriculum": f"{HERE}:Incomplete"}, "has no update, shares; see sao.tasks.samplers.Sampler"),
        ({"curriculum": f"{HERE}:Nothing"}, f"data.curriculum={HERE}:Nothing: {HERE} has no 'Nothing'"),
        (
            {"curriculum": "learnable", "curriculum_args": {"treshold": 1}},
            "data.curriculum_args={'treshold': 1} do not suit data.curriculum=learnable",
        ),
        ({"curriculum": "learnable", "curriculum_args": {"low": 1.0}}, "low=1.0 must be below high=1.0"),
    ],
)
def test_a_strategy_that_cannot_work(data: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        with_curriculum(DataConfig(**data), ProceduralSource(Stairs, name="stairs", seed=3), 3)
    assert message in str(caught.value)


def test_an_environment_with_nothing_to_choose_among() -> None:
    config = Config()
    config.data.curriculum = "learnable"
    sums, stairs = EnvConfig("sums", "tests.unit.tasks.test_task_source:Sums"), EnvConfig("stairs", f"{HERE}:Stairs")
    with pytest.raises(ConfigError, match=r"nothing to choose among: env=sums offers no levels; set data\.pool=N"):
        build_source(config, [sums])
    config.data.pool = 5
    assert isinstance(build_source(config, [sums]), Curriculum)
    config.data.pool, config.data.mixture = 0, {"sums": 1, "stairs": 1}
    assert isinstance(build_source(config, [sums, stairs]), Mixture)


def test_the_frontier_needs_levels(tmp_path: Path) -> None:
    config = Config()
    config.data.curriculum = "frontier"
    path = tmp_path / "tasks.jsonl"
    path.write_text('{"prompt": "a", "level": 1}\n{"prompt": "b", "level": 2}\n')
    config.data.path = str(path)
    with pytest.raises(ConfigError, match=r"frontier needs levels, which env=plain does not have; name a column"):
        build_source(config, [EnvConfig("plain", SINGLE_TURN)])
    config.data.curriculum_column = "level"
    assert isinstance(build_source(config, [EnvConfig("plain", SINGLE_TURN)]), Curriculum)


def test_levels_that_are_none() -> None:
    class Same(Stairs):
        @classmethod
        def levels(cls, *, steps: int = 4) -> list[Any]:
            return [1, "1"]

    class Refusing(Stairs):
        @classmethod
        def generate_payload(cls, rng: random.Random, split: str, *, steps: int = 4, level: int = 1) -> dict[str, Any]:
            if level > 3:
                raise ValueError("too hard")
            return {"level": level}

    with pytest.raises(ConfigError, match="levels are different numbers or names without a slash"):
        build(source=ProceduralSource(Same, name="same", seed=0))
    with pytest.raises(ConfigError, match="env=hard offers the level 4, but its generator refuses it"):
        build(source=ProceduralSource(Refusing, name="hard", seed=0))


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["data.curriculum=frontir"], "is not one of off, learnable, frontier; did you mean 'frontier'?"),
        (["data.curriculum_floor=0.2"], "data.curriculum_floor=0.2 does nothing with data.curriculum=off"),
        (["data.curriculum_args.threshold=0.2"], "does nothing with data.curriculum=off"),
        (["data.curriculum=learnable", "data.curriculum_floor=0"], "must lie in (0, 1]"),
        (["data.curriculum=frontier", "data.pool=4"], "data.curriculum=frontier goes by levels"),
        (["data.curriculum=learnable", "data.curriculum_recent=-1"], "must not be negative"),
        (["data.curriculum=learnable", "experiment=rule_stream"], "data.curriculum and online.phases both decide"),
    ],
)
def test_keys_that_contradict_each_other(overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        compose(["env=calculator", "model=demo", *overrides])
    assert message in str(caught.value)


# ------------------------------------------------------------------ environments of a mixture that differ from their file


def test_a_mixture_names_the_same_environment_twice() -> None:
    config = compose(
        [
            "env=calculator",
            "model=demo",
            "data.mixture.calculator=3",
            "data.mixture.hard=1",
            "data.variants.hard={base: calculator, args: {operand_max: 999}}",
        ]
    )
    plain, hard = environments(config)
    assert (plain.name, hard.name, hard.target) == ("calculator", "hard", plain.target)
    assert (plain.args["operand_max"], hard.args) == (99, plain.args | {"operand_max": 999})


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["data.variants.hard={base: calculator}"], "but data.mixture is empty"),
        (["data.mixture.guess=1", "data.variants.hard={base: calculator}"], "data.variants.hard is not in data.mixture"),
        (["data.mixture.calculator=1", "data.variants.calculator={args: {}}"], "is the environment that env sets up already"),
        (["data.mixture.hard=1", "data.variants.hard={base: calcluator}"], "there is no conf/env/calcluator.yaml"),
        (
            ["data.mixture.hard=1", "data.variants.hard={base: guess, arsg: {}}"],
            "data.variants.hard.arsg is not a key of an environment; did you mean 'args'?",
        ),
        (["data.mixture.hard=1", "data.variants.hard=7"], "data.variants.hard=7 must be a mapping"),
        (["data.mixture.hard=1", "data.variants.hard={base: guess, args: 7}"], "data.variants.hard"),
    ],
)
def test_variants_that_cannot_be(overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        environments(compose(["env=calculator", "model=demo", *overrides]))
    assert message in str(caught.value)
