"""The time an episode has."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

from sao.timeouts import time_limit

T = TypeVar("T")


class OutOfTime(Exception):
    """The episode's deadline passed."""


class Clock:
    """Runs for `limit_s` seconds from its making; time by which `outage_s` (cumulative) grows does not count. `deadline`: its end, were there no outage."""

    def __init__(self, limit_s: float, outage_s: Callable[[], float] = lambda: 0.0) -> None:
        self.limit_s = limit_s
        self.deadline = time.monotonic() + limit_s
        self._outage_s = outage_s
        self._outage_before_s = outage_s()

    def left(self) -> float:
        """Seconds, above 0; raises OutOfTime."""
        left = self.deadline + self._outage_s() - self._outage_before_s - time.monotonic()
        if left <= 0:
            raise OutOfTime
        return left

    async def within(self, call: Callable[[], Awaitable[T]], grace_s: float = 0.0) -> T:
        """Await `call()` until the deadline (and `grace_s` more); a cancellation that nobody asked of this task is an error of the callee, not the end of the worker."""
        limit = time_limit(self.left() + grace_s, self._outage_s)
        try:
            async with limit as scope:
                return await call()
        except TimeoutError:
            if scope.expired():
                raise OutOfTime from None
            raise
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            raise RuntimeError("it was cancelled from within") from None
