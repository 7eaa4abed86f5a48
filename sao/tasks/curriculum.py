"""Tasks drawn by what was lately earned with them, in place of a fixed order.

A curriculum divides a source into buckets: single tasks (rows, a pool) or levels of difficulty (a column of the rows, or what a generator offers). The
mean of each bucket's last rewards decides, through a sampler, from which the next task comes; a fixed share of the draws (the floor) goes to all buckets
alike, so none is ever starved and each is looked at again.

Rewards count when their episode is trained, in the order of the batches, and no earlier: that is what a resumed run trains again, so it arrives at the
same record. A failed or dropped episode earned nothing and counts as no reward; a bucket of which nothing else comes back is left to the floor.
Draw i is a function of the seed, i and what the record holds by then.
"""

from __future__ import annotations

import random
from array import array
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from sao.config import DataConfig
from sao.environment import Task
from sao.errors import ConfigError, DataError
from sao.tasks.pool import Pool
from sao.tasks.procedural import TRAIN, ProceduralSource
from sao.tasks.row_source import RowSource
from sao.tasks.samplers import SAMPLERS, Checked, Sampler
from sao.tasks.target import load_target, one_line
from sao.trajectory import TrajectoryMeta

if TYPE_CHECKING:
    from sao.tasks.source import TaskSource

RECENT_OF_A_TASK, RECENT_OF_A_LEVEL = 4, 64
SOLVED, UNSOLVED = 0.9, 0.1  # of a single task's recent mean, for the metrics
MOST_LABELS = 32  # levels that metrics name one by one


class Buckets(Protocol):
    """A source as a curriculum sees it."""

    @property
    def size(self) -> int: ...

    @property
    def labels(self) -> Sequence[str]:
        """Names of the levels, easiest first; empty where each bucket is one task."""
        ...

    def task(self, bucket: int, rng: random.Random, position: int) -> Task:
        """A task of the bucket, as draw `position`."""
        ...

    def bucket(self, task_id: str) -> int:
        """Where a task that was drawn belongs."""
        ...


class Levels:
    """The levels a generator offers: `levels(**args)` of the environment class, and `level=` of its generate_payload."""

    def __init__(self, source: ProceduralSource) -> None:
        self._source = source
        self._levels = source.levels()
        self.labels = [str(level) for level in self._levels]
        self.size = len(self._levels)
        for level in self._levels:
            try:
                source.task(0, TRAIN, level)
            except Exception as error:
                raise ConfigError(f"env={source.name} offers the level {level}, but its generator refuses it ({one_line(error)})") from error

    def task(self, bucket: int, rng: random.Random, position: int) -> Task:
        return self._source.task(position, TRAIN, self._levels[bucket])

    def bucket(self, task_id: str) -> int:
        return self.labels.index(task_id.rsplit("/", 2)[1])


class RowLevels:
    """Rows grouped by a column; a draw takes any row of its group."""

    def __init__(self, source: RowSource, column: str) -> None:
        self._source = source
        values = source.column(column)
        if not all(isinstance(value, int | float | str) and value == value for value in values):  # NaN is no level either
            raise DataError(f"data.curriculum_column={column} holds values that are neither numbers nor texts; name a column of levels")
        numbers = all(isinstance(value, int | float) for value in values)
        levels = sorted(set(values) if numbers else set(map(str, values)))
        self.labels = [str(level) for level in levels]
        self.size = len(levels)
        number = {level: index for index, level in enumerate(levels)}
        self._level_of = array("q", (number[value if numbers else str(value)] for value in values))
        self._rows = [array("q") for _ in levels]
        for row, level in enumerate(self._level_of):
            self._rows[level].append(row)

    def task(self, bucket: int, rng: random.Random, position: int) -> Task:
        return self._source.task(rng.choice(self._rows[bucket]), position)

    def bucket(self, task_id: str) -> int:
        return self._level_of[int(task_id.rsplit("/", 1)[1])]


class SingleRows:
    """Each row by itself."""

    labels: Sequence[str] = ()

    def __init__(self, source: RowSource) -> None:
        self._source = source
        self.size = source.length

    def task(self, bucket: int, rng: random.Random, position: int) -> Task:
        return self._source.task(bucket, position)

    def bucket(self, task_id: str) -> int:
        return int(task_id.rsplit("/", 1)[1])


class PoolTasks:
    """Each task of a pool by itself; all are made once, here."""

    labels: Sequence[str] = ()

    def __init__(self, pool: Pool) -> None:
        self._tasks = [pool.next() for _ in range(pool.size)]
        self.size = pool.size
        self._number = {task.task_id: index for index, task in enumerate(self._tasks)}

    def task(self, bucket: int, rng: random.Random, position: int) -> Task:
        return self._tasks[bucket]

    def bucket(self, task_id: str) -> int:
        return self._number[task_id]


class Curriculum:
    """A TaskSource over the buckets of another.

    floor: share of the draws that goes to all buckets alike. recent: how many of a bucket's last rewards count; the mean of all until there are so many,
    from then on an exponential mean in which a new reward weighs 1 / recent.
    """

    def __init__(self, source: TaskSource, buckets: Buckets, sampler: Sampler, *, seed: int, floor: float, recent: int) -> None:
        self.name = source.name
        self._source, self._buckets, self._sampler = source, buckets, sampler
        self._seed, self._floor, self._recent = seed, floor, recent
        self._position = 0
        self._rewards: dict[int, tuple[float, int]] = {}  # bucket -> recent mean, rewards seen
        self._lost: dict[int, int] = {}  # bucket -> episodes lost since its last reward

    @property
    def length(self) -> int | None:
        return self._source.length

    def next(self) -> Task:
        rng = random.Random(f"{self._seed}/curriculum/{self._position}")
        bucket = self._any(rng) if rng.random() < self._floor else self._sampler.draw(rng)
        if self._lost.get(bucket, 0) >= self._recent:
            bucket = self._any(rng)
        task = self._buckets.task(bucket, rng, self._position)
        self._position += 1
        return task

    def _any(self, rng: random.Random) -> int:
        return rng.randrange(self._buckets.size)

    def again(self, place: Any) -> Task:
        return self._source.again(place)

    def saw(self, batch: Sequence[TrajectoryMeta]) -> None:
        for meta in batch:
            bucket = self._buckets.bucket(meta.task_id)
            mean, count = self._rewards.get(bucket, (0.0, 0))
            count += 1
            self._lost.pop(bucket, None)
            self._record(bucket, mean + (meta.reward - mean) / min(count, self._recent), count)

    def lost(self, environment: str, task_id: str) -> None:
        bucket = self._buckets.bucket(task_id)
        self._lost[bucket] = self._lost.get(bucket, 0) + 1

    def _record(self, bucket: int, mean: float, count: int) -> None:
        self._rewards[bucket] = mean, count
        self._sampler.update(bucket, mean, min(count, self._recent))

    def held_out(self, n: int) -> list[Task]:
        return self._source.held_out(n)

    def probes(self, n: int) -> list[Task]:
        """The source's own and, where there are levels, the first task of the easiest and the hardest."""
        ends = sorted({0, self._buckets.size - 1}) if self._buckets.labels else []
        rng = random.Random(f"{self._seed}/curriculum/probes")
        return [*self._source.probes(n), *(self._buckets.task(bucket, rng, 0) for bucket in ends)]

    def state_dict(self) -> dict[str, Any]:
        return {
            "position": self._position,
            "buckets": self._buckets.size,
            "rewards": [[bucket, mean, count] for bucket, (mean, count) in sorted(self._rewards.items())],
            "lost": [list(item) for item in sorted(self._lost.items())],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a saved state. Raises DataError when there are other tasks or levels than it was made with."""
        if int(state["buckets"]) != self._buckets.size:
            raise DataError(
                f"the curriculum of env={self.name} has {self._buckets.size} tasks or levels but the checkpoint was made with {state['buckets']}; "
                "give the same tasks, or start a new run from the checkpoint's model"
            )
        self._position = int(state["position"])
        for bucket, mean, count in state["rewards"]:
            self._record(bucket, mean, count)
        self._lost = {bucket: count for bucket, count in state["lost"]}

    def shares(self) -> list[float]:
        """The probability of each bucket at the next draw, floor included."""
        even = self._floor / self._buckets.size
        return [even + (1 - self._floor) * share for share in self._sampler.shares()]

    def metrics(self) -> dict[str, float]:
        """`curriculum/...`: of levels each one's share and recent reward and the mean level to come (0 the easiest).

        Of single tasks the share that was seen, and of these the shares that are hardly ever, sometimes and nearly always solved.
        """
        found = {f"rollout/tasks/{self.name}": float(self._position)}
        labels = self._buckets.labels
        if labels:
            shares = self.shares()
            found[f"curriculum/level/{self.name}"] = sum(level * share for level, share in enumerate(shares))
            for level, (label, share) in enumerate(zip(labels[:MOST_LABELS], shares, strict=False)):
                found[f"curriculum/share/{self.name}/{label}"] = share
                if level in self._rewards:
                    found[f"curriculum/reward/{self.name}/{label}"] = self._rewards[level][0]
            return found
        found[f"curriculum/seen/{self.name}"] = len(self._rewards) / self._buckets.size
        if self._rewards:
            kinds = Counter("unsolved" if mean <= UNSOLVED else "solved" if mean >= SOLVED else "sometimes" for mean, _ in self._rewards.values())
            found |= {f"curriculum/{kind}/{self.name}": kinds[kind] / len(self._rewards) for kind in ("unsolved", "sometimes", "solved")}
        return found


def with_curriculum(data: DataConfig, source: TaskSource, seed: int) -> TaskSource:
    """`source` under the curriculum of a configuration; itself where there is none, or where it has neither levels nor rows to choose among.

    Raises ConfigError for a strategy that cannot be built, or that needs levels where there are none.
    """
    buckets = None if data.curriculum == "off" else _buckets(source, data.curriculum_column)
    if buckets is None:
        return source
    if data.curriculum == "frontier" and not buckets.labels:
        raise ConfigError(f"data.curriculum=frontier needs levels, which env={source.name} does not have; name a column in data.curriculum_column")
    recent = data.curriculum_recent or (RECENT_OF_A_LEVEL if buckets.labels else RECENT_OF_A_TASK)
    sampler = _sampler(data, buckets.size, recent)
    if data.curriculum not in SAMPLERS:
        sampler = Checked(sampler, buckets.size)
        sampler.shares()  # here, before anything starts
        sampler.draw(random.Random(f"{seed}/curriculum/preflight"))
    return Curriculum(source, buckets, sampler, seed=seed, floor=data.curriculum_floor, recent=recent)


def _buckets(source: TaskSource, column: str) -> Buckets | None:
    if isinstance(source, Pool):
        return PoolTasks(source)
    if isinstance(source, RowSource):
        return RowLevels(source, column) if column else SingleRows(source)
    if isinstance(source, ProceduralSource) and source.levels():
        return Levels(source)
    return None


def _sampler(data: DataConfig, size: int, recent: int) -> Sampler:
    name = data.curriculum
    made: Any = SAMPLERS.get(name) or load_target(name, "data.curriculum")
    missing = [method for method in ("update", "draw", "shares") if not callable(getattr(made, method, None))]
    if missing:
        raise ConfigError(f"data.curriculum={name} has no {', '.join(missing)}; see sao.tasks.samplers.Sampler")
    try:
        sampler: Sampler = made(size, recent, **data.curriculum_args)
    except ConfigError:
        raise
    except Exception as error:
        raise ConfigError(f"data.curriculum_args={data.curriculum_args} do not suit data.curriculum={name} ({one_line(error)})") from error
    return sampler
