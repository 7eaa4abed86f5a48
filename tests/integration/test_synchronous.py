"""Staleness bound 0 is synchronous training: bit-equal weights to a plain sequential loop, over 20 steps, with a policy that really changes."""

from __future__ import annotations

import random
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from sao.config import Config
from sao.inference.pool import LocalHandle
from sao.inference.protocol import GenerateRequest
from sao.inference.scripted import ScriptedEngine
from sao.learner.learner import TorchLearner
from sao.loop import TrainingLoop
from sao.rollout.episodes import EpisodeRequest
from sao.rollout.staleness import Finished
from sao.trajectory import EpisodeId, FinishReason, SamplingSpec, Segment, Trajectory
from sao.weights.torch_bundle import unpack
from tests.fakes import CountingSource, SilentObserver
from tests.unit.learner.learner_builders import save_model
from tests.virtual_time import run

pytestmark = pytest.mark.integration

STOP = 7
STEPS = 20


class Sampler:
    """A torch policy behind the scripted engine: the token is a pure function of the weights and the ids so far."""

    def __init__(self, path: str) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(path).eval()

    @torch.no_grad()
    def __call__(self, ids: Sequence[int]) -> tuple[int, float]:
        logprobs = torch.log_softmax(self.model(torch.tensor([list(ids)])).logits[0, -1], -1)
        seed = zlib.crc32(np.asarray(ids, np.int32).tobytes())
        token = int(torch.multinomial(logprobs.exp(), 1, generator=torch.Generator().manual_seed(seed)))
        return token, float(logprobs[token])

    def load(self, bundle: Any, version: int) -> None:
        self.model.load_state_dict(dict(unpack(bundle)), strict=False)


def make_config(batch: int = 4) -> Config:
    config = Config()
    config.train.batch_size, config.train.steps = batch, STEPS - 3
    config.critic.critic_only_steps = 3
    config.rollout.staleness = 0
    config.optim.policy.lr, config.optim.critic.lr = 3e-3, 3e-3
    config.learner.tokens_per_micro_batch = 64
    return config


async def episode(handle: LocalHandle, ordinal: int, version: int) -> Trajectory:
    """Two turns with an observation between them; the reward is a property of what was sampled."""
    ids = [1 + ordinal % 5, 2 + ordinal % 3]
    mask, logprobs, versions = [False] * 2, [np.nan] * 2, [-1] * 2
    for turn in range(2):
        spec = SamplingSpec(stop=(STOP,), max_tokens=5)
        answer = await handle.generate(GenerateRequest(f"{ordinal}.{turn}", np.array(ids, np.int32), spec, f"session-{ordinal}"))
        ids += answer.token_ids.tolist()
        mask += [True] * len(answer.token_ids)
        logprobs += answer.logprobs.tolist()
        versions += answer.versions.tolist()
        if turn == 0:
            ids, mask, logprobs, versions = [*ids, 3, 4], [*mask, False, False], [*logprobs, np.nan, np.nan], [*versions, -1, -1]
    segment = Segment(np.array(ids), np.array(mask), np.array(logprobs), np.array(versions))
    reward = float(sum(t for t, m in zip(ids, mask, strict=True) if m) % 3 == 0)
    return Trajectory(EpisodeId(ordinal), "t", "e", (segment,), reward, FinishReason.terminal(), version)


@dataclass
class Workers:
    handle: LocalHandle

    async def run(self, request: EpisodeRequest) -> Finished[Any]:
        trajectory = await episode(self.handle, request.episode_id.ordinal, request.version)
        return Finished(trajectory.meta(), trajectory)


class LocalLearner:
    def __init__(self, learner: TorchLearner) -> None:
        self.learner = learner

    async def step(self, handles: Sequence[Any], step: int) -> Any:
        return self.learner.step(handles, step)

    async def gather(self) -> Any:
        return self.learner.gather()


class LocalEngines:
    def __init__(self, handle: LocalHandle) -> None:
        self.handle = handle

    async def publish(self, weights: Any, version: int) -> Sequence[Any]:
        return [await self.handle.publish(weights[0], version)]


def states(learner: TorchLearner) -> dict[str, torch.Tensor]:
    return {
        f"{name}.{key}": value
        for name, model in (("policy", learner.policy.model), ("critic", learner.critic.model))
        for key, value in model.state_dict().items()
    }


def asynchronous(config: Config, path: str) -> TorchLearner:
    """The real loop; latencies are random, so episodes finish in another order than they started."""
    sampler, rng = Sampler(path), random.Random(5)
    engine = ScriptedEngine(policy=sampler, token_s=lambda request: rng.uniform(0.01, 1.0), on_publish=sampler.load)
    handle, learner = LocalHandle(engine, "scripted"), TorchLearner(config, path, total_steps=config.train.steps)
    loop = TrainingLoop(config, CountingSource(), Workers(handle), LocalLearner(learner), LocalEngines(handle), SilentObserver())
    run(loop.run())
    assert loop.max_staleness <= config.rollout.staleness
    return learner


def sequential(config: Config, path: str) -> TorchLearner:
    """What a reader would write first: sample a batch, train on it, load the weights, again."""
    sampler = Sampler(path)
    engine = ScriptedEngine(policy=sampler, on_publish=sampler.load)
    handle, learner = LocalHandle(engine, "scripted"), TorchLearner(config, path, total_steps=config.train.steps)
    size = config.train.batch_size

    async def main() -> None:
        version = 0
        for step in range(STEPS):
            batch = [await episode(handle, ordinal, version) for ordinal in range(step * size, (step + 1) * size)]
            report = learner.step(batch, step)
            if report.version > version:
                version = report.version
                await handle.publish(learner.gather()[0], version)

    run(main())
    return learner


@pytest.fixture(scope="module")
def model_path(tmp_path_factory) -> str:
    return save_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def plain(model_path) -> TorchLearner:
    return sequential(make_config(), model_path)


def test_bound_zero_gives_bit_equal_weights_to_a_sequential_loop(model_path, plain):
    looped = asynchronous(make_config(), model_path)
    start = Sampler(model_path).model.state_dict()
    assert looped.version == plain.version == STEPS - 3
    left, right = states(looped), states(plain)
    assert left.keys() == right.keys()
    for name, value in left.items():
        assert torch.equal(value, right[name]), name
    assert any(not torch.equal(value, left[f"policy.{name}"]) for name, value in start.items())


def test_a_bound_above_zero_does_not(model_path, plain):
    """The comparison can fail: with stale data the weights differ."""
    config = make_config()
    config.rollout.staleness = 2
    left, right = states(asynchronous(config, model_path)), states(plain)
    assert any(not torch.equal(value, right[name]) for name, value in left.items())
