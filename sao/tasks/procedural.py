"""Tasks that an environment makes up: task i of a split is a function of (seed, split, i) and of nothing else."""

from __future__ import annotations

import inspect
import random
from collections.abc import Mapping
from typing import Any

from sao.environment import Task
from sao.errors import ConfigError, DataError
from sao.tasks.fixed_order import FixedOrder
from sao.tasks.target import one_line

TRAIN = "train"
HELD_OUT = "held_out"


def task_seed(seed: int, split: str, index: int) -> int:
    """The seed an episode's environment gets for draw `index`: 31 bits, the same in every process."""
    return random.Random(f"{seed}/{split}/{index}/episode").getrandbits(31)


class ProceduralSource(FixedOrder):
    """An endless stream from `environment.generate_payload(rng, split, **args)`. The cursor is the index of the next task.

    Raises ConfigError when the class has no generator or the generator refuses `args`, which is tried once here. key: what `args` are called then.
    """

    def __init__(
        self,
        environment: type,
        *,
        name: str,
        seed: int,
        args: Mapping[str, Any] | None = None,
        workload: str = "default",
        split: str = TRAIN,
        key: str = "env.args",
    ) -> None:
        if not callable(getattr(environment, "generate_payload", None)):
            raise ConfigError(f"env={name} makes no tasks of its own; set data.path to a file of tasks")
        self.name = name
        self.workload = workload
        self.split = split
        self._environment: Any = environment
        self._seed = seed
        self._args = dict(args or {})
        self._next = 0
        try:
            self.task(0, split)
        except ConfigError:
            raise
        except Exception as error:
            raise ConfigError(f"{key}={self._args} do not suit the generator of env={name} ({one_line(error)}); mend {key}") from error

    @property
    def length(self) -> int | None:
        return None

    def next(self) -> Task:
        task = self.task(self._next, self.split)
        self._next += 1
        return task

    def again(self, place: Any) -> Task:
        index, level = place
        return self.task(index, self.split, level)

    def held_out(self, n: int) -> list[Task]:
        """The first n tasks of the held-out split; they do not depend on how far training has come."""
        return [self.task(index, HELD_OUT) for index in range(n)]

    def probes(self, n: int) -> list[Task]:
        """The first n training tasks."""
        return [self.task(index, self.split) for index in range(n)]

    def state_dict(self) -> dict[str, Any]:
        return {"position": self._next}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._next = int(state["position"])

    def metrics(self) -> dict[str, float]:
        return {f"rollout/tasks/{self.name}": float(self._next)}

    def task(self, index: int, split: str, level: int | str | None = None) -> Task:
        """Task `index` of a split, wherever the cursor stands. level: the difficulty asked of the generator; None leaves it to `args`."""
        args = self._args if level is None else {**self._args, "level": level}
        payload = self._environment.generate_payload(random.Random(f"{self._seed}/{split}/{index}"), split, **args)
        if not isinstance(payload, Mapping) or inspect.iscoroutine(payload):
            raise DataError(f"generate_payload of env={self.name} returned a {type(payload).__name__}; it must return a dict")
        task_id = f"{self.name}/{split}/{index}" if level is None else f"{self.name}/{split}/{level}/{index}"
        return Task(task_id, self.name, payload, task_seed(self._seed, split, index), self.workload, [index, level])

    def levels(self) -> list[int | str]:
        """The difficulties that the class offers for `args`, easiest first; empty where it offers none. Raises ConfigError for what cannot be levels."""
        offered = getattr(self._environment, "levels", None)
        if not callable(offered):
            return []
        try:
            levels = list(offered(**self._args))
        except Exception as error:
            raise ConfigError(f"levels() of env={self.name} does not take env.args={self._args} ({one_line(error)}); mend it") from error
        if len(set(map(str, levels))) != len(levels) or any(not isinstance(level, int | str) or "/" in str(level) for level in levels):
            raise ConfigError(f"levels() of env={self.name} returned {levels}; levels are different numbers or names without a slash")
        return levels
