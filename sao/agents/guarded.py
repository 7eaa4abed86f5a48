"""An environment as the turn loop calls it: in time, its answers checked, its faults typed, its holds of the event loop counted."""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections.abc import Callable, Mapping
from typing import Any

from sao.agents.clock import Clock, OutOfTime
from sao.agents.held import Held
from sao.agents.observations import check_messages, check_step, check_tools
from sao.environment import Action, Context, Environment, Message, StepResult, Task
from sao.errors import EnvironmentFailure, SystemFailure, UserError

CLOSE_TIMEOUT_S = 10.0
SAID = 300  # characters of a foreign error that a message repeats

log = logging.getLogger(__name__)


class Guarded:
    """One episode's environment. Every method but `close` raises EnvironmentFailure for what the environment does wrong; UserError and the other
    SystemFailures pass through. `held`: how long its methods held the event loop.
    """

    def __init__(self, environment: Environment, task: Task, clock: Clock, record: Callable[[str], None]) -> None:
        """record: hears which of its methods runs (`sao.agents.held`)."""
        self.environment = environment
        self.name = type(environment).__name__
        self.task = task
        self.clock = clock
        self.held = Held(record, f"environment {task.environment}, task {task.task_id}")

    async def reset(self, context: Context) -> list[Message]:
        """The opening messages, at least one."""
        try:
            opening = await self._ask("reset", lambda: self.environment.reset(context))
        except OutOfTime:
            raise EnvironmentFailure(
                f"{self.name}.reset did not return within {self.clock.limit_s:g} s (rollout.time_limit_s){self._blocked('reset')}"
            ) from None
        messages = check_messages(opening, f"{self.name}.reset")
        if not messages:
            raise EnvironmentFailure(f"{self.name}.reset returned no message")
        return messages

    def tools(self) -> list[Mapping[str, Any]]:
        try:
            tools = self.held.call(f"{self.name}.tools", self.environment.tools)
        except (SystemFailure, UserError):
            raise
        except Exception as problem:
            raise self._raised("tools", problem) from problem
        return check_tools(_no_coroutine(tools), f"{self.name}.tools")

    async def step(self, action: Action) -> StepResult:
        try:
            answer = await self._ask("step", lambda: self.environment.step(action))
        except OutOfTime:
            # The policy has done its part: what its turn was worth is unknown, which is not the same as worth nothing.
            raise EnvironmentFailure(
                f"{self.name}.step had not answered task {self.task.task_id} when the episode's time was up "
                f"(rollout.time_limit_s={self.clock.limit_s:g}){self._blocked('step')}"
            ) from None
        return check_step(answer, f"{self.name}.step")

    async def close(self) -> bool:
        """Whether it closed well. A close that does not costs a warning and a count, not the episode's data."""
        try:
            async with asyncio.timeout(CLOSE_TIMEOUT_S):
                await self.held.run(f"{self.name}.close", self._awaited("close", self.environment.close))
        except Exception as problem:
            log.warning("%s.close of task %s raised %s", self.name, self.task.task_id, type(problem).__name__, exc_info=True)
            return False
        return True

    async def _ask(self, method: str, call: Callable[[], Any]) -> Any:
        try:
            return await self.clock.within(lambda: self.held.run(f"{self.name}.{method}", self._awaited(method, call)))
        except (SystemFailure, UserError, OutOfTime):
            raise
        except Exception as problem:
            raise self._raised(method, problem) from problem

    async def _awaited(self, method: str, call: Callable[[], Any]) -> Any:
        work = call()
        if not inspect.isawaitable(work):
            raise EnvironmentFailure(f"{self.name}.{method} must be a coroutine (async def, no yield), returned {type(work).__name__}")
        return _no_coroutine(await work)

    def _raised(self, method: str, problem: BaseException) -> EnvironmentFailure:
        return EnvironmentFailure(f"{self.name}.{method} raised {type(problem).__name__} on task {self.task.task_id}: {short(problem)}")

    def _blocked(self, method: str) -> str:
        seconds = self.held.seconds[f"{self.name}.{method}"]
        return f"; it held the event loop for {seconds:.1f} s of it" if seconds else ""


def short(problem: BaseException) -> str:
    """An error's text, cut."""
    text = str(problem)
    return text if len(text) <= SAID else f"{text[: SAID - 3]}..."


def _no_coroutine(value: Any) -> Any:
    """The value; a coroutine in its place, which is refused by its type, is closed and leaves no warning of Python's behind."""
    if inspect.iscoroutine(value):
        value.close()
    return value
