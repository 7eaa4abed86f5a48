"""An engine whose process lives and whose thread does not come back is said to hang; one that is slow, or has nothing to do, is not."""

from __future__ import annotations

import asyncio
import threading
import time
from types import SimpleNamespace

import numpy as np
import pytest

from sao.config import EngineConfig, WeightsConfig
from sao.errors import EngineFailure
from sao.inference.pool import EnginePool, LocalHandle
from sao.inference.protocol import GenerateRequest
from sao.inference.vllm_engine import VllmEngine
from sao.trajectory import SamplingSpec


class Core:
    """The parts of vLLM's LLMEngine that the thread meets, with a step that takes as long as it is told to."""

    def __init__(self) -> None:
        self.vllm_config = SimpleNamespace(cache_config=SimpleNamespace(block_size=16))
        self.engine_core = SimpleNamespace(shutdown=lambda: None)
        self.output_processor = SimpleNamespace(request_states={})
        self.go = threading.Event()
        self.at_it = threading.Event()

    def set_weight_version(self, version: str) -> None: ...

    def abort_request(self, *_: object, **__: object) -> None: ...

    def has_unfinished_requests(self) -> bool:
        return not self.go.is_set()

    def step(self) -> list:
        self.at_it.set()
        self.go.wait(30)
        return []


class Engine(VllmEngine):
    def _build(self, *_):
        self.core = Core()
        self._context, self._vocabulary = 100, 100
        return self.core


@pytest.fixture
def engine(monkeypatch):
    monkeypatch.setattr("sao.inference.vllm_core.sampling_params", lambda request: None)  # vLLM's own
    config = EngineConfig(stall_s=0.2, start_timeout_s=5.0, request_timeout_s=5.0)
    made = Engine("model", config, WeightsConfig(), name="engine-0")
    made._thread._add = lambda *_: "internal"  # type: ignore[method-assign]
    made.config = config
    yield made
    made.core.go.set()
    made._thread.close(5)


async def at_a_step(engine) -> asyncio.Task:
    """Give the thread something to do, and return when its core is at it."""
    request = GenerateRequest("r", np.ones(3, np.int32), SamplingSpec(max_tokens=4), "s")
    engine.core.go.clear()
    engine.core.at_it.clear()
    asked = asyncio.create_task(anext(engine.generate(request)))
    await asyncio.to_thread(engine.core.at_it.wait, 5)
    return asked


async def watched(engine, seconds: float) -> None:
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        await engine.snapshot()
        await asyncio.sleep(0.02)


@pytest.mark.parametrize("stepped", [True, False])
def test_a_step_that_does_not_end_is_a_hang_after_its_limit(engine, stepped):
    """A first step has the time of a start: it may compile."""
    engine._thread.counters.busy_s = float(stepped)
    engine.config.start_timeout_s = 0.6

    async def main():
        engine.core.go.set()
        await watched(engine, 0.3)  # nothing to do is no hang
        asked = await at_a_step(engine)
        began = time.monotonic()
        with pytest.raises(EngineFailure, match=r"engine-0 hangs: .*engine\.stall_s=0\.2" if stepped else r"first step .*start_timeout_s"):
            await watched(engine, 3.0)
        asked.cancel()
        return time.monotonic() - began

    assert (0.15 if stepped else 0.55) < asyncio.run(main()) < 1.5


def test_a_load_of_weights_may_take_longer_than_a_step(engine):
    engine._thread.counters.busy_s = 1.0
    engine.core.go.set()
    engine.config.request_timeout_s = 0.8

    async def main():
        release = threading.Event()
        engine._thread.call(lambda: release.wait(10))
        await watched(engine, 0.5)
        with pytest.raises(EngineFailure, match=r"loading weights .*engine\.request_timeout_s=0\.8"):
            await watched(engine, 3.0)
        release.set()
        await asyncio.sleep(0.1)
        await watched(engine, 0.3)

    asyncio.run(main())


def test_an_engine_that_hangs_leaves_the_pool(engine):
    engine._thread.counters.busy_s = 1.0
    left = []

    async def main():
        pool = EnginePool([LocalHandle(engine, "engine-0")], on_event=left.append)
        asked = await at_a_step(engine)
        while pool.live:
            await pool.snapshots()
            await asyncio.sleep(0.02)
        asked.cancel()

    asyncio.run(asyncio.wait_for(main(), 5))
    assert [event.kind for event in left] == ["left"] and "hangs" in left[0].reason
