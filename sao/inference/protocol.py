"""The engine seam: what the rest of the system knows of an inference engine.

Implementations: `sao.inference.vllm_engine.VllmEngine` (the real one, inside a Ray actor) and `sao.inference.scripted.ScriptedEngine`
(deterministic, for tests only). Nothing here imports torch or vllm.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from sao.trajectory import Purpose, SamplingSpec
from sao.weights.bundle import WeightBundle

GenerationFinish = Literal["stop", "length", "time", "drained"]


@dataclass(frozen=True, eq=False)
class GenerateRequest:
    """Continue `token_ids` by at most `sampling.max_tokens` (the budget that remains of the turn).

    session: routing key, one per episode. pinned_version: refuse to serve under any other weights (evaluation). time_limit_s: seconds from the
    engine's receipt after which it ends the request with what was sampled and finish `time`; relative, because hosts do not share a clock.
    """

    request_id: str
    token_ids: NDArray[np.int32]
    sampling: SamplingSpec
    session: str
    workload: str = "default"
    purpose: Purpose = "train"
    pinned_version: int | None = None
    time_limit_s: float | None = None
    stream: bool = False


@dataclass(frozen=True, eq=False)
class Generation:
    """Sampled tokens, all arrays of length n. logprobs float32: after temperature, over the sampled distribution; NaN where the engine gave none.

    finish is None on a chunk that others follow; `drained` means the engine gave the request back unfinished: the caller continues it with
    another call, token_ids extended by what came so far.
    """

    token_ids: NDArray[np.int32]
    logprobs: NDArray[np.float32]
    versions: NDArray[np.int32]
    finish: GenerationFinish | None
    engine: str = ""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    queue_s: float = 0.0
    generate_s: float = 0.0


@dataclass(frozen=True)
class EngineSnapshot:
    """One engine at one moment; counters are cumulative since the engine started. `at` is time.monotonic() in the engine's process."""

    engine: str
    version: int
    running: int
    waiting: int
    kv_use: float
    prefix_queries: int
    prefix_hits: int
    generated_tokens: int
    prompt_tokens: int
    reprefill_tokens: int
    aborted_requests: int
    busy_s: float
    uptime_s: float
    publish_stall_s: float
    at: float


@dataclass(frozen=True)
class Canary:
    """A fixed token sequence and the trainer's log-probs of tokens 1..n-1 under the weights being published (float32)."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]


@dataclass(frozen=True)
class PublishReport:
    """What one publication did to one engine. Times in seconds; `in_flight` requests went on, none aborted.

    gather_s is the publisher's (filled in by it); pause_s the wait for the running step to end; transfer_s the load; resume_s until the next step.
    canary_gap is the largest |engine - trainer| log-prob over the canary, 0 when none was given.
    """

    engine: str
    version: int
    pause_s: float
    transfer_s: float
    resume_s: float
    in_flight: int
    canary_gap: float
    tensors: int
    gather_s: float = 0.0


class Engine(Protocol):
    """An inference engine whose weights can be replaced while it generates."""

    def generate(self, request: GenerateRequest) -> AsyncIterator[Generation]:
        """Yield chunks; the last one has `finish` set. Raises EngineFailure; never returns a short answer instead."""
        ...

    async def publish(self, bundle: WeightBundle, version: int, canary: Canary | None = None) -> PublishReport:
        """Load weights and label tokens sampled from now on with `version`. Requests in flight go on. Versions only grow; the same version twice is a no-op.

        Raises PublishFailure when a tensor has no counterpart, or the canary's log-probs differ from the trainer's by more than the tolerance.
        """
        ...

    async def score(self, token_ids: Sequence[int]) -> NDArray[np.float32]:
        """Log-probs of tokens 1..n-1 under the current weights (float32[n-1])."""
        ...

    async def drain(self, export: bool = True) -> int:
        """End every request in flight with finish `drained` (export) or let them finish; returns how many were given back. Generation stays closed until `wake`."""
        ...

    async def snapshot(self) -> EngineSnapshot: ...

    async def sleep(self) -> None:
        """Stop serving and give back what memory the platform can."""
        ...

    async def wake(self) -> None: ...

    async def close(self) -> None: ...
