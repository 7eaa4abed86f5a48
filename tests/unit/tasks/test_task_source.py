"""Cursors seek, epochs are complete, mixtures keep their proportions, and a configuration that cannot work is one sentence."""

from __future__ import annotations

import json
import random
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sao.config import Config, EnvConfig
from sao.environment import Task
from sao.errors import ConfigError, DataError
from sao.tasks.mixture import Mixture
from sao.tasks.procedural import ProceduralSource
from sao.tasks.row_source import MESSAGES_KEY, RowSource
from sao.tasks.source import TaskSource, build_held_out, build_source, environment_args, load_environment

SINGLE_TURN = "sao.envs.single_turn.environment:SingleTurnEnvironment"
HERE = __name__


class Base:
    def __init__(self, task: Task) -> None:
        self.task = task

    async def reset(self, context: Any) -> Any: ...

    async def step(self, action: Any) -> Any: ...

    def tools(self) -> Any: ...

    async def close(self) -> None: ...


class Sums(Base):
    @classmethod
    def generate_payload(cls, rng: random.Random, split: str, *, high: int = 9) -> dict[str, Any]:
        return {"question": f"{rng.randint(0, high)}+{rng.randint(0, high)}", "split": split}


class NoDict(Base):
    @classmethod
    def generate_payload(cls, rng: random.Random, split: str) -> list[int]:
        return [1]


class Library(Base):
    """Brings rows of its own."""

    @classmethod
    def own_rows(cls, split: str, *, n: int = 5) -> Rows:
        return Rows(n if split == "train" else 2)


class SyncStep(Base):
    def step(self, action: Any) -> Any: ...


class Rows:
    """n rows in memory that count their reads."""

    def __init__(self, n: int) -> None:
        self.n = n
        self.reads = 0

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, index: int) -> dict[str, Any]:
        self.reads += 1
        return {"prompt": f"question {index}", "index": index}

    def label(self, index: int) -> str:
        return f"row {index + 1}"


def rows_source(n: int = 7, **kwargs: Any) -> RowSource:
    return RowSource(Rows(n), **{"name": "rows", "seed": 3, **kwargs})


def sums(name: str = "sums", seed: int = 3) -> ProceduralSource:
    return ProceduralSource(Sums, name=name, seed=seed)


def mixture(weights: Sequence[float] = (3, 1, 0.5)) -> Mixture:
    return Mixture([sums(), rows_source(), sums("more")], dict(zip(("sums", "rows", "more"), weights, strict=True)))


def draw(source: TaskSource, n: int) -> list[Task]:
    return [source.next() for _ in range(n)]


@given(kind=st.sampled_from([sums, rows_source, mixture]), before=st.integers(0, 40), after=st.integers(1, 40))
@settings(max_examples=60)
def test_a_loaded_cursor_goes_on_where_the_saved_one_stood(kind: Any, before: int, after: int) -> None:
    source = kind()
    draw(source, before)
    state = json.loads(json.dumps(source.state_dict()))
    resumed = kind()
    resumed.load_state_dict(state)
    assert draw(resumed, after) == draw(source, after)
    assert resumed.state_dict() == source.state_dict()
    assert resumed.metrics() == source.metrics()


@given(n=st.integers(1, 30), seed=st.integers(0, 3), shuffle=st.booleans(), stops=st.lists(st.integers(0, 40), max_size=5))
@settings(max_examples=60)
def test_every_row_comes_once_per_epoch_whatever_the_restarts(n: int, seed: int, shuffle: bool, stops: list[int]) -> None:
    source = rows_source(n, seed=seed, shuffle=shuffle)
    seen: list[int] = []
    while len(seen) < 2 * n:
        if len(seen) in stops:
            state, source = source.state_dict(), rows_source(n, seed=seed, shuffle=shuffle)
            source.load_state_dict(state)
        seen.append(source.next().payload["index"])
    assert sorted(seen[:n]) == sorted(seen[n:]) == list(range(n))


def test_seeking_reads_no_row() -> None:
    rows = Rows(10)
    source = RowSource(rows, name="rows", seed=0)
    source.load_state_dict({"position": 123_456, "rows": 10})
    assert rows.reads == 0
    source.next()
    assert rows.reads == 1


def test_probes_are_the_longest_prompts_and_the_shortest_and_move_no_cursor() -> None:
    class Growing(Rows):
        def __getitem__(self, index: int) -> dict[str, Any]:
            return {"prompt": "x" * (1 + index * 7 % 20)}

    def chars(source: RowSource, n: int) -> list[int]:
        return [len(task.payload["prompt"]) for task in source.probes(n)]

    rows = RowSource(Growing(20), name="rows", seed=0)
    assert chars(rows, 4) == [20, 19, 18, 1]
    assert chars(RowSource(Growing(2), name="rows", seed=0), 4) == [8, 1]
    assert chars(RowSource(Growing(1), name="rows", seed=0), 4) == [1]
    sums = ProceduralSource(Sums, name="sums", seed=0)
    unused = ProceduralSource(Sums, name="unused", seed=0)
    mixture = Mixture([rows, sums, unused], {"rows": 1, "sums": 1})
    before = mixture.state_dict()
    assert [task.environment for task in mixture.probes(2)] == ["rows", "rows", "sums", "sums"]
    assert mixture.state_dict() == before and sums.probes(1) == [sums.next()]


def test_epochs_are_shuffled_by_seed_and_differ() -> None:
    first, second = (tuple(task.payload["index"] for task in draw(source, 20)) for source in [rows_source(20)] for _ in range(2))
    assert first != second != tuple(range(20)) != first
    assert first == tuple(task.payload["index"] for task in draw(rows_source(20), 20))
    assert first != tuple(task.payload["index"] for task in draw(rows_source(20, seed=4), 20))
    assert [task.payload["index"] for task in draw(rows_source(20, shuffle=False), 20)] == list(range(20))


def test_a_task_carries_the_row_its_messages_and_a_stable_id() -> None:
    source = rows_source(5, workload="slow")
    epochs = [{task.task_id: task for task in draw(source, 5)} for _ in range(2)]
    assert epochs[0].keys() == epochs[1].keys()
    task = epochs[0]["rows/train/2"]
    assert task.payload == {"prompt": "question 2", "index": 2, MESSAGES_KEY: [{"role": "user", "content": "question 2"}]}
    assert (task.environment, task.workload) == ("rows", "slow")
    assert task.seed != epochs[1]["rows/train/2"].seed


def test_another_file_is_refused_at_resume() -> None:
    with pytest.raises(DataError, match="has 8 rows but the checkpoint was made with 7"):
        rows_source(8).load_state_dict(rows_source(7).state_dict())


def test_a_procedural_task_depends_on_seed_split_and_index_alone() -> None:
    source = sums()
    tasks = draw(source, 6)
    late = sums()
    late.load_state_dict({"position": 5})
    assert late.next() == tasks[5]
    expected = Sums.generate_payload(random.Random("3/train/5"), "train")
    assert tasks[5].payload == expected
    assert [task.task_id for task in tasks[:2]] == ["sums/train/0", "sums/train/1"]
    assert [task.payload for task in draw(sums(seed=4), 6)] != [task.payload for task in tasks]


def test_held_out_tasks_are_the_same_at_any_time() -> None:
    source = sums()
    before = source.held_out(4)
    draw(source, 9)
    assert source.held_out(4) == before
    assert all(task.payload["split"] == "held_out" for task in before)
    assert rows_source().held_out(4) == []
    with_file = rows_source(held_out_rows=Rows(10))
    assert [task.payload["index"] for task in with_file.held_out(4)] == [0, 2, 5, 7]
    assert len(with_file.held_out(99)) == 10


@given(weights=st.lists(st.floats(0, 10), min_size=3, max_size=3).filter(lambda values: sum(values) > 0.01), n=st.integers(1, 300))
@settings(max_examples=60)
def test_consumed_shares_track_the_weights_at_every_length(weights: list[float], n: int) -> None:
    source = mixture(weights)
    counts = Counter(task.environment for task in draw(source, n))
    for name, weight in zip(("sums", "rows", "more"), weights, strict=True):
        assert abs(counts[name] - n * weight / sum(weights)) < 3
        assert source.metrics()[f"rollout/share/{name}"] == counts[name] / n


def test_a_mixture_advances_each_cursor_alone() -> None:
    source = mixture((2, 1, 0))
    by_name: dict[str, list[Task]] = {"sums": [], "rows": [], "more": []}
    for task in draw(source, 12):
        by_name[task.environment].append(task)
    assert by_name["sums"] == draw(sums(), 8)
    assert by_name["rows"] == draw(rows_source(), 4)
    assert source.length is None
    assert Mixture([rows_source(4), rows_source(5, name="b")], {"rows": 1, "b": 1}).length == 9


def test_a_mixture_holds_out_in_its_proportions_and_fills_up() -> None:
    source = Mixture([sums(), rows_source(held_out_rows=Rows(2))], {"sums": 1, "rows": 1})
    assert Counter(task.environment for task in source.held_out(4)) == {"sums": 2, "rows": 2}
    assert Counter(task.environment for task in source.held_out(10)) == {"sums": 8, "rows": 2}


def test_mixtures_survive_a_change_of_weights_but_not_a_lost_cursor() -> None:
    source = mixture()
    draw(source, 20)
    changed = mixture((0, 1, 0))
    changed.load_state_dict(source.state_dict())
    assert {task.environment for task in draw(changed, 5)} == {"rows"}
    with pytest.raises(ConfigError, match=r"no longer names more.*weight 0"):
        Mixture([sums(), rows_source()], {"sums": 1, "rows": 1}).load_state_dict(source.state_dict())


@pytest.mark.parametrize("weight", [-1, float("nan"), float("inf"), True, "1"])
def test_weights_that_are_none(weight: Any) -> None:
    with pytest.raises(ConfigError, match=r"data\.mixture\.sums=.* is not a weight"):
        Mixture([sums(), rows_source()], {"sums": weight, "rows": 1})


def env(name: str, target: str, **kwargs: Any) -> EnvConfig:
    return EnvConfig(name=name, target=target, **kwargs)


def task_file(directory: Path, name: str = "tasks.jsonl", n: int = 3) -> str:
    path = directory / name
    path.write_text("".join(json.dumps({"prompt": f"{name} {index}"}) + "\n" for index in range(n)))
    return str(path)


def test_the_source_a_configuration_asks_for(tmp_path: Path) -> None:
    config = Config()
    generator, plain = env("sums", f"{HERE}:Sums", args={"high": 3}), env("plain", SINGLE_TURN)
    assert isinstance(build_source(config, [generator]), ProceduralSource)
    config.data.path = task_file(tmp_path)
    config.data.eval_path = task_file(tmp_path, "eval.jsonl", 2)
    for single in (generator, plain):
        source = build_source(config, [single])
        assert isinstance(source, RowSource) and source.length == 3
        assert [task.payload["prompt"] for task in source.held_out(5)] == ["eval.jsonl 0", "eval.jsonl 1"]
        assert build_held_out(config, [single], 5) == source.held_out(5)
    config.data.mixture = {"sums": 2, "plain": 1, "own": 1}
    envs = [generator, plain, env("own", SINGLE_TURN, data_path=task_file(tmp_path, "own.jsonl", 5), workload="own")]
    source = build_source(config, envs)
    tasks = draw(source, 8)
    assert Counter(task.environment for task in tasks) == {"sums": 4, "plain": 2, "own": 2}
    assert {task.workload for task in tasks if task.environment == "own"} == {"own"}
    assert "prompt" not in next(task for task in tasks if task.environment == "sums").payload
    assert build_held_out(config, envs, 6) == source.held_out(6)


def test_held_out_tasks_do_not_need_the_training_rows(tmp_path: Path) -> None:
    config = Config()
    config.data.path = str(tmp_path / "gone.jsonl")
    config.data.eval_path = task_file(tmp_path)
    assert len(build_held_out(config, [env("plain", SINGLE_TURN)])) == 3


@pytest.mark.parametrize(
    ("envs", "mixture_weights", "message"),
    [
        ([env("plain", SINGLE_TURN)], {}, "env=plain makes no tasks of its own; set data.path"),
        ([env("sums", f"{HERE}:Sums", args={"hihg": 3})], {}, "env.args={'hihg': 3} do not suit the generator of env=sums"),
        ([env("none", f"{HERE}:NoDict")], {}, "returned a list; it must return a dict"),
        ([], {}, "no environment is configured"),
        ([env("a", f"{HERE}:Sums"), env("a", f"{HERE}:Sums")], {"a": 1}, "two environments are called 'a'"),
        ([env("a", f"{HERE}:Sums"), env("b", f"{HERE}:Sums")], {}, "2 environments but no data.mixture"),
        ([env("sums", f"{HERE}:Sums")], {"sum": 1}, "data.mixture.sum: there is no such environment; did you mean 'sums'?"),
        ([env("sums", f"{HERE}:Sums")], {"sums": 0}, "no weight above 0"),
    ],
)
def test_configurations_that_cannot_work(envs: list[EnvConfig], mixture_weights: dict[str, float], message: str) -> None:
    config = Config()
    config.data.mixture = mixture_weights
    with pytest.raises(ConfigError) as caught:
        build_source(config, envs)
    assert message in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("SingleTurn", "is not of the form package.module:name"),
        ("../x:Y", "is not of the form package.module:name"),
        ("no_such_package.module:X", "there is no module 'no_such_package'; install it or start from the directory"),
        ("sao.envs.single_turn.enviroment:SingleTurnEnvironment", "there is no module 'sao.envs.single_turn.enviroment'"),
        ("sao.envs.single_turn.environment:SingleTurnEnviroment", "did you mean 'SingleTurnEnvironment'?"),
        ("broken_module:X", "importing broken_module failed with ZeroDivisionError: division by zero"),
        ("needs_module:X", "importing needs_module needs the module 'not_there_at_all', which is not installed"),
        ("json:loads", "is not a class"),
        ("json:JSONDecoder", "is not an environment: it has no reset, step, tools, close"),
        (f"{HERE}:SyncStep", "step must be a coroutine"),
    ],
)
def test_targets_that_are_no_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, target: str, message: str) -> None:
    (tmp_path / "broken_module.py").write_text("1 / 0\n")
    (tmp_path / "needs_module.py").write_text("import not_there_at_all\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    with pytest.raises(ConfigError) as caught:
        load_environment(target)
    assert f"env.target={target}" in str(caught.value) and message in str(caught.value)


def test_reward_reaches_environments_that_take_it() -> None:
    config = Config()
    config.reward.function = "pkg.module:f"
    assert environment_args(env("sums", f"{HERE}:Sums"), config.reward) == {}
    args = environment_args(env("plain", SINGLE_TURN, args={"reward": {"timeout_s": 1.0}}), config.reward)
    assert args["reward"]["function"] == "pkg.module:f" and args["reward"]["timeout_s"] == 1.0


def test_a_pool_draws_its_first_tasks_over_and_over_and_seeks():
    def build(size: int) -> TaskSource:
        config = Config()
        config.data.pool = size
        return build_source(config, [EnvConfig("sums", f"{HERE}:Sums")])

    source, whole = build(3), build(0)
    first = [whole.next() for _ in range(3)]
    drawn = [source.next() for _ in range(8)]
    assert drawn == [*first, *first, *first[:2]] and source.length == 3
    assert source.metrics()["rollout/pool_passes"] == pytest.approx(8 / 3)
    again = build(3)
    again.load_state_dict(json.loads(json.dumps(source.state_dict())))
    assert [again.next() for _ in range(4)] == [first[2], *first]
    assert again.held_out(4) == whole.held_out(4) and again.probes(2) == whole.probes(2)


def test_a_pool_larger_than_the_data_is_refused(tmp_path):
    (tmp_path / "tasks.jsonl").write_text('{"prompt": "a"}\n' * 5)
    config = Config()
    config.data.path, config.data.pool = str(tmp_path / "tasks.jsonl"), 6
    with pytest.raises(ConfigError, match=r"data\.pool=6 is more than the 5 tasks"):
        build_source(config, [EnvConfig("single_turn", SINGLE_TURN)])
    config.data.pool = 5
    assert build_source(config, [EnvConfig("single_turn", SINGLE_TURN)]).length == 5


def test_a_class_with_rows_of_its_own_needs_no_file_and_keeps_them_in_a_mixture() -> None:
    config = Config()
    library = EnvConfig("library", f"{HERE}:Library", {"n": 3})
    source = build_source(config, [library])
    assert source.length == 3 and sorted(task.payload["index"] for task in draw(source, 3)) == [0, 1, 2]
    assert [task.task_id for task in build_held_out(config, [library], 9)] == ["library/held_out/0", "library/held_out/1"]
    assert source.held_out(9) == build_held_out(config, [library], 9)
    config.data.mixture, config.data.path = {"library": 1.0, "sums": 1.0}, "never-read.jsonl"
    both = build_source(config, [library, EnvConfig("sums", f"{HERE}:Sums")])
    assert {task.environment for task in draw(both, 4)} == {"library", "sums"}
