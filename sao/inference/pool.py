"""Several engines behind one door: routing, continuation of drained turns, publication, and what happens when an engine fails.

Plain asyncio; it knows neither Ray nor vLLM. An engine is reached through an `EngineHandle`, which raises nothing but `SystemFailure`s (a Ray
handle turns the death of its actor into an EngineFailure). Invariants:

- a turn never gets more tokens than its budget, over however many calls and engines it is spread;
- an engine in the pool that is not lent has the pool's version, or is in the middle of the publication that brings it;
- one writer (publication, join, drain, wake, lend, restore) at a time;
- a lent engine keeps the weights it was lent with, serves evaluation and nothing else, and publications pass it by.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Protocol

import numpy as np

from sao.errors import EngineFailure, PublishFailure, SystemFailure
from sao.inference.failures import GenerationLost, RequestRefused
from sao.inference.outage import Outage
from sao.inference.protocol import Canary, Engine, EngineSnapshot, GenerateRequest, Generation, PublishReport
from sao.inference.router import EngineLoad, Router, StickyLeastLoaded
from sao.trajectory import Purpose


class EngineHandle(Protocol):
    """How the pool reaches one engine. `generate` answers with the whole turn; `bundle` may be a reference the engine can resolve."""

    name: str

    async def generate(self, request: GenerateRequest) -> Generation: ...

    async def publish(self, bundle: Any, version: int, canary: Canary | None = None) -> PublishReport: ...

    async def drain(self, export: bool = True) -> int: ...

    async def snapshot(self) -> EngineSnapshot: ...

    async def wake(self) -> None: ...

    async def begin_incarnation(self, incarnation: int) -> None: ...


class LocalHandle:
    """An engine of this process as a handle."""

    def __init__(self, engine: Engine, name: str) -> None:
        self.engine = engine
        self.name = name

    async def generate(self, request: GenerateRequest) -> Generation:
        return await complete(self.engine, request)

    async def publish(self, bundle: Any, version: int, canary: Canary | None = None) -> PublishReport:
        return await self.engine.publish(bundle, version, canary)

    async def drain(self, export: bool = True) -> int:
        return await self.engine.drain(export)

    async def snapshot(self) -> EngineSnapshot:
        return await self.engine.snapshot()

    async def wake(self) -> None:
        await self.engine.wake()

    async def begin_incarnation(self, incarnation: int) -> None:
        await self.engine.begin_incarnation(incarnation)  # type: ignore[attr-defined]


async def complete(engine: Engine, request: GenerateRequest) -> Generation:
    """The one Generation of a request, whatever `stream` says. Cancelling the caller frees the request in the engine."""
    chunks = engine.generate(replace(request, stream=False))
    try:
        async for generation in chunks:
            if generation.finish is not None:
                return generation
    finally:
        close = getattr(chunks, "aclose", None)
        if close is not None:
            await close()
    raise EngineFailure(f"request {request.request_id} ended without an answer")


@dataclass(frozen=True)
class PoolEvent:
    """joined and left change who serves; reissued and lost are about one request. `tokens`: sampled tokens discarded, as far as known."""

    kind: Literal["joined", "left", "reissued", "lost"]
    engine: str
    reason: str = ""
    request: str = ""
    tokens: int = 0


@dataclass
class PoolCounters:
    continued: int = 0
    reissued: int = 0
    lost_requests: int = 0
    lost_tokens: int = 0
    left: int = 0


@dataclass(eq=False)
class _Member:
    handle: EngineHandle
    requests: int = 0
    tokens: int = 0
    draining: bool = False
    lent: bool = False
    # Lent to try weights on: how those were loaded. The next publication reaches the engine, has nothing to load if it brings the same, and ends the loan.
    tried: PublishReport | None = None


@dataclass(eq=False)
class _Turn:
    """What a turn has so far."""

    request: GenerateRequest
    parts: list[Generation] = field(default_factory=list)

    @property
    def used(self) -> int:
        return sum(len(part.token_ids) for part in self.parts)

    @property
    def left(self) -> int:
        return self.request.sampling.max_tokens - self.used

    def next_request(self) -> GenerateRequest:
        if not self.parts:
            return self.request
        tokens = np.concatenate([self.request.token_ids, *(part.token_ids for part in self.parts)]).astype(np.int32)
        return replace(
            self.request,
            request_id=f"{self.request.request_id}+{len(self.parts)}",
            token_ids=tokens,
            sampling=replace(self.request.sampling, max_tokens=self.left),
        )

    def joined(self) -> Generation:
        first, last = self.parts[0], self.parts[-1]
        if len(self.parts) == 1:
            return first
        return replace(
            last,
            token_ids=np.concatenate([part.token_ids for part in self.parts]),
            logprobs=np.concatenate([part.logprobs for part in self.parts]),
            versions=np.concatenate([part.versions for part in self.parts]),
            finish="length" if last.finish == "drained" else last.finish,
            prompt_tokens=first.prompt_tokens,
            cached_tokens=first.cached_tokens,
            queue_s=sum(part.queue_s for part in self.parts),
            generate_s=sum(part.generate_s for part in self.parts),
        )


class EnginePool:
    """`handles` all hold weights of `version`. `wait_s`: how long a request waits for an engine when none is there (a replacement may come)."""

    def __init__(
        self,
        handles: Sequence[EngineHandle],
        *,
        version: int = 0,
        router: Router | None = None,
        on_event: Callable[[PoolEvent], None] | None = None,
        request_timeout_s: float | None = None,
        publish_timeout_s: float | None = None,
        wait_s: float = 60.0,
    ) -> None:
        self.version = version
        self.counters = PoolCounters()
        self._members = {handle.name: _Member(handle) for handle in handles}
        if len(self._members) != len(handles):
            raise ValueError("two engines of the pool have the same name")
        self._router: Router = router or StickyLeastLoaded()
        self._on_event = on_event or (lambda event: None)
        self._request_timeout_s = request_timeout_s
        self._publish_timeout_s = publish_timeout_s
        self._wait_s = wait_s
        self._writer = asyncio.Lock()
        self._arrival = asyncio.Event()
        self._current: tuple[Any, Canary | None] | None = None
        self._outages: dict[Purpose, Outage] = {"train": Outage(), "eval": Outage()}
        self._changed()

    @property
    def live(self) -> tuple[str, ...]:
        """Engines in the pool, draining ones included."""
        return tuple(self._members)

    def outage_s(self, purpose: Purpose = "train") -> float:
        """Seconds so far in which no engine was there to serve such a request, cumulative: time that no episode answers for."""
        outage = self._outages[purpose]
        return outage.total_s + (0.0 if outage.since is None else time.monotonic() - outage.since)

    def _changed(self) -> None:
        """Who may serve has changed: note the outages that begin or end with it."""
        for purpose, outage in self._outages.items():
            outage.note(bool(self._open(purpose)))

    # -- generation -------------------------------------------------------------------------------------------------------------------

    async def generate(self, request: GenerateRequest) -> Generation:
        """Serve one turn. Time without an engine does not count towards its `time_limit_s`.

        Raises RequestRefused as the engine does, and EngineFailure when two engines failed it or none came within `wait_s`.
        """
        if request.sampling.max_tokens < 1:
            raise RequestRefused(f"request {request.request_id}: the budget is {request.sampling.max_tokens} tokens, it must be at least 1")
        turn, avoid, reissued = _Turn(request), "", False
        began = time.monotonic() - self.outage_s(request.purpose)
        while True:
            call = turn.next_request()
            member = await self._choose(call, avoid)
            if request.time_limit_s is not None:
                used = time.monotonic() - self.outage_s(request.purpose) - began
                call = replace(call, time_limit_s=max(0.0, request.time_limit_s - used))
            try:
                part = await self._serve(member, call)
            except RequestRefused:
                raise
            except SystemFailure as failure:
                self._failed(member, call, failure)
                if reissued:
                    raise
                reissued, avoid = True, member.handle.name
                self.counters.reissued += 1
                self._on_event(PoolEvent("reissued", member.handle.name, str(failure), request.request_id))
                continue
            if len(part.token_ids) > turn.left:
                raise EngineFailure(f"engine {member.handle.name} sampled {len(part.token_ids)} tokens on a budget of {turn.left}")
            turn.parts.append(part)
            if part.finish != "drained" or turn.left == 0:
                return turn.joined()
            self.counters.continued += 1
            avoid = member.handle.name

    def _open(self, purpose: Purpose) -> list[_Member]:
        """Who may serve: a lent engine evaluation alone; the others training, and evaluation while none is lent."""
        members = [member for member in self._members.values() if not member.draining]
        lent = [member for member in members if member.lent]
        return lent if purpose == "eval" and lent else [member for member in members if not member.lent]

    async def _choose(self, request: GenerateRequest, avoid: str) -> _Member:
        while not (members := self._open(request.purpose)):
            self._arrival.clear()
            lent = any(member.lent for member in self._members.values())  # it comes back by itself, however long that takes
            try:
                await asyncio.wait_for(self._arrival.wait(), None if lent else self._wait_s)
            except TimeoutError as error:
                raise EngineFailure(f"no engine to serve request {request.request_id} for {self._wait_s:g} seconds") from error
        candidates = [member for member in members if member.handle.name != avoid] or members
        name = self._router.choose(request, [EngineLoad(m.handle.name, m.requests, m.tokens) for m in candidates])
        return self._members[name]

    async def _serve(self, member: _Member, call: GenerateRequest) -> Generation:
        member.requests += 1
        member.tokens += call.sampling.max_tokens
        try:
            return await asyncio.wait_for(member.handle.generate(call), self._request_timeout_s)
        except TimeoutError as error:
            raise EngineFailure(
                f"engine {member.handle.name} did not answer request {call.request_id} within {self._request_timeout_s:g} seconds"
            ) from error
        finally:
            member.requests -= 1
            member.tokens -= call.sampling.max_tokens

    def _failed(self, member: _Member, call: GenerateRequest, failure: SystemFailure) -> None:
        tokens = failure.tokens if isinstance(failure, GenerationLost) else 0
        self.counters.lost_requests += 1
        self.counters.lost_tokens += tokens
        self._on_event(PoolEvent("lost", member.handle.name, str(failure), call.request_id, tokens))
        self._expel(member, failure)

    # -- membership -------------------------------------------------------------------------------------------------------------------

    def remove(self, name: str, reason: str) -> None:
        """Take an engine out; requests running there end with what the engine does. Nothing happens when it is not in the pool."""
        if self._members.pop(name, None) is None:
            return
        self.counters.left += 1
        self._router.forget(name)
        self._changed()
        self._on_event(PoolEvent("left", name, reason))

    def _expel(self, member: _Member, failure: BaseException) -> None:
        """Take out this very engine; by the time its failure is known, a replacement may bear its name."""
        if self._members.get(member.handle.name) is member:
            self.remove(member.handle.name, str(failure))

    @property
    def lent(self) -> tuple[str, ...]:
        """Engines that are lent."""
        return tuple(name for name, member in self._members.items() if member.lent)

    async def still_lent(self, name: str) -> bool:
        """Whether a lent engine is there yet with the weights it was lent with. Asks it: one that does not answer leaves the pool."""
        await self.snapshots()
        return name in self.lent

    def admit(self, handle: EngineHandle, *, lent: bool = False) -> None:
        """Take in an engine that somebody else has brought up to date (or lent), in the place of an earlier one of its name."""
        self._members[handle.name] = _Member(handle, lent=lent)
        self._router.forget(handle.name)
        self._changed()
        self._arrival.set()

    async def join(self, handle: EngineHandle) -> None:
        """Bring an engine in. It is given the current weights first when it has others; PublishFailure when that is not possible."""
        async with self._writer:
            if handle.name in self._members:
                raise ValueError(f"engine {handle.name} is in the pool already")
            has = (await handle.snapshot()).version
            if has != self.version:
                if self._current is None:
                    raise PublishFailure(f"engine {handle.name} has version {has} and the pool no weights of version {self.version} to give it")
                bundle, canary = self._current
                await self._bounded_publish(handle, bundle, self.version, canary)
            self._members[handle.name] = _Member(handle)
            self._changed()
            self._arrival.set()
        self._on_event(PoolEvent("joined", handle.name))

    async def drain(self, name: str, export: bool = True) -> int:
        """Route nothing more to an engine and drain it; exported turns go on elsewhere (or there, after `wake`)."""
        async with self._writer:
            member = self._members[name]
            member.draining = True
            self._router.forget(name)
            self._changed()
            return await member.handle.drain(export)

    async def wake(self, name: str) -> None:
        async with self._writer:
            member = self._members[name]
            await member.handle.wake()
            member.draining = False
            self._changed()
            self._arrival.set()

    async def lend(self, name: str) -> None:
        """Take an engine out of training: requests that run there end there, later ones go elsewhere. Nothing happens when it is not in the pool."""
        async with self._writer:
            member = self._members.get(name)
            if member is not None:
                member.lent = True
                self._router.forget(name)
                self._changed()

    async def restore(self, name: str) -> None:
        """Bring a lent engine back into training, with the current weights. Nothing happens when it has left or been replaced meanwhile."""
        async with self._writer:
            member = self._members.get(name)
            if member is None or not member.lent:
                return
            if self._current is not None:
                bundle, canary = self._current
                try:
                    await self._bounded_publish(member.handle, bundle, self.version, canary)
                except SystemFailure as failure:
                    self._expel(member, failure)
                    return
            member.lent = False
            self._router.forget(name)
            self._changed()
            self._arrival.set()

    async def try_on(self, name: str, bundle: Any, version: int) -> None:
        """Give weights to a lent engine alone. Requests that run there are handed back and go on under the pool's weights, elsewhere or later.

        The next publication reaches the engine too and ends the loan. Raises EngineFailure when it is not lent; one that fails leaves the pool.
        """
        async with self._writer:
            member = self._members.get(name)
            if member is None or not member.lent:
                raise EngineFailure(f"engine {name} left the pool before it could try version {version}")
            try:
                await member.handle.drain(True)
                await member.handle.wake()
                member.tried = await self._bounded_publish(member.handle, bundle, version, None)
            except SystemFailure as failure:
                self._expel(member, failure)
                raise

    # -- weights ----------------------------------------------------------------------------------------------------------------------

    async def publish(self, bundle: Any, version: int, canary: Canary | None = None, gather_s: float = 0.0) -> list[PublishReport]:
        """Push to every live engine that is not lent (one that tries weights on apart) at once; complete when each acknowledged. One that fails leaves the pool.

        The weights are kept until the next publication, for engines that join. With no engine left the publication is complete when one has joined
        with them; PublishFailure when none does within `wait_s`.
        """
        async with self._writer:
            if version < self.version:
                raise PublishFailure(f"the pool has version {self.version}; version {version} is older")
            members = [member for member in self._members.values() if not member.lent or member.tried is not None]
            results = await asyncio.gather(
                *(self._bounded_publish(member.handle, bundle, version, canary) for member in members), return_exceptions=True
            )
            self.version, self._current = version, (bundle, canary)
            reports = []
            for member, result in zip(members, results, strict=True):
                if isinstance(result, SystemFailure):
                    self._expel(member, result)
                elif isinstance(result, BaseException):
                    raise result
                else:
                    loaded = member.tried if member.tried is not None and result.tensors == 0 else result
                    reports.append(replace(loaded, gather_s=gather_s))
                    if member.tried is not None:
                        member.lent, member.tried = False, None
                        self._router.forget(member.handle.name)
                        self._changed()
                        self._arrival.set()
            if not reports:
                self._arrival.clear()
        if not reports:
            try:
                await asyncio.wait_for(self._arrival.wait(), self._wait_s)
            except TimeoutError as error:
                raise PublishFailure(
                    f"version {version} reached no engine within {self._wait_s:g} seconds; the last failure: {results[-1:]}"
                ) from error
        return reports

    async def _bounded_publish(self, handle: EngineHandle, bundle: Any, version: int, canary: Canary | None) -> PublishReport:
        try:
            return await asyncio.wait_for(handle.publish(bundle, version, canary), self._publish_timeout_s)
        except TimeoutError as error:
            raise PublishFailure(f"engine {handle.name} did not acknowledge version {version} within {self._publish_timeout_s:g} seconds") from error

    async def begin_incarnation(self, incarnation: int) -> None:
        """The learner went back to a checkpoint and caught up: from now on cache salts carry the new incarnation."""
        async with self._writer:
            for member in list(self._members.values()):
                try:
                    await member.handle.begin_incarnation(incarnation)
                except SystemFailure as failure:
                    self._expel(member, failure)

    async def snapshots(self) -> list[EngineSnapshot]:
        """Of the engines that answer; one that cannot leaves the pool."""
        members = list(self._members.values())
        results = await asyncio.gather(*(member.handle.snapshot() for member in members), return_exceptions=True)
        answered = []
        for member, result in zip(members, results, strict=True):
            if isinstance(result, SystemFailure):
                self._expel(member, result)
            elif isinstance(result, BaseException):
                raise result
            else:
                answered.append(result)
        return answered
