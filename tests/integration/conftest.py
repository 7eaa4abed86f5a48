"""Engines of the integration tests: each kind is started once per session, since a start costs seconds."""

from __future__ import annotations

import asyncio
import itertools
import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import numpy as np
import pytest

from sao.config import EngineConfig, WeightsConfig
from sao.inference.protocol import Canary, GenerateRequest, Generation, PublishReport
from sao.trajectory import SamplingSpec


class Served:
    """A real engine, the Hugging Face model whose weights it holds, and short ways to talk to it."""

    def __init__(self, directory, *, tied=True, kv_on_publish="keep", vocabulary=256, name="e0", **options):
        from tests.integration.tiny import start_engine, tiny_llama

        self.tied, self.vocabulary = tied, vocabulary
        self.model = tiny_llama(0, tied, vocabulary, directory)
        config = EngineConfig(kv_cache_mb=64, start_timeout_s=600.0, max_num_seqs=64)
        self.engine = start_engine(str(directory), config, WeightsConfig(kv_on_publish=kv_on_publish), name=name, **options)
        self._ids = itertools.count()
        self._draw = np.random.default_rng(7)

    def other_model(self, seed):
        from tests.integration.tiny import tiny_llama

        return tiny_llama(seed, self.tied, self.vocabulary)

    def prompt(self, length=20):
        return self._draw.integers(3, self.vocabulary, length).astype(np.int32)

    def request(self, prompt=None, *, session="", pinned=None, stream=False, **sampling) -> GenerateRequest:
        sampling.setdefault("max_tokens", 24)
        name = f"r{next(self._ids)}"
        prompt = self.prompt() if prompt is None else np.asarray(prompt, np.int32)
        return GenerateRequest(name, prompt, SamplingSpec(**sampling), session or name, pinned_version=pinned, stream=stream)

    async def ask(self, request: GenerateRequest) -> Generation:
        from sao.inference.pool import complete

        return await complete(self.engine, request)

    def canary(self, model) -> Canary:
        from tests.integration.tiny import reference

        ids = np.random.default_rng(3).integers(3, self.vocabulary, 48)
        return Canary(tuple(ids.tolist()), tuple(reference(model, ids[:1], ids[1:]).tolist()))

    async def publish(self, model, canary=True) -> PublishReport:
        from sao.weights.torch_bundle import pack

        version = (await self.engine.snapshot()).version + 1
        bundle = pack(model.named_parameters())
        bundle.buffer.setflags(write=False)  # as it comes from an object store
        report = await self.engine.publish(bundle, version, self.canary(model) if canary else None)
        bundle.buffer.setflags(write=True)
        bundle.buffer[:] = 255  # the publisher reuses its buffer: NaN in every weight the engine did not copy
        self.model = model
        return report

    async def until(self, condition):
        for _ in range(2000):
            snapshot = await self.engine.snapshot()
            if condition(snapshot):
                return snapshot
            await asyncio.sleep(0.005)
        raise AssertionError(f"the engine never got there: {snapshot}")


@pytest.fixture(scope="session")
def served(tmp_path_factory):
    """Tied embeddings, running requests keep their KV."""
    served = Served(tmp_path_factory.mktemp("tied"))
    yield served
    asyncio.run(served.engine.close())


@pytest.fixture(scope="session")
def served_untied(tmp_path_factory):
    """Untied embeddings, running requests' KV is recomputed at a publication."""
    served = Served(tmp_path_factory.mktemp("untied"), tied=False, kv_on_publish="recompute", name="e1")
    yield served
    asyncio.run(served.engine.close())


@pytest.fixture(scope="session")
def served_speculative(tmp_path_factory):
    """n-gram speculation over a vocabulary of 32, small enough for exact distributions."""
    speculation = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1, "prompt_lookup_max": 2}
    served = Served(tmp_path_factory.mktemp("ngram"), vocabulary=32, name="e2", engine_args={"speculative_config": speculation})
    yield served
    asyncio.run(served.engine.close())
