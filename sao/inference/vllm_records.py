"""What the engine thread keeps of a request, and how vLLM's forms become ours. Imports no vllm until it is used."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from sao.errors import EngineFailure
from sao.inference.protocol import GenerateRequest, Generation

Result = Generation | EngineFailure


@dataclass(eq=False)
class Job:
    """One request on its way through the engine. `marks` are (tokens sampled before, version): our own account of the spans.

    arrived and deadline are time.monotonic(); a request without a time limit has deadline inf.
    """

    request: GenerateRequest
    loop: asyncio.AbstractEventLoop
    results: asyncio.Queue[Result]
    arrived: float
    deadline: float
    key: str = ""
    internal: str = ""
    salt: str = ""
    sent: int = 0
    marks: list[tuple[int, int]] = field(default_factory=list)


class Turn(NamedTuple):
    """What the engine thread is at: since when (time.monotonic()), and whether that is a step of the engine or something between two."""

    began: float
    step: bool = False


@dataclass
class Counters:
    """vLLM's own per-step statistics, summed. Takes the place of its stat-logger manager, whose Prometheus bookkeeping costs time every step."""

    waiting: int = 0
    kv_use: float = 0.0
    prefix_queries: int = 0
    prefix_hits: int = 0
    generated: int = 0
    prompt: int = 0
    drafted: int = 0
    accepted: int = 0
    aborted: int = 0
    busy_s: float = 0.0
    stall_s: float = 0.0

    def record(self, scheduler_stats: Any, iteration_stats: Any, mm_cache_stats: Any = None, engine_idx: int = 0) -> None:
        self.waiting = scheduler_stats.num_waiting_reqs + scheduler_stats.num_skipped_waiting_reqs
        self.kv_use = scheduler_stats.kv_cache_usage
        self.prefix_queries += scheduler_stats.prefix_cache_stats.queries
        self.prefix_hits += scheduler_stats.prefix_cache_stats.hits
        if scheduler_stats.spec_decoding_stats is not None:
            self.drafted += scheduler_stats.spec_decoding_stats.num_draft_tokens
            self.accepted += scheduler_stats.spec_decoding_stats.num_accepted_tokens
        if iteration_stats is not None:
            self.generated += iteration_stats.num_generation_tokens
            self.prompt += iteration_stats.num_prompt_tokens

    def log(self) -> None:
        """vLLM asks for a log line every few seconds; the metrics file has these numbers."""

    def record_sleep_state(self, sleep: int = 0, level: int = 0) -> None:
        """Not a figure of ours."""


def spread(marks: list[tuple[int, int]], length: int) -> NDArray[np.int32]:
    """[(start, version), ...] in order -> int32[length]."""
    versions = np.empty(length, np.int32)
    for start, version in marks:
        versions[start:] = version
    return versions


def sampled_logprobs(flat: Any, length: int) -> NDArray[np.float32]:
    """vLLM FlatLogprobs (first entry of each position is the token itself) -> float32[length]; NaN where there is none or it is not finite."""
    result = np.full(length, np.nan, np.float32)
    if flat is None or len(flat) != length:
        return result
    values = flat.logprobs
    for position, (start, end) in enumerate(zip(flat.start_indices, flat.end_indices, strict=True)):
        if start < end and values[start] is not None:
            result[position] = values[start]
    result[~np.isfinite(result)] = np.nan
    return result


def sampling_params(request: GenerateRequest) -> Any:
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    spec = request.sampling
    return SamplingParams(
        temperature=spec.temperature,
        top_p=spec.top_p,
        top_k=spec.top_k,
        min_p=spec.min_p,
        seed=spec.seed,
        max_tokens=spec.max_tokens,
        stop_token_ids=list(spec.stop),
        # Only the ids of `stop` end a turn; whatever the model directory calls eos is one of them if the renderer says so.
        ignore_eos=True,
        logprobs=0,
        flat_logprobs=True,
        detokenize=False,
        output_kind=RequestOutputKind.DELTA if request.stream else RequestOutputKind.FINAL_ONLY,
        skip_clone=True,
    )
