"""examples/reference_sao.py and the framework's learner are the same algorithm: same losses, gradients and weights on the same batches, in float64.

One directory of weights, written by transformers, is loaded by both. The learner packs, the reference pads; the learner sums over micro-batches of 40
tokens, the reference takes the batch at once; GAE is a scan there and a loop here. Over several steps the optimisers' state takes part.
"""

from __future__ import annotations

import copy
import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import LlamaConfig, LlamaForCausalLM

from sao.learner import attention
from sao.learner.learner import TorchLearner
from sao.trajectory import Segment, Trajectory
from tests.unit.learner.learner_builders import config, exact, trajectory

STEPS, DELAY = 4, 1


def load_reference() -> ModuleType:
    path = Path(__file__).resolve().parents[2] / "examples" / "reference_sao.py"
    spec = importlib.util.spec_from_file_location("reference_sao", path)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules["reference_sao"] = module
    spec.loader.exec_module(module)
    return module


reference = load_reference()
SHAPE = reference.Shape(vocabulary=8, width=16, layers=2, heads=2, feed_forward=24, rope_theta=100.0)


@pytest.fixture(scope="module")
def directory(tmp_path_factory) -> str:
    """A Llama directory of SHAPE with weights large enough that nothing is near uniform."""
    attention.register()
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=SHAPE.vocabulary,
            hidden_size=SHAPE.width,
            intermediate_size=SHAPE.feed_forward,
            num_hidden_layers=SHAPE.layers,
            num_attention_heads=SHAPE.heads,
            num_key_value_heads=SHAPE.heads,
            max_position_embeddings=64,
            rope_parameters={"rope_type": "default", "rope_theta": SHAPE.rope_theta},
            rms_norm_eps=SHAPE.norm_eps,
            tie_word_embeddings=True,
        )
    )
    torch.manual_seed(3)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, mean=1.0 if parameter.ndim == 1 else 0.0, std=0.3)
    path = tmp_path_factory.mktemp("model")
    model.save_pretrained(path)
    return str(path)


def reference_learner(directory: str, settings: object):
    policy = reference.Policy(SHAPE).double()
    policy.load_state_dict(load_file(Path(directory) / "model.safetensors"))
    return reference.Learner(policy, reference.Critic(policy), settings)


def framework_learner(directory: str, settings) -> TorchLearner:
    learner = TorchLearner(
        config(
            model__dtype="float64",
            algo__eps_low=settings.eps_low,
            algo__eps_high=settings.eps_high,
            algo__alpha=settings.alpha,
            algo__whiten="off",
            critic__updates=settings.critic_updates,
            critic__critic_only_steps=settings.critic_only_steps,
            optim__policy__lr=settings.policy_lr,
            optim__critic__lr=settings.critic_lr,
            optim__policy__grad_clip=settings.policy_clip,
            optim__critic__grad_clip=settings.critic_clip,
            learner__tokens_per_micro_batch=40,
        ),
        directory,
        total_steps=STEPS,
    )
    # transformers' RMSNorm goes through float32 whatever the weights' type; the parameters stay the same objects.
    exact(learner.policy.model)
    exact(learner.critic.model)
    return learner


class TwoTurns:
    """Episodes of unlike lengths: a turn of 1 to 3 tokens, an observation of 1 to 4, a second turn; rewards that vary, also in size."""

    def __init__(self, count: int, generator: torch.Generator) -> None:
        self.prompt = torch.randint(1, SHAPE.vocabulary, (count, 3), generator=generator)
        self.first, self.second = torch.randint(1, 4, (2, count), generator=generator)
        self.observation = torch.randint(1, 5, (count,), generator=generator)
        self.reward = torch.rand(count, generator=generator)

    def next(self, ids: torch.Tensor) -> torch.Tensor:
        place = torch.full_like(self.first, ids.shape[1] - 3)
        told = self.first + self.observation
        token = torch.where((place >= self.first) & (place < told), 1 + place % 5, reference.POLICY)
        return torch.where(place >= told + self.second, reference.PAD, token)

    def rewards(self, ids: torch.Tensor) -> torch.Tensor:
        return self.reward


def sample(policy, seed: int):
    """One batch; the log-probs are float32, as engines log them."""
    generator = torch.Generator().manual_seed(seed)
    batch = reference.rollout(policy, TwoTurns(12, generator), 20, generator)
    return batch._replace(behaviour=batch.behaviour.float().double())


def to_trajectories(batch, version: int) -> list[Trajectory]:
    out = []
    for ordinal in range(len(batch.ids)):
        ids, mask = batch.ids[ordinal].numpy(), np.append(False, batch.mask[ordinal].numpy())
        end = np.flatnonzero(mask)[-1] + 1
        logged = np.where(mask, np.append(0.0, batch.behaviour[ordinal].numpy()), np.nan)
        segment = Segment(ids[:end], mask[:end], logged[:end], np.where(mask, version, -1)[:end])
        out.append(trajectory(ordinal, [segment], float(batch.reward[ordinal])))
    return out


def tap(optimizer: torch.optim.Optimizer, names: dict[int, str]) -> list[dict[str, torch.Tensor]]:
    """Every gradient that reaches the optimiser from now on, after clipping, by name."""
    seen: list[dict[str, torch.Tensor]] = []

    def record(opt: torch.optim.Optimizer, *_: object) -> None:
        seen.append({names[id(p)]: p.grad.clone() for group in opt.param_groups for p in group["params"] if p.grad is not None})

    optimizer.register_step_pre_hook(record)
    return seen


def names_of(model: torch.nn.Module) -> dict[int, str]:
    return {id(p): n for n, p in model.named_parameters()}


def same(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor], tolerance: float) -> None:
    assert left.keys() == right.keys()
    for name, value in left.items():
        torch.testing.assert_close(right[name], value, atol=tolerance, rtol=tolerance, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize(
    "changes",
    [{}, {"critic_updates": 1, "eps_low": 0.8, "eps_high": 3.0}, {"critic_only_steps": 2, "alpha": 0.7}, {"policy_clip": 0.01, "critic_clip": 0.02}],
    ids=["paper", "coding band, K=1", "critic first", "clipped"],
)
def test_the_learner_computes_what_the_reference_computes(directory, changes):
    settings = reference.Settings(**{"critic_only_steps": 0, "policy_lr": 3e-2, "critic_lr": 3e-2, **changes})
    plain, framework = reference_learner(directory, settings), framework_learner(directory, settings)
    pairs = [
        (plain.policy, plain.policy_optimizer, framework.policy.model, framework.policy.gradients.optimizer),
        (plain.critic, plain.critic_optimizer, framework.critic.model, framework.critic.gradients.optimizer),
    ]
    taps = [(tap(a, names_of(m)), tap(b, names_of(n))) for m, a, n, b in pairs]
    engine, rejected, steps_of_actor = copy.deepcopy(plain.policy), 0.0, 0
    for step in range(STEPS):
        batch = sample(engine, seed=step)
        engine = copy.deepcopy(plain.policy)  # one version behind
        frozen = step < settings.critic_only_steps
        metrics = plain.step(batch, actor=not frozen)
        report = framework.step(to_trajectories(batch, max(0, framework.version - DELAY)), step)
        steps_of_actor += not frozen
        assert report.version == steps_of_actor
        expected = {
            "critic/vf_loss_before": metrics["value_loss_0"],
            "critic/vf_loss": metrics[f"value_loss_{settings.critic_updates - 1}"],
        }
        if not frozen:
            masked = report.metrics["sao/dis_masked_frac_low"] + report.metrics["sao/dis_masked_frac_high"]
            assert masked == pytest.approx(metrics["masked"], abs=1e-6)
            expected |= {"actor/pg_loss": metrics["policy_loss"], "actor/grad_norm": metrics["grad_norm"]}
            rejected += masked
        for name, value in expected.items():
            assert report.metrics[name] == pytest.approx(value, rel=1e-9, abs=1e-12), (step, name)
        for model, _, other, _ in pairs:
            same(dict(model.named_parameters()), dict(other.named_parameters()), 1e-8)
    assert rejected > 0, "the band never mattered, so the test would not see it"
    for left, right in taps:
        assert len(left) == len(right) > 0
        for before, after in zip(left, right, strict=True):
            same(before, after, 1e-9)
    assert {n for n in taps[1][0][0] if "self_attn" in n} == set()


@pytest.mark.parametrize("wrong", ["eps_high", "alpha", "critic_updates"])
def test_the_comparison_sees_a_wrong_setting(directory, wrong):
    settings = reference.Settings(critic_only_steps=0, policy_lr=3e-2, critic_lr=3e-2)
    other = {"eps_high": 0.1, "alpha": 2.0, "critic_updates": 1}[wrong]
    plain = reference_learner(directory, reference.Settings(critic_only_steps=0, policy_lr=3e-2, critic_lr=3e-2, **{wrong: other}))
    framework, engine = framework_learner(directory, settings), copy.deepcopy(plain.policy)
    for step in range(2):
        batch = sample(engine, seed=step)
        plain.step(batch)
        framework.step(to_trajectories(batch, 0), step)
    right = dict(framework.policy.model.named_parameters())
    gap = max(float((value - right[name]).detach().abs().max()) for name, value in plain.policy.named_parameters())
    assert gap > 1e-5


def test_the_cached_sampler_logs_what_the_model_says(directory):
    policy = reference.Policy(SHAPE).double()
    policy.load_state_dict(load_file(Path(directory) / "model.safetensors"))
    generator = torch.Generator().manual_seed(0)
    batch = reference.rollout(policy, TwoTurns(12, generator), 20, generator)
    with torch.no_grad():
        again = policy.logprobs(batch.ids)
    torch.testing.assert_close(batch.behaviour[batch.mask], again[batch.mask], atol=1e-12, rtol=0)
    assert 0 < int(batch.mask.sum()) < batch.mask.numel()


def test_it_learns_its_toy_task():
    torch.manual_seed(0)
    policy = reference.Policy(reference.Shape(vocabulary=reference.AskAndAdd.vocabulary, width=16, feed_forward=32))
    learner = reference.Learner(policy, reference.Critic(policy), reference.Settings())
    history = reference.train(reference.AskAndAdd, learner, steps=110, batch=64, delay=2, seed=0)
    first, last = (np.mean([row["reward"] for row in rows]) for rows in (history[:20], history[-20:]))
    assert first < 0.12 and last > 0.3
