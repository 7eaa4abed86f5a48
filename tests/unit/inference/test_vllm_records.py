import asyncio
import math
from concurrent.futures import Future
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from sao.errors import EngineFailure
from sao.inference import vllm_core
from sao.inference.failures import GenerationLost
from sao.inference.protocol import GenerateRequest
from sao.inference.vllm_core import EngineThread
from sao.inference.vllm_plugin import expand_per_request
from sao.inference.vllm_records import Job, sampled_logprobs, spread
from sao.trajectory import SamplingSpec


class Flat(SimpleNamespace):
    """The shape of vLLM's FlatLogprobs."""

    def __len__(self):
        return len(self.start_indices)


def test_missing_and_non_finite_logprobs_become_nan():
    flat = Flat(logprobs=[-1.0, -9.0, None, float("-inf"), float("nan"), -2.0], start_indices=[0, 2, 3, 4, 5, 6], end_indices=[2, 3, 4, 5, 6, 6])
    expected = [-1.0, np.nan, np.nan, np.nan, -2.0, np.nan]
    np.testing.assert_array_equal(sampled_logprobs(flat, 6), np.asarray(expected, np.float32))
    assert np.isnan(sampled_logprobs(None, 2)).all()
    assert np.isnan(sampled_logprobs(flat, 5)).all(), "a count that does not match cannot be aligned"


def test_versions_are_spread_over_their_spans():
    assert spread([(0, 3), (2, 5), (2, 6)], 4).tolist() == [3, 3, 6, 6]
    assert spread([(0, 3), (4, 5)], 4).tolist() == [3, 3, 3, 3]


@pytest.mark.parametrize("dtype", [torch.float32, torch.int32])
def test_per_request_values_are_written_for_every_draft_token(dtype):
    output = torch.full((5,), 9).to(dtype)
    expand_per_request(output, torch.tensor([0, 2, 3]).to(dtype), torch.tensor([2, 2, 5], dtype=torch.int32), 0, 1, MAX_NUM_TOKENS=32)
    assert output.tolist() == [1, 1, 3, 3, 3]


class FakeEngine:
    """As much of LLMEngine as the thread touches before a step fails."""

    def __init__(self):
        self.vllm_config = SimpleNamespace(cache_config=SimpleNamespace(block_size=16))
        self.output_processor = SimpleNamespace(request_states={})
        self.engine_core = SimpleNamespace(shutdown=lambda: None)
        self.steps = 0

    def abort_request(self, ids, internal=False):
        for key in ids:
            del self.output_processor.request_states[key]

    def set_weight_version(self, label):
        self.label = label

    def add_request(self, key, prompt, params, priority=0):
        self.output_processor.request_states[key] = SimpleNamespace(detokenizer=SimpleNamespace(num_output_tokens=lambda: self.steps))
        return key

    def has_unfinished_requests(self):
        return bool(self.output_processor.request_states)

    def step(self):
        self.steps += 1
        if self.steps == 5:
            raise RuntimeError("out of memory")
        return []


@pytest.fixture
def thread(monkeypatch):
    monkeypatch.setattr(vllm_core, "sampling_params", lambda request: None)
    monkeypatch.setattr(EngineThread, "_add", lambda self, key, ids, params, salt, priority=0: self._engine.add_request(key, ids, params))
    thread = EngineThread(FakeEngine, name="fake", slots=1, kv_on_publish="keep", canary_tolerance=0.1, incarnation=0)
    thread.start(10)
    yield thread
    thread.close(5)


def job_on(loop):
    return Job(GenerateRequest("r", np.asarray([1], np.int32), SamplingSpec(), "s"), loop, asyncio.Queue(), 0.0, math.inf)


def test_a_dead_engine_answers_everybody_and_says_why(thread):
    async def run():
        running, waiting, late = (job_on(asyncio.get_running_loop()) for _ in range(3))
        thread.submit(running)
        thread.submit(waiting)
        lost, never_began = await running.results.get(), await waiting.results.get()
        thread.submit(late)
        with pytest.raises(EngineFailure, match="out of memory"):
            await asyncio.wrap_future(thread.call(lambda: 1))
        return lost, never_began, await late.results.get()

    lost, never_began, late = asyncio.run(run())
    assert isinstance(lost, GenerationLost) and lost.tokens == 5
    for failure in (lost, never_began, late):
        assert "RuntimeError: out of memory" in str(failure)


def test_an_unexpected_error_of_a_command_stops_the_engine(thread):
    def command():
        raise ZeroDivisionError("odd")

    with pytest.raises(EngineFailure, match="ZeroDivisionError"):
        thread.call(command).result(5)
    assert thread.failure is not None


def test_closing_answers_those_who_wait_and_refuses_the_rest(thread):
    async def run():
        loop = asyncio.get_running_loop()
        thread.call(lambda: thread.drain(export=True)).result(5)
        held = job_on(loop)
        thread.submit(held)
        idle = thread.call(lambda: thread.drain(export=False)).result(5)
        assert isinstance(idle, Future) and idle.result(5) == 0
        thread.close(5)
        with pytest.raises(EngineFailure, match="closed"):
            thread.submit(job_on(loop))
        return await held.results.get()

    assert "closed" in str(asyncio.run(run()))


def test_a_failed_start_is_reported():
    def build():
        raise ValueError("no such model")

    thread = EngineThread(build, name="fake", slots=1, kv_on_publish="keep", canary_tolerance=0.1, incarnation=0)
    with pytest.raises(ValueError, match="no such model"):
        thread.start(10)
