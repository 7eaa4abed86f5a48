"""Runs a user's reward function so that whatever it does stays its own affair.

Coroutine functions run in the event loop under a time limit; others run in worker processes that are killed when they overrun. Whatever is
not a finite number becomes a typed, counted RewardFailure and never a reward.
"""

from __future__ import annotations

import asyncio
import atexit
import dataclasses
import math
import queue
import threading
import weakref
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from sao.config import RewardConfig
from sao.environment import Message
from sao.errors import ConfigError, RewardFailure
from sao.rewards.function import RewardFunction, as_score, load_reward, raised
from sao.rewards.process import RewardProcess

KINDS = ("raised", "timeout", "not_a_number", "crashed")


def check(function: str) -> RewardFunction:
    """Preflight of `reward.function`: import it and verify its signature. Raises ConfigError naming the key and the mend."""
    return load_reward(function)


def check_config(config: RewardConfig) -> RewardFunction:
    """Preflight of the whole `reward` group. Raises ConfigError naming the key and the mend."""
    if config.mode not in ("auto", "async", "process"):
        raise ConfigError(f"reward.mode={config.mode!r} is not auto, async or process")
    if not (isinstance(config.timeout_s, int | float) and 0 < config.timeout_s < math.inf):
        raise ConfigError(f"reward.timeout_s={config.timeout_s!r} must be a number of seconds above 0")
    if config.processes < 1:
        raise ConfigError(f"reward.processes={config.processes} must be at least 1")
    function = check(config.function)
    if config.mode == "async" and not function.is_async:
        raise ConfigError(f"reward.mode=async but {config.function} is not a coroutine function; write `async def` or set reward.mode=auto")
    return function


class RewardRunner:
    """Scores completions with one function. Serves any number of concurrent `score` calls, also from several event loops.

    counters: scores given under `scored`, failures under their kind.
    """

    def __init__(self, config: RewardConfig) -> None:
        self.config = config
        self.function = check_config(config)
        self.counters: Counter[str] = Counter({"scored": 0, **dict.fromkeys(KINDS, 0)})
        self._abandoned: set[asyncio.Future[Any]] = set()
        self._closed = False
        self._processes: list[RewardProcess] = []
        if config.mode == "process" or not self.function.is_async:
            self._processes = [RewardProcess(config.function) for _ in range(config.processes)]
            # As many threads as processes: a thread that runs always finds one free, and the time limit starts when the function does.
            self._threads = ThreadPoolExecutor(config.processes, thread_name_prefix="reward")
            self._free: queue.SimpleQueue[RewardProcess] = queue.SimpleQueue()
            for process in self._processes:
                self._free.put(process)
        self._finalizer = weakref.finalize(self, _close_all, self._processes)

    @property
    def pids(self) -> list[int]:
        """The worker processes alive now."""
        return [pid for process in self._processes if (pid := process.pid) is not None]

    async def score(self, completion: str, row: Mapping[str, Any], messages: Sequence[Message] | None = None) -> float:
        """The function's value for one completion.

        completion: the policy's text. row: the task's columns. messages: the conversation before it, for functions that take `messages`.

        Raises RewardFailure(kind): `raised`, `timeout` (over reward.timeout_s), `not_a_number` or `crashed` (its process died).
        """
        try:
            if self._closed:
                raise RewardFailure(f"the reward runner of {self.config.function} is closed", "crashed")
            if self._processes:
                loop = asyncio.get_running_loop()
                score = await loop.run_in_executor(self._threads, self._in_process, completion, row, messages)
            else:
                score = await self._in_loop(completion, row, messages)
        except RewardFailure as failure:
            self.counters[str(failure.args[1])] += 1
            raise
        self.counters["scored"] += 1
        return score

    def metrics(self) -> dict[str, float]:
        """`reward/scored` and `reward/failed_<kind>`, counted since the start."""
        return {"reward/scored": float(self.counters["scored"]), **{f"reward/failed_{kind}": float(self.counters[kind]) for kind in KINDS}}

    def close(self) -> None:
        """Kill the worker processes and wait until they are gone. Calls that run or wait fail with kind crashed. May be called again."""
        self._closed = True
        self._finalizer()
        if self._processes:
            self._threads.shutdown(wait=True)

    def _in_process(self, completion: str, row: Mapping[str, Any], messages: Sequence[Message] | None) -> float:
        process = self._free.get()
        try:
            return process.call(completion, row, messages, self.config.timeout_s)
        finally:
            self._free.put(process)

    async def _in_loop(self, completion: str, row: Mapping[str, Any], messages: Sequence[Message] | None) -> float:
        name = self.config.function
        task = asyncio.ensure_future(_settle(self.function, completion, row, messages))
        try:
            done, _ = await asyncio.wait({task}, timeout=self.config.timeout_s)
        except asyncio.CancelledError:
            task.cancel()
            raise
        if not done:
            # Not awaited: a function that swallows its cancellation would hold the episode for ever.
            task.cancel()
            self._abandoned.add(task)
            task.add_done_callback(self._forget)
            raise RewardFailure(f"reward.function={name} did not answer within reward.timeout_s={self.config.timeout_s:g}", "timeout")
        if task.cancelled():
            raise RewardFailure(f"reward.function={name} cancelled itself", "raised")
        value, failure = task.result()
        if failure is not None:
            raise failure
        try:
            return as_score(value, self.function.style)
        except ValueError as error:
            raise RewardFailure(f"reward.function={name} {error}", "not_a_number") from None

    def _forget(self, task: asyncio.Future[Any]) -> None:
        self._abandoned.discard(task)


async def _settle(
    function: RewardFunction, completion: str, row: Mapping[str, Any], messages: Sequence[Message] | None
) -> tuple[Any, RewardFailure | None]:
    """The function's value or its failure. Only cancellation leaves as an exception: a SystemExit would stop the event loop."""
    try:
        return await function(completion, row, messages), None
    except asyncio.CancelledError:
        raise
    except BaseException as error:  # noqa: BLE001 - turned into a typed failure
        return None, raised(function.name, error)


def _close_all(processes: Sequence[RewardProcess]) -> None:
    for process in processes:
        process.close()


_shared: dict[tuple[Any, ...], RewardRunner] = {}
_shared_lock = threading.Lock()


def shared_runner(config: RewardConfig) -> RewardRunner:
    """The runner of this process for a configuration: made at its first use, closed at exit or by `close_shared`."""
    key = dataclasses.astuple(config)
    with _shared_lock:
        if key not in _shared:
            _shared[key] = RewardRunner(config)
        return _shared[key]


def close_shared() -> None:
    """Close every shared runner of this process; the next `shared_runner` makes a new one."""
    with _shared_lock:
        runners = list(_shared.values())
        _shared.clear()
    for runner in runners:
        runner.close()


def shared_metrics() -> dict[str, float]:
    """The counters of every shared runner of this process, added up; empty when there is none."""
    total: Counter[str] = Counter()
    for runner in list(_shared.values()):
        total.update(runner.metrics())
    return dict(total)


atexit.register(close_shared)
