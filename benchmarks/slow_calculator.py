"""The calculator behind a slow door: an environment whose start takes a log-normal time, as containers and browsers do."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from typing import Any

from sao.environment import Context, Message, Task
from sao.envs.calculator.environment import CalculatorEnvironment


class SlowCalculator(CalculatorEnvironment):
    """latency_s: mean of the start's time; sigma: of its logarithm (1: one start in a hundred takes six times the mean)."""

    def __init__(self, task: Task, *, latency_s: float, sigma: float, **args: Any) -> None:
        super().__init__(task, **args)
        rng = random.Random(task.task_id)
        self.delay = latency_s * rng.lognormvariate(-sigma * sigma / 2, sigma)

    async def reset(self, context: Context) -> Sequence[Message]:
        await asyncio.sleep(self.delay)
        return await super().reset(context)

    @classmethod
    def generate_payload(cls, rng: random.Random, split: str, *, latency_s: float, sigma: float, **args: Any) -> dict[str, Any]:
        return super().generate_payload(rng, split, **args)

    @classmethod
    def demonstration(cls, rng: random.Random, clean: bool, *, latency_s: float, sigma: float, **args: Any) -> list[Message]:
        return super().demonstration(rng, clean, **args)
