"""One turn of the policy, from the engines into the token log."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace
from functools import partial

from sao.agents.clock import Clock, OutOfTime
from sao.agents.guarded import short
from sao.agents.token_log import TokenLog
from sao.environment import Task
from sao.errors import EngineFailure, SystemFailure, UserError
from sao.inference.protocol import GenerateRequest, Generation
from sao.trajectory import Purpose, SamplingSpec, TurnTiming

Generate = Callable[[GenerateRequest], Awaitable[Generation]]


@dataclass
class Turn:
    """One turn while it runs. said, answer: indices of its message and of what the environment answered, among the episode's messages."""

    ids: list[int] = field(default_factory=list)
    at: tuple[int, int] = (0, 0)  # segment, and position of its last token in it
    said: int = 0
    answer: list[int] = field(default_factory=list)
    reward: float = 0.0
    queue_s: float = 0.0
    generate_s: float = 0.0
    environment_s: float = 0.0
    prompt_tokens: int = 0
    cached_tokens: int = 0

    def timing(self) -> TurnTiming:
        return TurnTiming(self.queue_s, self.generate_s, self.environment_s, self.prompt_tokens, self.cached_tokens, len(self.ids))


@dataclass
class Sampler:
    """Asks `generate` for one episode's turns. `exhausted`: an engine ended a turn for a context shorter than the limits say."""

    generate: Generate
    clock: Clock
    task: Task
    session: str
    sampling: SamplingSpec
    purpose: Purpose
    pinned_version: int | None
    answer_grace_s: float
    exhausted: bool = False
    turns: int = 0
    requests: int = 0

    async def sample(self, turn: Turn, log: TokenLog, budget: int) -> bool:
        """Sample `turn`, at most `budget` tokens, over several calls where the engine gives the request back; returns whether a length limit cut it off.

        Raises OutOfTime and EngineFailure; what was sampled by then is in the log and in the turn.
        """
        self.turns += 1
        turn.at = log.position
        empty = 0
        while len(turn.ids) < budget:
            remaining = budget - len(turn.ids)
            generation = await self._ask(turn, log, remaining)
            turn.ids += [int(token) for token in generation.token_ids]
            turn.at = log.position
            if turn.ids and turn.ids[-1] in self.sampling.stop:
                return False
            if generation.finish == "time":
                raise OutOfTime
            if generation.finish != "drained":
                if generation.finish == "length" and len(turn.ids) < budget:
                    # The engine's context is shorter than the limits say (max_model_len 0: not given): no more of it either.
                    self.exhausted = True
                return generation.finish == "length"
            empty = 0 if len(generation.token_ids) else empty + 1
            pause = min(0.01 * empty, 1.0)
            # An engine that keeps giving the request back untouched must not be asked in a busy loop; the deadline ends it.
            await self.clock.within(partial(asyncio.sleep, pause))
        return True

    async def _ask(self, turn: Turn, log: TokenLog, remaining: int) -> Generation:
        seed = self.sampling.seed
        request = GenerateRequest(
            request_id=f"{self.session}/{self.turns - 1}.{self.requests}",
            token_ids=log.prompt(),
            sampling=replace(self.sampling, max_tokens=remaining, seed=None if seed is None else (seed + self.requests * 1_000_003) % 2**31),
            session=self.session,
            workload=self.task.workload,
            purpose=self.purpose,
            pinned_version=self.pinned_version,
            time_limit_s=self.clock.left(),
        )
        self.requests += 1
        began = time.monotonic()
        generation: Generation | None = None
        try:
            generation = await self.clock.within(lambda: self.generate(request), self.answer_grace_s)
        except (SystemFailure, UserError, OutOfTime):
            raise
        except Exception as problem:
            raise EngineFailure(f"generate raised {type(problem).__name__}: {short(problem)}") from problem
        finally:
            waited = time.monotonic() - began
            turn.queue_s += generation.queue_s if generation else 0.0
            turn.generate_s += (generation.generate_s if generation else 0.0) or waited - (generation.queue_s if generation else 0.0)
        check_generation(generation, remaining)
        turn.prompt_tokens += generation.prompt_tokens or len(request.token_ids)
        turn.cached_tokens += generation.cached_tokens
        log.sampled(generation)
        return generation


def check_generation(generation: Generation, remaining: int) -> None:
    """What no engine may answer to a request for at most `remaining` tokens. Raises EngineFailure."""
    count = len(generation.token_ids)
    if len(generation.logprobs) != count or len(generation.versions) != count:
        lengths = f"{len(generation.logprobs)} log-probs and {len(generation.versions)} versions"
        raise EngineFailure(f"engine {generation.engine} returned {count} tokens with {lengths}")
    if count > remaining:
        raise EngineFailure(f"engine {generation.engine} returned {count} tokens where {remaining} were left of the budget")
    if generation.finish is None:
        raise EngineFailure(f"engine {generation.engine} returned an answer without a finish reason")
    if count and (min(generation.versions) < 0 or min(generation.token_ids) < 0):
        raise EngineFailure(f"engine {generation.engine} returned a negative token id or version")
