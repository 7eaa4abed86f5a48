"""The task source of a stream: an environment's own tasks, with the arguments of the phase that a prompt's position falls into."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from sao.config import EnvConfig, OnlineConfig
from sao.environment import Task
from sao.online.schedule import Schedule
from sao.tasks.fixed_order import FixedOrder
from sao.tasks.procedural import HELD_OUT, TRAIN, ProceduralSource


class StreamSource(FixedOrder):
    """An endless stream whose phase is a function of the position alone. The cursor is the position of the next prompt.

    A task carries its phase: its payload was made by the phase's arguments, and its workload is the phase's name, by which the ledger counts it,
    evaluations split their results and the run store finds it.

    Raises ConfigError when the class has no generator, or the generator refuses a phase's arguments, each tried once here.
    """

    def __init__(self, environment: type, env: EnvConfig, online: OnlineConfig, *, seed: int) -> None:
        self.name = env.name
        self.schedule = Schedule(online, seed)
        self._regimes = {
            phase.name: ProceduralSource(
                environment, name=env.name, seed=seed, args=env.args | phase.args, workload=phase.name, key=f"the arguments of phase {phase.name}"
            )
            for phase in self.schedule.regimes
        }
        self._position = 0

    @property
    def length(self) -> int | None:
        return None

    def next(self) -> Task:
        task = self._task(self._position)
        self._position += 1
        return task

    def _task(self, position: int) -> Task:
        return self._regimes[self.schedule.phase(position).name].task(position, TRAIN)

    def again(self, place: Any) -> Task:
        return self._task(place[0])

    def held_out(self, n: int) -> list[Task]:
        """n held-out tasks, the regimes in turn; every regime is asked the same questions, as far as its arguments leave them the same."""
        names = list(self._regimes)
        tasks = []
        for index in range(n):
            name = names[index % len(names)]
            task = self._regimes[name].task(index // len(names), HELD_OUT)
            tasks.append(replace(task, task_id=f"{self.name}/{name}/{HELD_OUT}/{index // len(names)}"))
        return tasks

    def probes(self, n: int) -> list[Task]:
        """The first n prompts of every regime."""
        return [source.task(index, TRAIN) for source in self._regimes.values() for index in range(n)]

    def state_dict(self) -> dict[str, Any]:
        return {"position": self._position}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._position = int(state["position"])

    def metrics(self) -> dict[str, float]:
        return {f"rollout/tasks/{self.name}": float(self._position)}
