"""The thread that owns one vLLM engine: admission, stepping, publication, draining.

Everything that touches the engine happens here, strictly between two of its steps, so no lock is needed and a weight version is exact: a
step runs under one version, and the tokens it returns carry it. Callers (coroutines on any event loop) put commands in a queue; results go
back one `call_soon_threadsafe` per loop and step.

Admission is ours, not vLLM's: a request is given to vLLM only when it can run, and its cache salt is set at that moment. A request that
waits during a publication is therefore salted after it, and never reads KV of older weights.
"""

from __future__ import annotations

import asyncio
import logging
import math
import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar, cast

import numpy as np
from numpy.typing import NDArray

from sao.errors import EngineFailure, PublishFailure, SaoError
from sao.inference.failures import GenerationLost, RequestRefused
from sao.inference.prefill import SessionPrefill
from sao.inference.protocol import Canary, Generation, GenerationFinish, PublishReport
from sao.inference.vllm_records import Counters, Job, Result, Turn, sampled_logprobs, sampling_params, spread
from sao.weights.bundle import WeightBundle

log = logging.getLogger(__name__)
T = TypeVar("T")


class EngineThread:
    """Runs `build()` (-> vLLM LLMEngine) and then the engine, on one daemon thread, until `close`."""

    def __init__(
        self,
        build: Callable[[], Any],
        *,
        name: str,
        slots: int,
        kv_on_publish: str,
        canary_tolerance: float,
        incarnation: int,
        interval_s: float = 0.0,
    ) -> None:
        self.name = name
        self.version = 0
        self.incarnation = incarnation
        self._interval_s = interval_s
        self.counters = Counters()
        self.prefill = SessionPrefill(1)
        self.failure: str | None = None
        self.turn: Turn | None = None  # None while the thread waits for something to do
        self.manifest: Any = None
        self._build = build
        self._slots = slots
        self._recompute = kv_on_publish == "recompute"
        self._tolerance = canary_tolerance
        self._fresh_lineage = False
        self._unfit = ""
        self._open = True
        self._asleep = False
        self._stop = False
        self._serial = 0
        self._live: dict[str, Job] = {}
        self._waiting: deque[Job] = deque()
        self._idle: list[Future[int]] = []
        self._commands: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._outbox: dict[asyncio.AbstractEventLoop, list[tuple[asyncio.Queue[Result], Result]]] = {}
        self._engine: Any = None
        self._ready: Future[None] = Future()
        self._thread = threading.Thread(target=self._run, name=f"engine-{name}", daemon=True)

    # -- called from any thread -------------------------------------------------------------------------------------------------------

    def start(self, timeout: float) -> None:
        """Block until the engine is built; raises what building raised, or TimeoutError."""
        self._thread.start()
        self._ready.result(timeout)

    def submit(self, job: Job) -> None:
        self._put(lambda: self._enqueue(job))

    def cancel(self, job: Job) -> None:
        """Forget a request; nothing to do once the thread is gone."""
        self._commands.put(lambda: self._cancel(job))

    def call(self, function: Callable[[], T]) -> Future[T]:
        """Run `function` on the engine thread between two steps."""
        future: Future[T] = Future()

        def run() -> None:
            if not future.set_running_or_notify_cancel():
                return
            if self.failure is not None:
                future.set_exception(EngineFailure(self.failure))
                return
            try:
                future.set_result(function())
            except SaoError as error:
                future.set_exception(error)
            except Exception as error:
                # Nobody knows what state the engine is in.
                log.exception("engine %s stopped", self.name)
                self._die(f"engine {self.name} died: {type(error).__name__}: {error}")
                future.set_exception(EngineFailure(self.failure))

        self._put(run)
        return future

    def _put(self, command: Callable[[], None]) -> None:
        if not self._thread.is_alive():
            raise EngineFailure(self.failure or f"engine {self.name} is not running")
        self._commands.put(command)

    def close(self, timeout: float = 30.0) -> None:
        def stop() -> None:
            self._stop = True

        self._commands.put(stop)
        self._thread.join(timeout)

    @property
    def running(self) -> int:
        return max(0, len(self._live) - self.counters.waiting)

    @property
    def waiting(self) -> int:
        """Requests at our gate and in vLLM's queue."""
        return len(self._waiting) + self.counters.waiting

    # -- the thread -------------------------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._engine = self._build()
            self._engine.logger_manager = self.counters
            self.prefill = SessionPrefill(self._engine.vllm_config.cache_config.block_size)
            self._label()
        except BaseException as error:  # noqa: BLE001 - it is raised again where `start` waits
            self._ready.set_exception(error)
            return
        self._ready.set_result(None)
        try:
            while not self._stop and self.failure is None:
                began = time.monotonic()
                self.turn = Turn(began)
                self._take_commands(block=not (self._live or (self._open and self._waiting)))
                self._expire()
                self._admit()
                if self._engine.has_unfinished_requests():
                    self._step()
                if not self._live and self._idle:
                    for idle in self._idle:
                        idle.set_result(0)
                    self._idle.clear()
                self._flush()
                if self._live:
                    time.sleep(max(0.0, self._interval_s - (time.monotonic() - began)))
            self._die(self.failure or f"engine {self.name} was closed")
        except Exception as error:
            log.exception("engine %s stopped", self.name)
            self._die(f"engine {self.name} died: {type(error).__name__}: {error}")
        self._engine.engine_core.shutdown()
        # Commands that arrive from now on answer with the failure, so nobody waits for a dead thread.
        while not self._stop:
            self._take_commands(block=True)
            self._flush()
        self._take_commands(block=False)
        self._flush()

    def _take_commands(self, block: bool) -> None:
        if block:
            deadline = min((job.deadline for job in self._waiting), default=math.inf)
            self.turn = None
            try:
                command = self._commands.get(timeout=max(0.0, min(deadline - time.monotonic(), threading.TIMEOUT_MAX)))
            except queue.Empty:
                return
            self.turn = Turn(time.monotonic())
            command()
        while True:
            try:
                command = self._commands.get_nowait()
            except queue.Empty:
                return
            command()

    def _flush(self) -> None:
        for loop, items in self._outbox.items():
            try:
                loop.call_soon_threadsafe(_hand_over, items)
            except RuntimeError:
                log.warning("engine %s: %d results for an event loop that is closed", self.name, len(items))
        self._outbox = {}

    def _deliver(self, job: Job, result: Result) -> None:
        self._outbox.setdefault(job.loop, []).append((job.results, result))

    def _die(self, reason: str) -> None:
        self.failure = reason
        self._fail_all(reason)
        for idle in self._idle:
            idle.set_exception(EngineFailure(reason))
        self._idle.clear()
        self._flush()

    def _fail_all(self, reason: str) -> None:
        states = self._engine.output_processor.request_states
        for job in self._live.values():
            state = states.get(job.internal)
            self._deliver(job, GenerationLost(reason, state.detokenizer.num_output_tokens() if state is not None else 0))
        for job in self._waiting:
            self._deliver(job, EngineFailure(reason))
        self.counters.aborted += len(self._live)
        self._live.clear()
        self._waiting.clear()

    # -- requests ---------------------------------------------------------------------------------------------------------------------

    def _enqueue(self, job: Job) -> None:
        if self.failure is not None or self._unfit:
            self._deliver(job, EngineFailure(self.failure or self._unfit))
            return
        self._waiting.append(job)

    def _admit(self) -> None:
        while self._open and self._waiting and len(self._live) < self._slots:
            job = self._waiting.popleft()
            pinned = job.request.pinned_version
            if pinned is not None and pinned != self.version:
                self._deliver(
                    job, RequestRefused(f"request {job.request.request_id} is pinned to version {pinned}, engine {self.name} has {self.version}")
                )
                continue
            self._serial += 1
            job.key, job.salt, job.marks = f"{self._serial}", self._lineage(), [(0, self.version)]
            try:
                job.internal = self._add(job.key, job.request.token_ids.tolist(), sampling_params(job.request), job.salt)
            except ValueError as error:
                self._deliver(job, RequestRefused(f"engine {self.name} refused request {job.request.request_id}: {error}"))
                continue
            self._live[job.key] = job

    def _add(self, key: str, token_ids: list[int], params: Any, salt: str, priority: int = 0) -> str:
        from vllm.inputs.engine import tokens_input

        return cast(str, self._engine.add_request(key, tokens_input(token_ids, cache_salt=salt), params, priority=priority))

    def _cancel(self, job: Job) -> None:
        if self._live.pop(job.key, None) is not None:
            self._engine.abort_request([job.internal], internal=True)
            self.counters.aborted += 1
        elif job in self._waiting:
            self._waiting.remove(job)

    def _expire(self) -> None:
        """End the requests whose time is up with what they have."""
        now = time.monotonic()
        for job in [job for job in self._waiting if job.deadline <= now]:
            self._waiting.remove(job)
            self._deliver(job, self._untouched(job, "time"))
        late = [job for job in self._live.values() if job.deadline <= now]
        for job in late:
            self._deliver(job, self._so_far(job, "time"))
            del self._live[job.key]
        if late:
            self._engine.abort_request([job.internal for job in late], internal=True)

    def _untouched(self, job: Job, finish: GenerationFinish) -> Generation:
        """The end of a request that never ran."""
        empty = np.empty(0, np.int32)
        return Generation(empty, empty.astype(np.float32), empty, finish, self.name, len(job.request.token_ids))

    def _so_far(self, job: Job, finish: GenerationFinish) -> Generation:
        """What a running request has sampled and not been handed yet, as its end."""
        state = self._engine.output_processor.request_states[job.internal]
        tokens = list(state.detokenizer.output_token_ids[job.sent :])
        flat = state.logprobs_processor.logprobs[job.sent :] if tokens else None
        return self._generation(job, tokens, flat, finish, None, state.num_cached_tokens, state.stats.scheduled_ts)

    def _step(self) -> list[Any]:
        """One engine step; delivers what belongs to jobs and returns the outputs that do not (scoring)."""
        began = time.monotonic()
        self.turn = Turn(began, step=True)
        outputs = self._engine.step()
        self.turn = Turn(time.monotonic())
        self.counters.busy_s += time.monotonic() - began
        foreign = []
        for output in outputs:
            job = self._live.get(output.request_id)
            if job is None:
                foreign.append(output)
                continue
            if output.finished:
                del self._live[job.key]
            try:
                self._deliver(job, self._chunk(job, output))
            except EngineFailure as failure:
                self._deliver(job, failure)
                if not output.finished:
                    self._live.pop(job.key)
                    self._engine.abort_request([job.internal], internal=True)
        return foreign

    def _chunk(self, job: Job, output: Any) -> Generation:
        completion = output.outputs[0]
        finish: GenerationFinish | None = None
        if output.finished:
            if completion.finish_reason not in ("stop", "length"):
                raise EngineFailure(f"engine {self.name} ended request {job.request.request_id} with {completion.finish_reason!r}")
            finish = completion.finish_reason
        stamps = output.metrics
        return self._generation(
            job, completion.token_ids, completion.logprobs, finish, completion.weight_versions, output.num_cached_tokens or 0, stamps.scheduled_ts
        )

    def _generation(
        self, job: Job, token_ids: Any, logprobs: Any, finish: GenerationFinish | None, spans: Any, cached: int, scheduled: float
    ) -> Generation:
        """Tokens of this chunk with their record. `spans` is vLLM's account of the versions of the whole output, given at its end."""
        tokens = np.asarray(token_ids, np.int32)
        total = job.sent + len(tokens)
        versions = spread(job.marks, total)
        if spans is not None and spread([(s.start, int(s.version.rpartition(":")[2])) for s in spans], total).tolist() != versions.tolist():
            raise EngineFailure(f"engine {self.name} and vLLM disagree about the weight versions of request {job.request.request_id}")
        now = time.monotonic()
        chunk = Generation(
            token_ids=tokens,
            logprobs=sampled_logprobs(logprobs, len(tokens)),
            versions=versions[job.sent :],
            finish=finish,
            engine=self.name,
            prompt_tokens=len(job.request.token_ids),
            cached_tokens=cached,
            queue_s=max(0.0, (scheduled or now) - job.arrived),
            generate_s=max(0.0, now - (scheduled or now)),
        )
        job.sent = total
        if finish is not None:
            self.prefill.observe(job.request.session, job.salt, job.request.token_ids, tokens, cached)
        return chunk

    # -- control ----------------------------------------------------------------------------------------------------------------------

    def drain(self, export: bool) -> int | Future[int]:
        """Close the gate. export: hand every request back as it stands; otherwise a future that resolves when those running have ended."""
        self._open = False
        if not export:
            idle: Future[int] = Future()
            self._idle.append(idle)
            return idle
        drained = [*self._live.values(), *self._waiting]
        for job in self._live.values():
            self._deliver(job, self._so_far(job, "drained"))
        self._engine.abort_request([job.internal for job in self._live.values()], internal=True)
        for job in self._waiting:
            self._deliver(job, self._untouched(job, "drained"))
        self._live.clear()
        self._waiting.clear()
        return len(drained)

    def sleep(self) -> None:
        self.drain(export=True)
        self._engine.reset_prefix_cache()
        if self._engine.vllm_config.model_config.enable_sleep_mode and not self._asleep:
            self._engine.sleep(level=1)
            self._asleep = True

    def wake(self) -> None:
        if self._asleep:
            self._engine.wake_up()
            self._asleep = False
        self._open = True

    def begin_incarnation(self, incarnation: int) -> None:
        """Versions start to repeat (the learner went back to a checkpoint): the next publication may carry any version."""
        self.incarnation = incarnation
        self._fresh_lineage = True
        self._label()

    def _lineage(self) -> str:
        return f"{self.incarnation}:{self.version}"

    def _label(self) -> None:
        self._engine.set_weight_version(self._lineage())

    # -- weights ----------------------------------------------------------------------------------------------------------------------

    def publish(self, bundle: WeightBundle, version: int, canary: Canary | None, asked: float) -> PublishReport:
        """See `Engine.publish`. A refusal before loading leaves the engine as it was; a failure after it leaves it unfit to serve until weights
        arrive that the canary confirms."""
        began = time.monotonic()
        if not self._fresh_lineage and not self._unfit:
            if version == self.version:
                return PublishReport(self.name, version, 0.0, 0.0, 0.0, len(self._live), 0.0, 0)
            if version < self.version:
                raise PublishFailure(f"engine {self.name} has version {self.version}; version {version} is older")
        if self.manifest is not None:
            self.manifest.check(bundle)
        self._return_unstarted()
        self._fail_pinned(version)
        in_flight = len(self._live)
        try:
            self._engine.collective_rpc("start_weight_update")
            self._engine.collective_rpc("update_weights", args=({"bundle": bundle},))
            self._engine.collective_rpc("finish_weight_update")
        except Exception as error:
            self._die(f"engine {self.name} could not load version {version}: {error}")
            raise error if isinstance(error, PublishFailure) else PublishFailure(f"{self.failure}") from error
        previous, self.version = self.version, version
        states = self._engine.output_processor.request_states
        for job in self._live.values():
            job.marks.append((states[job.internal].detokenizer.num_output_tokens(), version))
        self._label()
        if self._recompute:
            self._engine.reset_prefix_cache(reset_running_requests=True)
        loaded = time.monotonic()
        self.counters.stall_s += loaded - began
        gap = self._canary_gap(canary)
        if not gap <= self._tolerance:
            self.version = previous
            self._unfit = f"engine {self.name} holds unconfirmed weights: the canary of version {version} differs by {gap:.3g}"
            running = [job.internal for job in self._live.values()]
            self._fail_all(self._unfit)
            self._engine.abort_request(running, internal=True)
            self._engine.reset_prefix_cache()
            self._label()
            raise PublishFailure(
                f"canary log-probs of version {version} on engine {self.name} differ from the trainer's by {gap:.3g} (tolerance {self._tolerance:g})"
            )
        self._unfit, self._fresh_lineage = "", False
        return PublishReport(self.name, version, began - asked, loaded - began, time.monotonic() - loaded, in_flight, gap, len(bundle.specs))

    def _return_unstarted(self) -> None:
        """Take back requests that vLLM has not begun to read: they start after the publication, under the new salt."""
        scheduler = self._engine.engine_core.engine_core.scheduler
        returned = []
        for job in self._live.values():
            state = scheduler.requests.get(job.internal)
            if state is not None and state.status.name == "WAITING" and state.num_computed_tokens == 0 and state.num_output_tokens == 0:
                returned.append(job)
        for job in returned:
            self._engine.abort_request([job.internal], internal=True)
            del self._live[job.key]
        self._waiting.extendleft(reversed(returned))

    def _fail_pinned(self, version: int) -> None:
        for job in [j for j in self._live.values() if j.request.pinned_version is not None]:
            self._cancel(job)
            self._deliver(
                job, RequestRefused(f"version {version} replaced version {job.request.pinned_version}, to which {job.request.request_id} is pinned")
            )

    def _canary_gap(self, canary: Canary | None) -> float:
        """Largest |engine - trainer| over the canary; NaN when a log-prob is."""
        if canary is None:
            return 0.0
        scored = self.score(list(canary.token_ids))
        return float(np.abs(scored - np.asarray(canary.logprobs, np.float32)).max(initial=0.0))

    def score(self, token_ids: list[int]) -> NDArray[np.float32]:
        """Log-probs of tokens 1..n-1, float32[n-1]; running requests keep stepping meanwhile. Never reads the prefix cache."""
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        params = SamplingParams(
            max_tokens=1,
            temperature=0.0,
            prompt_logprobs=0,
            flat_logprobs=True,
            detokenize=False,
            ignore_eos=True,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        self._serial += 1
        key = f"score-{self._serial}"
        try:
            self._add(key, token_ids, params, f"score-{self._serial}", priority=-1)
        except ValueError as error:
            raise EngineFailure(f"engine {self.name} cannot score {len(token_ids)} tokens: {error}") from error
        while True:
            done = [output for output in self._step() if output.request_id == key]
            self._flush()
            if done:
                break
        self.counters.generated -= 1
        self.counters.prompt -= len(token_ids)
        return sampled_logprobs(done[0].prompt_logprobs[1:], len(token_ids) - 1)


def _hand_over(items: list[tuple[asyncio.Queue[Result], Result]]) -> None:
    for results, result in items:
        results.put_nowait(result)
