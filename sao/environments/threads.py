"""Blocking calls of environments that are not coroutines, off the event loop.

A worker plays many episodes on one event loop, so a `reset` or `step` that blocks runs in a thread. The threads are bounded and shared. A call that is
given up on while it runs (the episode's time was up) cannot be ended: its thread is abandoned, counted, and serves again should the call ever return.
When every thread is abandoned, further calls are refused at once, typed, instead of waiting for nothing.
"""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

from sao.errors import EnvironmentFailure

MOST_THREADS = 64
IDLE_S = 10.0  # a thread without work for so long ends

T = TypeVar("T")
log = logging.getLogger(__name__)


class Threads:
    """At most `most` daemon threads, started when there is work for them. `abandoned`: calls that nobody waits for and that have not returned."""

    def __init__(self, most: int = MOST_THREADS) -> None:
        self.most = most
        self.abandoned = 0
        self._started = 0
        self._unfinished = 0  # calls that wait or run
        self._lock = threading.Lock()
        self._jobs: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]]] = queue.SimpleQueue()

    def submit(self, call: Callable[[], T]) -> Future[T]:
        """Run `call` in a thread. Raises EnvironmentFailure when no thread is left that could."""
        future: Future[T] = Future()
        with self._lock:
            if self.abandoned >= self.most:
                raise EnvironmentFailure(f"all {self.most} threads for blocking environments are held by calls that never returned; none is left")
            self._jobs.put((future, call))
            self._unfinished += 1
            if self._started < min(self._unfinished, self.most):
                self._started += 1
                threading.Thread(target=self._serve, name="environment", daemon=True).start()
        return future

    async def run(self, call: Callable[[], T], future: Future[T] | None = None) -> T:
        """Await `call`, or a `future` of it. Cancellation drops a call that waits and abandons one that runs."""
        future = self.submit(call) if future is None else future
        try:
            return await asyncio.wrap_future(future)
        except asyncio.CancelledError:
            if future.running():
                self._abandon(future)
            raise

    async def finish(self, call: Callable[[], None]) -> None:
        """Await `call`, which comes to its turn also when this is cancelled."""
        future = self.submit(call)
        try:
            await asyncio.shield(asyncio.wrap_future(future))
        except asyncio.CancelledError:
            if future.running():
                self._abandon(future)
            raise

    def _abandon(self, future: Future[Any]) -> None:
        with self._lock:
            self.abandoned += 1
        future.add_done_callback(self._returned)

    def _returned(self, future: Future[Any]) -> None:
        with self._lock:
            self.abandoned -= 1

    def _serve(self) -> None:
        while True:
            try:
                future, call = self._jobs.get(timeout=IDLE_S)
            except queue.Empty:
                with self._lock:
                    if self._jobs.empty():
                        self._started -= 1
                        return
                continue
            if future.set_running_or_notify_cancel():
                _settle(future, call)
            with self._lock:
                self._unfinished -= 1


def _settle(future: Future[Any], call: Callable[[], Any]) -> None:
    try:
        result = call()
    except StopIteration as error:  # an asyncio future cannot hold one
        future.set_exception(EnvironmentFailure(f"raised StopIteration: {error}"))
    except Exception as error:  # noqa: BLE001 - handed to whoever awaits the call
        future.set_exception(error)
    except BaseException as error:  # noqa: BLE001 - SystemExit of an environment must not end the worker
        future.set_exception(EnvironmentFailure(f"raised {type(error).__name__}: {error}"))
    else:
        future.set_result(result)


SHARED = Threads()


class Lane:
    """The blocking calls of one episode, one after the other, and its close, exactly once and never beside another call."""

    def __init__(self, threads: Threads = SHARED) -> None:
        self.threads = threads
        self._last: Future[Any] | None = None
        self._closed = False

    async def run(self, call: Callable[[], T]) -> T:
        future = self.threads.submit(call)
        self._last = future
        try:
            return await self.threads.run(call, future)
        except asyncio.CancelledError:
            if future.running():
                log.warning(
                    "a call of an environment was given up and still runs; abandoned: %d of %d threads", self.threads.abandoned, self.threads.most
                )
            raise

    async def close(self, call: Callable[[], None]) -> None:
        """Run `call`; where an abandoned call still runs, return at once and let `call` follow when that one returns."""
        if self._closed:
            return
        self._closed = True
        if self._last is None or self._last.done():
            await self.threads.finish(call)
            return
        self._last.add_done_callback(lambda _: self.threads.submit(call))
