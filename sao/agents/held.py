"""Code of others runs on the event loop that all episodes of a worker share: which runs now, and for how long it held the others up."""

from __future__ import annotations

import logging
import time
import types
from collections import Counter
from collections.abc import Callable, Coroutine, Generator
from functools import partial
from typing import Any, TypeVar

BLOCKED_S = 0.5  # without letting go of the loop; shorter holds are no one's concern

T = TypeVar("T")
log = logging.getLogger(__name__)


@types.coroutine
def watched(work: Coroutine[Any, Any, T], enter: Callable[[], None], leave: Callable[[], None]) -> Generator[Any, Any, T]:
    """Await `work`; `enter` is called before its own code runs and `leave` when it waits, returns or raises."""
    resume = partial(work.send, None)
    while True:
        enter()
        try:
            awaited = resume()
        except StopIteration as done:
            return done.value
        finally:
            leave()
        try:
            resume = partial(work.send, (yield awaited))
        except BaseException as error:  # noqa: BLE001 - a cancellation, or what was awaited has failed: its business
            resume = partial(work.throw, error)


class Held:
    """Times the code of one episode's environment. `seconds`: per method, what it held the loop for in stretches of more than BLOCKED_S.

    record: hears a method's name when its code begins to run, and "" when it no longer does. where: of whom the log speaks.
    """

    def __init__(self, record: Callable[[str], None], where: str) -> None:
        self.record = record
        self.where = where
        self.seconds: Counter[str] = Counter()

    async def run(self, method: str, work: Coroutine[Any, Any, T]) -> T:
        """Await `work`, the code of `method`."""
        began = 0.0

        def enter() -> None:
            nonlocal began
            began = time.monotonic()
            self.record(method)

        def leave() -> None:
            self.record("")
            self._ran(method, time.monotonic() - began)

        return await watched(work, enter, leave)

    def call(self, method: str, function: Callable[[], T]) -> T:
        """`function()`, the code of `method`, which is no coroutine."""
        began = time.monotonic()
        self.record(method)
        try:
            return function()
        finally:
            self.record("")
            self._ran(method, time.monotonic() - began)

    def _ran(self, method: str, seconds: float) -> None:
        if seconds <= BLOCKED_S:
            return
        self.seconds[method] += seconds  # type: ignore[assignment]
        log.warning(
            "%s held the event loop for %.1f s (%s); every other episode of this worker waited: await what takes long, or give it to asyncio.to_thread",
            method,
            seconds,
            self.where,
        )
