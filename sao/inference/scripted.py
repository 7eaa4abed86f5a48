"""A deterministic engine without weights, for tests only: nothing in `sao train` can be configured to use it.

Tokens are a pure function of the ids so far, the seed and nothing else, so they do not depend on timing, batching or which engine of a pool
serves them. A test may let its own model sample (`policy`), set latencies, and make it fail.
"""

from __future__ import annotations

import asyncio
import math
import time
import zlib
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from sao.errors import EngineFailure, PublishFailure
from sao.inference.failures import GenerationLost, RequestRefused
from sao.inference.prefill import SessionPrefill
from sao.inference.protocol import Canary, EngineSnapshot, GenerateRequest, Generation, GenerationFinish, PublishReport
from sao.weights.bundle import WeightBundle

# (ids so far) -> (token, its log-prob): for example a torch model, sampled by the test.
Policy = Callable[[Sequence[int]], tuple[int, float]]


def _mix(state: int, token: int) -> int:
    return zlib.crc32(token.to_bytes(4, "little"), state)


class ScriptedEngine:
    """Implements `sao.inference.protocol.Engine`.

    vocabulary: default tokens are below it. stop_one_in: a stop id comes about once in so many tokens. policy: replaces the default tokens and
    log-probs. token_s(request): seconds per token, awaited through `sleep` (give a fake clock's). tick: tokens sampled between two looks at the
    event loop. fault(request, tokens so far): raise there to fail. on_publish(bundle, version): load weights of a policy.
    canary_gap(canary): what the canary comparison finds. block: size of a prefix-cache block.
    """

    def __init__(
        self,
        name: str = "scripted",
        *,
        version: int = 0,
        incarnation: int = 0,
        vocabulary: int = 64,
        context: int = 4096,
        stop_one_in: int = 8,
        policy: Policy | None = None,
        token_s: Callable[[GenerateRequest], float] | None = None,
        publish_s: float = 0.0,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
        clock: Callable[[], float] = time.monotonic,
        tick: int = 8,
        fault: Callable[[GenerateRequest, int], None] | None = None,
        on_publish: Callable[[WeightBundle, int], None] | None = None,
        canary_gap: Callable[[Canary], float] | None = None,
        canary_tolerance: float = 0.005,
        block: int = 16,
    ) -> None:
        self.name = name
        self.version = version
        self.incarnation = incarnation
        self.published: list[int] = []
        self._vocabulary, self._context, self._stop_one_in = vocabulary, context, stop_one_in
        self._policy, self._token_s, self._publish_s = policy, token_s, publish_s
        self._sleep, self._clock, self._tick, self._fault = sleep, clock, tick, fault
        self._on_publish, self._canary_gap, self._tolerance = on_publish, canary_gap, canary_tolerance
        self._block = block
        self._cache: set[tuple[str, int]] = set()
        self._prefill = SessionPrefill(block)
        self._publishing = self._drained = False
        self._held: list[asyncio.Future[bool]] = []
        self._idle = asyncio.Event()
        self._idle.set()
        self._drains = 0
        self._dead = ""
        self._fresh_lineage = False
        self._running = self._waiting = 0
        self._queries = self._hits = self._generated = self._prompt = self._aborted = 0
        self._busy_s = self._stall_s = 0.0
        self._born = clock()

    def kill(self, reason: str = "killed") -> None:
        """Everything in flight, and everything later, raises EngineFailure."""
        self._dead = f"engine {self.name}: {reason}"
        self._publishing = self._drained = False
        self._release(drained=False)

    def _release(self, drained: bool) -> None:
        for ticket in self._held:
            if not ticket.done():
                ticket.set_result(drained)
        self._held.clear()

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[Generation, None]:
        spec, prompt = request.sampling, [int(token) for token in request.token_ids]
        if spec.max_tokens < 1 or not 1 <= len(prompt) < self._context:
            raise RequestRefused(f"request {request.request_id}: budget {spec.max_tokens}, prompt of {len(prompt)} tokens, context {self._context}")
        arrived = self._clock()
        self._waiting += 1
        try:
            while self._publishing or self._drained:
                ticket: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
                self._held.append(ticket)
                if await ticket:
                    empty = np.empty(0, np.int32)
                    yield Generation(empty, empty.astype(np.float32), empty, "drained", self.name, len(prompt))
                    return
        finally:
            self._waiting -= 1
        if self._dead:
            raise EngineFailure(self._dead)
        if request.pinned_version is not None and request.pinned_version != self.version:
            raise RequestRefused(f"request {request.request_id} is pinned to version {request.pinned_version}, engine {self.name} has {self.version}")
        salt, started, drains = f"{self.incarnation}:{self.version}", self._clock(), self._drains
        cached = self._look_up(prompt, salt)
        self._running += 1
        self._idle.clear()
        tokens: list[int] = []
        logprobs: list[float] = []
        versions: list[int] = []
        sent, finished = 0, False
        deadline = math.inf if request.time_limit_s is None else arrived + request.time_limit_s
        try:
            while not finished:
                finish: GenerationFinish | None = None
                if self._drains != drains:
                    finish = "drained"
                elif self._clock() >= deadline:
                    finish = "time"
                for _ in range(0 if finish else self._tick):
                    if self._fault is not None:
                        self._fault(request, len(tokens))
                    if self._token_s is not None:
                        await self._sleep(self._token_s(request))
                    if self._dead:
                        raise GenerationLost(self._dead, len(tokens))
                    if self._drains != drains:
                        finish = "drained"
                        break
                    if self._clock() >= deadline:
                        finish = "time"
                        break
                    token, logprob = self._sample(prompt + tokens, spec.seed, spec.stop)
                    tokens.append(token)
                    logprobs.append(logprob)
                    versions.append(self.version)
                    self._generated += 1
                    if token in spec.stop:
                        finish = "stop"
                        break
                    if len(tokens) == spec.max_tokens or len(prompt) + len(tokens) == self._context:
                        finish = "length"
                        break
                finished = finish is not None
                if finished:
                    self._store(prompt + tokens, salt)
                    self._prefill.observe(request.session, salt, np.asarray(prompt, np.int32), np.asarray(tokens, np.int32), cached)
                if finished or request.stream:
                    now = self._clock()
                    yield Generation(
                        token_ids=np.asarray(tokens[sent:], np.int32),
                        logprobs=np.asarray(logprobs[sent:], np.float32),
                        versions=np.asarray(versions[sent:], np.int32),
                        finish=finish,
                        engine=self.name,
                        prompt_tokens=len(prompt),
                        cached_tokens=cached,
                        queue_s=started - arrived,
                        generate_s=now - started,
                    )
                    sent = len(tokens)
                if not finished:
                    await asyncio.sleep(0)
        finally:
            self._running -= 1
            self._busy_s += self._clock() - started
            if not finished:
                self._aborted += 1
            if self._running == 0:
                self._idle.set()

    def _sample(self, ids: list[int], seed: int | None, stop: tuple[int, ...]) -> tuple[int, float]:
        if self._policy is not None:
            return self._policy(ids)
        state = zlib.crc32(np.asarray(ids, np.int32).tobytes(), (seed or 0) & 0xFFFFFFFF)
        draw = _mix(state, len(ids))
        token = stop[draw % len(stop)] if stop and draw % self._stop_one_in == 0 else draw // self._stop_one_in % self._vocabulary
        return token, self._logprob(ids, token)

    @staticmethod
    def _logprob(ids: list[int], token: int) -> float:
        """A made-up log-prob in [-3, 0), a function of the ids up to and including the token: generate and score agree."""
        return -3.0 * (1 + _mix(zlib.crc32(np.asarray(ids, np.int32).tobytes()), token) % 1000) / 1001

    def _blocks(self, tokens: list[int], count: int) -> list[int]:
        digests, state = [], 0
        for index in range(count):
            state = zlib.crc32(np.asarray(tokens[index * self._block : (index + 1) * self._block], np.int32).tobytes(), state)
            digests.append(state)
        return digests

    def _look_up(self, prompt: list[int], salt: str) -> int:
        """Cached prompt tokens: whole leading blocks seen under this salt, never the whole prompt."""
        self._queries += len(prompt)
        self._prompt += len(prompt)
        hits = 0
        for digest in self._blocks(prompt, (len(prompt) - 1) // self._block):
            if (salt, digest) not in self._cache:
                break
            hits += self._block
        self._hits += hits
        return hits

    def _store(self, tokens: list[int], salt: str) -> None:
        self._cache.update((salt, digest) for digest in self._blocks(tokens, (len(tokens) - 1) // self._block))

    async def publish(self, bundle: WeightBundle, version: int, canary: Canary | None = None) -> PublishReport:
        if self._dead:
            raise EngineFailure(self._dead)
        if not self._fresh_lineage:
            if version == self.version:
                return PublishReport(self.name, version, 0.0, 0.0, 0.0, self._running, 0.0, 0)
            if version < self.version:
                raise PublishFailure(f"engine {self.name} has version {self.version}; version {version} is older")
        self._publishing = True
        began, in_flight = self._clock(), self._running
        try:
            if self._publish_s:
                await self._sleep(self._publish_s)
            if self._dead:
                raise EngineFailure(self._dead)
            if self._on_publish is not None:
                self._on_publish(bundle, version)
            gap = self._canary_gap(canary) if self._canary_gap is not None and canary is not None else 0.0
            if not gap <= self._tolerance:
                raise PublishFailure(f"canary log-probs of version {version} on engine {self.name} differ from the trainer's by {gap:.3g}")
            self.version = version
            self.published.append(version)
            self._fresh_lineage = False
        finally:
            self._publishing = False
            if not self._drained:
                self._release(drained=False)
        took = self._clock() - began
        self._stall_s += took
        return PublishReport(self.name, version, 0.0, took, 0.0, in_flight, gap, len(bundle.specs))

    async def begin_incarnation(self, incarnation: int) -> None:
        self.incarnation = incarnation
        self._fresh_lineage = True

    async def score(self, token_ids: Sequence[int]) -> NDArray[np.float32]:
        """Log-probs of the default tokens' distribution (a `policy` is not asked)."""
        ids = [int(token) for token in token_ids]
        return np.asarray([self._logprob(ids[:at], ids[at]) for at in range(1, len(ids))], np.float32)

    async def drain(self, export: bool = True) -> int:
        self._drained = True
        if not export:
            await self._idle.wait()
            return 0
        self._drains += 1
        given_back = self._running + len(self._held)
        self._release(drained=True)
        return given_back

    async def sleep(self) -> None:
        await self.drain()
        self._cache.clear()

    async def wake(self) -> None:
        self._drained = False
        if not self._publishing:
            self._release(drained=False)

    async def snapshot(self) -> EngineSnapshot:
        if self._dead:
            raise EngineFailure(self._dead)
        now = self._clock()
        return EngineSnapshot(
            engine=self.name,
            version=self.version,
            running=self._running,
            waiting=self._waiting,
            kv_use=0.0,
            prefix_queries=self._queries,
            prefix_hits=self._hits,
            generated_tokens=self._generated,
            prompt_tokens=self._prompt,
            reprefill_tokens=self._prefill.tokens,
            aborted_requests=self._aborted,
            busy_s=self._busy_s,
            uptime_s=now - self._born,
            publish_stall_s=self._stall_s,
            at=now,
        )

    async def close(self) -> None:
        self.kill("closed")
