"""A compacted episode from the turn loop, trained by the real learner: each sampled token once, its advantage carried across segments."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
import torch

from sao.agents.limits import Compaction, Limits
from sao.agents.turns import run_episode
from sao.algorithms.advantages import length_adaptive_lambda
from sao.environment import Action, Context, StepResult, Task
from sao.inference.protocol import GenerateRequest, Generation
from sao.learner.learner import TorchLearner
from sao.learner.protocol import CONTEXT, TRAINED
from sao.trajectory import SamplingSpec, Trajectory
from tests.unit.learner.learner_builders import VOCABULARY, config, save_model

STOP = 2


class Letters:
    """A renderer whose tokens are numbers of its own: a message is its length's worth of them."""

    stop_ids = (STOP,)

    def open(self, messages, tools):
        return [token for message in messages for token in self._message(message)] + [3]

    def delta(self, turn_ids, messages):
        return self.open(messages, ())

    def _message(self, message):
        return [4, *(5 + ord(letter) % (VOCABULARY - 5) for letter in message["content"])]

    def text(self, turn_ids):
        return "".join(chr(97 + token % 26) for token in turn_ids if token != STOP)

    def count_markers(self, messages):
        return 0


class Walk:
    """Ends at its fifth turn with a reward of 1."""

    turns = 0

    async def reset(self, context: Context):
        return [{"role": "user", "content": "go"}]

    async def step(self, action: Action) -> StepResult:
        self.turns += 1
        return StepResult([{"role": "user", "content": "on"}], float(self.turns == 5), self.turns == 5)

    def tools(self):
        return ()

    async def close(self) -> None: ...


def compacted() -> Trajectory:
    rng = np.random.default_rng(0)

    async def generate(request: GenerateRequest) -> Generation:
        ids = [*rng.integers(5, VOCABULARY, 3).tolist(), STOP]
        return Generation(np.array(ids), rng.uniform(-5, -3, 4), np.zeros(4, int), "stop")

    limits = Limits(max_turn_tokens=4, context_tokens=100, compaction=Compaction(at=19, keep=1, summary_tokens=4, prompt="sum", most=2))
    task = Task("t", "walk", {})
    run = run_episode(task, Walk(), Letters(), generate, episode_id=(0, 0), admitted_version=0, sampling=SamplingSpec(), limits=limits)
    return asyncio.run(run)


@pytest.fixture(scope="module")
def model_path(tmp_path_factory) -> str:
    return save_model(tmp_path_factory.mktemp("model"))


@pytest.mark.parametrize("gamma", [1.0, 0.9])
def test_every_sampled_token_of_a_compacted_episode_trains_once_with_its_share_of_the_outcome(model_path, gamma):
    """V = 0 (a fresh critic, none of its steps taken): A = gamma^(k) lambda^(k) R with k the sampled tokens after this one, in its segment and in later ones."""
    episode = compacted()
    parts = episode.segments
    assert len(parts) >= 2 and episode.reward == 1.0 and episode.metrics["compactions"] == len(parts) - 1
    learner = TorchLearner(config(critic__updates=0, algo__gamma=gamma, algo__whiten="off"), model_path, total_steps=4)
    report = learner.step([episode], 0)
    assert [record.segment for record in report.records] == list(range(len(parts)))
    for part, record in zip(parts, report.records, strict=True):
        assert (record.mask_reason == np.where(part.versions >= 0, TRAINED, CONTEXT)).all()
    total = sum(map(int, (part.sampled_tokens for part in parts)))
    assert report.metrics["tokens/action"] == total == 4 * (5 + len(parts) - 1)
    advantages = np.concatenate([record.advantages[part.action_mask] for part, record in zip(parts, report.records, strict=True)])
    lam = float(length_adaptive_lambda(torch.tensor([float(total)]), 1.5))
    np.testing.assert_allclose(advantages, (gamma * lam) ** np.arange(total - 1, -1, -1.0), rtol=1e-5)
    returns = np.concatenate([record.returns[part.action_mask] for part, record in zip(parts, report.records, strict=True)])
    np.testing.assert_allclose(returns, gamma ** np.arange(total - 1, -1, -1.0), rtol=1e-5)


def test_the_update_of_a_compacted_episode_is_that_of_its_tokens_where_they_were_sampled(model_path):
    """Against the gradient written out: - sum over segments of r A grad log pi / tokens, with the advantages of the test above."""
    episode = compacted()
    learner = TorchLearner(config(critic__updates=0, algo__whiten="off", optim__policy__grad_clip=1e9), model_path, total_steps=4)
    total = episode.action_tokens
    lam = float(length_adaptive_lambda(torch.tensor([float(total)]), 1.5))
    from transformers import LlamaForCausalLM

    reference = LlamaForCausalLM.from_pretrained(model_path).double()
    loss, later = torch.zeros((), dtype=torch.float64), total
    for part in episode.segments:
        ids = torch.from_numpy(part.token_ids.astype(np.int64))
        logits = reference(ids[None]).logits[0].log_softmax(-1)
        for at in np.flatnonzero(part.action_mask).tolist():
            later -= 1
            logprob = logits[at - 1, ids[at]]
            ratio = (logprob.detach() - float(part.logprobs[at])).exp()
            loss = loss - ratio * lam**later * logprob / total
    loss.backward()
    norm = torch.sqrt(sum(p.grad.square().sum() for p in reference.parameters() if p.grad is not None))
    report = learner.step([episode], 0)
    assert report.metrics["actor/grad_norm"] == pytest.approx(float(norm), rel=1e-3)
