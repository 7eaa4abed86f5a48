"""One prompt, one answer, one score: the environment of a user who has a task file and a reward function and no class."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from typing import Any

from sao.environment import Action, Context, Message, StepResult, Task
from sao.rewards.preflight import reward_config
from sao.rewards.runner import close_shared, shared_runner
from sao.tasks.row_source import MESSAGES_KEY
from sao.tasks.rows import messages_of


class SingleTurnEnvironment:
    """The opening messages are the row's prompt; the first answer is scored by `reward.function` and ends the episode.

    reward: a RewardConfig as a dict; environments of one process share the runner, and so its worker processes, of equal configurations.
    system: a system message to put first where the row brings none.

    `step` raises RewardFailure when the function raises, hangs, crashes or does not return a number; that is never a reward of 0.
    """

    def __init__(self, task: Task, *, reward: Mapping[str, Any], system: str = "") -> None:
        payload = dict(task.payload)
        messages = payload.pop(MESSAGES_KEY, None)
        self.row = payload
        self.messages: list[Message] = messages_of(payload.get("prompt")) if messages is None else list(messages)
        if system and self.messages[0]["role"] not in ("system", "developer"):
            self.messages.insert(0, {"role": "system", "content": system})
        self._runner = shared_runner(reward_config(dict(reward)))

    async def reset(self, context: Context) -> Sequence[Message]:
        return self.messages

    async def step(self, action: Action) -> StepResult:
        began = time.monotonic()
        score = await self._runner.score(action.text, self.row, messages=self.messages)
        return StepResult(reward=score, terminated=True, info={"reward_s": time.monotonic() - began})

    def tools(self) -> Sequence[Mapping[str, Any]]:
        return []

    async def close(self) -> None:
        """Nothing belongs to the episode: the runner outlives it."""

    @classmethod
    async def shutdown(cls) -> None:
        """End the reward processes of this worker; called once, after its last episode."""
        await asyncio.to_thread(close_shared)
