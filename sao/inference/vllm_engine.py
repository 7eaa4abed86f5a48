"""The inference engine of SAO: vLLM's synchronous `LLMEngine`, in this process, stepped by one thread of ours.

Why not `AsyncLLM`: it always starts an engine-core process of its own (half a minute and more than 2 GB on CPU, even with
VLLM_ENABLE_V1_MULTIPROCESSING=0), and that process would have to be paused from outside for every publication. With the engine on a thread we
own, a publication is simply what happens between two steps: nobody is aborted, no token's version is in doubt, and weights reach the model by
reference. The coroutines here only queue commands for that thread (`sao.inference.vllm_core`).
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sao.config import EngineConfig, WeightsConfig
from sao.errors import EngineFailure
from sao.inference.failures import RequestRefused
from sao.inference.protocol import Canary, EngineSnapshot, GenerateRequest, Generation, PublishReport
from sao.inference.vllm_core import EngineThread
from sao.inference.vllm_records import Job
from sao.weights.bundle import WeightBundle

# vLLM raises a temperature between 0 and this silently; such a request would be scored under another one than it asked for.
LOWEST_TEMPERATURE = 0.01


class VllmEngine:
    """Implements `sao.inference.protocol.Engine`. Weights are version 0 until the first publication.

    `seed` must differ between replicas: unseeded requests of two engines would otherwise draw the same noise. `engine_args` are extra vLLM
    engine arguments (a speculative_config, load_format). Blocks until the engine is ready (seconds on CPU); may be constructed on any thread.
    Raises EngineFailure when vLLM cannot start.
    """

    def __init__(
        self,
        model_path: str,
        config: EngineConfig,
        weights: WeightsConfig,
        *,
        name: str,
        incarnation: int = 0,
        seed: int = 0,
        engine_args: Mapping[str, Any] | None = None,
    ) -> None:
        self.name = name
        self._config = config
        self._born = time.monotonic()
        self._thread = EngineThread(
            lambda: self._build(model_path, seed, dict(engine_args or {})),
            name=name,
            slots=config.max_num_seqs,
            kv_on_publish=weights.kv_on_publish,
            canary_tolerance=config.canary_tolerance,
            incarnation=incarnation,
            interval_s=config.step_interval_ms / 1000,
        )
        try:
            self._thread.start(config.start_timeout_s)
        except TimeoutError as error:
            raise EngineFailure(f"engine {name} did not start within engine.start_timeout_s={config.start_timeout_s:g} seconds") from error
        except Exception as error:
            raise EngineFailure(f"engine {name} could not start on {model_path!r}: {error}") from error

    def _build(self, model_path: str, seed: int, extra: dict[str, Any]) -> Any:
        """Runs on the engine thread, which owns the engine and its OpenMP settings."""
        config = self._config
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        for key, value in (
            ("OMP_NUM_THREADS", str(config.threads)),
            ("OMP_WAIT_POLICY", "PASSIVE"),
            ("NUMBA_NUM_THREADS", "1"),
            ("VLLM_LOGGING_LEVEL", "WARNING"),
            ("VLLM_NO_USAGE_STATS", "1"),
        ):
            os.environ.setdefault(key, value)
        import torch
        import torch._dynamo
        from vllm import EngineArgs
        from vllm.config import WeightTransferConfig
        from vllm.platforms import current_platform
        from vllm.v1.engine.llm_engine import LLMEngine

        from sao.inference import vllm_plugin
        from sao.inference.vllm_transfer import Manifest

        vllm_plugin.register()
        arguments: dict[str, Any] = {
            "model": model_path,
            "dtype": config.dtype,
            "max_model_len": config.max_model_len or None,
            # One slot more than we ever fill, so that a canary never waits for a request to end.
            "max_num_seqs": config.max_num_seqs + 1,
            "tensor_parallel_size": config.tensor_parallel_size,
            "enforce_eager": config.enforce_eager,
            "enable_prefix_caching": config.prefix_caching,
            "skip_tokenizer_init": True,
            "generation_config": "vllm",
            "logprobs_mode": "processed_logprobs",
            # Scheduling ahead of the results would sample one step under weights that a publication has already replaced.
            "async_scheduling": False,
            "scheduling_policy": "priority",
            "seed": seed,
            "weight_transfer_config": WeightTransferConfig(backend=vllm_plugin.BACKEND),
        }
        if config.enforce_eager:
            # vLLM compiles a helper of its sampler (a rank nobody here reads) on the first sampled batch: 4 to 30 s, enforce_eager or not.
            torch._dynamo.config.disable = True
        if current_platform.is_cpu():
            _inspect_here(model_path)
            arguments["kv_cache_memory_bytes"] = config.kv_cache_mb << 20
            if torch.get_num_threads() != config.threads:
                torch.set_num_threads(config.threads)
        else:
            arguments["gpu_memory_utilization"] = config.gpu_memory_utilization
            arguments["enable_sleep_mode"] = current_platform.is_cuda_alike()
        if config.block_size:
            arguments["block_size"] = config.block_size
        engine = LLMEngine.from_engine_args(EngineArgs(**{**arguments, **extra}))
        model_config = engine.vllm_config.model_config
        self._context = int(model_config.max_model_len)
        self._vocabulary = int(model_config.get_vocab_size())
        self._thread.manifest = Manifest.of_checkpoint(model_path, bool(getattr(model_config.hf_text_config, "tie_word_embeddings", False)))
        return engine

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[Generation, None]:
        """One Generation, or one per engine step with `stream`. Closing the generator early frees the request.

        Raises RequestRefused for a budget below 1, a prompt that is empty, out of vocabulary or as long as the context, and a pinned version the
        engine does not have; EngineFailure when the engine dies. A budget beyond the context ends there with finish `length`.
        """
        self._check(request)
        arrived = time.monotonic()
        deadline = arrived + (math.inf if request.time_limit_s is None else request.time_limit_s)
        job = Job(request, asyncio.get_running_loop(), asyncio.Queue(), arrived, deadline)
        self._thread.submit(job)
        ended = False
        try:
            while not ended:
                result = await job.results.get()
                if isinstance(result, EngineFailure):
                    ended = True
                    raise result
                ended = result.finish is not None
                yield result
        finally:
            if not ended:
                self._thread.cancel(job)

    def _check(self, request: GenerateRequest) -> None:
        tokens, spec = request.token_ids, request.sampling
        about = f"request {request.request_id} on engine {self.name}"
        if spec.max_tokens < 1:
            raise RequestRefused(f"{about}: the budget is {spec.max_tokens} tokens, it must be at least 1")
        if not 1 <= len(tokens) < self._context:
            raise RequestRefused(f"{about}: the prompt has {len(tokens)} tokens, the context holds {self._context} including at least one to sample")
        if int(tokens.min()) < 0 or int(tokens.max()) >= self._vocabulary:
            raise RequestRefused(f"{about}: token ids {int(tokens.min())}..{int(tokens.max())} leave the vocabulary of {self._vocabulary}")
        if not (spec.temperature == 0 or spec.temperature >= LOWEST_TEMPERATURE):
            raise RequestRefused(f"{about}: temperature {spec.temperature} must be 0 or at least {LOWEST_TEMPERATURE}")

    async def publish(self, bundle: WeightBundle, version: int, canary: Canary | None = None) -> PublishReport:
        asked = time.monotonic()
        return await self._call(lambda: self._thread.publish(bundle, version, canary, asked))

    async def score(self, token_ids: Sequence[int]) -> NDArray[np.float32]:
        tokens = [int(token) for token in token_ids]
        if len(tokens) < 2:
            return np.empty(0, np.float32)
        return await self._call(lambda: self._thread.score(tokens))

    async def drain(self, export: bool = True) -> int:
        result = await self._call(lambda: self._thread.drain(export))
        return await asyncio.wrap_future(result) if isinstance(result, Future) else result

    async def sleep(self) -> None:
        """Drains, forgets the prefix cache and, where vLLM has a sleep mode (GPU), offloads weights and frees KV memory."""
        await self._call(self._thread.sleep)

    async def wake(self) -> None:
        await self._call(self._thread.wake)

    async def begin_incarnation(self, incarnation: int) -> None:
        """After a rollback of the learner versions repeat; cache salts and labels carry the incarnation, and the next publication may go back."""
        await self._call(lambda: self._thread.begin_incarnation(incarnation))

    async def snapshot(self) -> EngineSnapshot:
        """Never waits for the engine thread: a publication in progress can be watched. Raises EngineFailure when the thread died or hangs."""
        counters, now = self._thread.counters, time.monotonic()
        if self._thread.failure is not None:
            raise EngineFailure(self._thread.failure)
        self._notice_a_hang(now)
        return EngineSnapshot(
            engine=self.name,
            version=self._thread.version,
            running=self._thread.running,
            waiting=self._thread.waiting,
            kv_use=counters.kv_use,
            prefix_queries=counters.prefix_queries,
            prefix_hits=counters.prefix_hits,
            generated_tokens=counters.generated,
            prompt_tokens=counters.prompt,
            reprefill_tokens=self._thread.prefill.tokens,
            aborted_requests=counters.aborted,
            busy_s=counters.busy_s,
            uptime_s=now - self._born,
            publish_stall_s=counters.stall_s,
            at=now,
        )

    def _notice_a_hang(self, now: float) -> None:
        """Requests and publications wait for the thread for ever when vLLM does; a slow step is told from that by its limit alone."""
        turn, config = self._thread.turn, self._config
        if turn is None:
            return
        if not turn.step:
            doing, key, limit = "loading weights or something else between two steps", "engine.request_timeout_s", config.request_timeout_s
        elif self._thread.counters.busy_s == 0:
            doing, key, limit = "its first step", "engine.start_timeout_s", config.start_timeout_s  # it may compile
        else:
            doing, key, limit = "a step", "engine.stall_s", config.stall_s
        if now - turn.began > limit:
            raise EngineFailure(f"engine {self.name} hangs: it has been at {doing} for {now - turn.began:.0f} s ({key}={limit:g})")

    def drafts(self) -> tuple[int, int]:
        """Tokens proposed and accepted by speculative decoding so far; (0, 0) without it."""
        return self._thread.counters.drafted, self._thread.counters.accepted

    async def close(self) -> None:
        await asyncio.to_thread(self._thread.close)

    async def _call(self, function: Any) -> Any:
        return await asyncio.wrap_future(self._thread.call(function))


def _inspect_here(model_path: str) -> None:
    """Let vLLM look at the model class in this process.

    On first use it starts a second Python that imports all of vLLM (10 s on a free core), to keep this process from initialising CUDA before a
    fork; without CUDA nothing is gained. Whatever cannot be found here is left to vLLM.
    """
    from vllm import ModelRegistry

    file = Path(model_path) / "config.json"
    if not file.is_file():
        return
    for architecture in json.loads(file.read_text()).get("architectures") or ():
        known = ModelRegistry.models.get(architecture)
        if known is not None:
            ModelRegistry.register_model(architecture, known.load_model_cls())
