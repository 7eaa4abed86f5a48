"""A time limit whose clock can stand still."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable

LOOK_AGAIN_S = 0.02  # how late a limit may end that was reached while its clock stood


@contextlib.asynccontextmanager
async def time_limit(seconds: float, stood_s: Callable[[], float] = lambda: 0.0) -> AsyncIterator[asyncio.Timeout]:
    """`asyncio.timeout`, but what `stood_s` (cumulative seconds) grows by meanwhile does not count. Raises TimeoutError; the scope says whether it expired."""
    loop = asyncio.get_running_loop()
    end = loop.time() + seconds - stood_s()
    timer: asyncio.TimerHandle | None = None

    def look() -> None:
        nonlocal timer
        left = end + stood_s() - loop.time()
        if left > 0:
            timer = loop.call_later(max(left, LOOK_AGAIN_S), look)
        else:
            scope.reschedule(loop.time())

    async with asyncio.timeout(None) as scope:
        timer = loop.call_later(max(0.0, seconds), look)
        try:
            yield scope
        finally:
            timer.cancel()
