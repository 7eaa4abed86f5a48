"""Policy and critic: one gradient whatever the split, the packing, the padding; K steps; refusals. float64, 1e-9."""

import functools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sao.algorithms.catalogue import LOSSES
from sao.algorithms.policy_loss import dis
from sao.algorithms.value_loss import mse
from sao.errors import ConfigError, LearnerFailure
from sao.learner.batching import make_batch, pack, plan
from sao.learner.critic import Critic, CriticBatch
from sao.learner.models import freeze
from sao.learner.policy import Policy, PolicyBatch
from tests.unit.learner.learner_builders import batch, causal_model, config, critic_model, segment, trajectory

F64 = torch.float64
EPISODES = batch(6, seed=3)
BATCH = make_batch(EPISODES)
MASK = torch.rand(BATCH.action_tokens, generator=torch.Generator().manual_seed(5)) < 0.8
ADVANTAGES = torch.randn(BATCH.action_tokens, dtype=F64, generator=torch.Generator().manual_seed(6))
LENGTHS = [s.length for s in BATCH.samples]
MODELS = {kind: (causal_model(kind), critic_model(kind)) for kind in ("llama", "qwen3")}
OLD = torch.log_softmax(torch.randn(BATCH.action_tokens, 9, dtype=F64, generator=torch.Generator().manual_seed(7)), -1)[:, 0]
OUTCOMES = (torch.rand(BATCH.action_tokens, generator=torch.Generator().manual_seed(8)) < 0.5).double()
POSITIVE = float((OUTCOMES[MASK] > 0).double().mean())


def policy(kind: str = "llama", **changes: object) -> Policy:
    made = config(**changes)
    reference = causal_model(kind, seed=7) if made.algo.kl_coef else None
    return Policy(MODELS[kind][0], made.algo, made.optim.policy, total_steps=5, reference=reference)


def policy_with(loss: str):
    return functools.partial(policy, algo__loss=loss)


def critic(kind: str = "llama") -> Critic:
    return Critic(MODELS[kind][1], config().optim.critic, total_steps=5)


def feed(target: Policy | Critic, group: list[int], mask: torch.Tensor = MASK, advantages: torch.Tensor = ADVANTAGES) -> None:
    packed = pack([BATCH.samples[i] for i in group])
    slots = packed.slots
    if isinstance(target, Policy):
        more = {"old": OLD[slots], "outcomes": OUTCOMES[slots], "positive_share": POSITIVE}
        target.accumulate(PolicyBatch(packed, BATCH.behaviour[slots].double(), advantages[slots], mask[slots], **more))
    else:
        target.accumulate(CriticBatch(packed, advantages[slots], mask[slots]))


def outcome(target: Policy | Critic) -> tuple[list[torch.Tensor], dict[str, float]]:
    """Mean gradient and counters, without stepping."""
    totals = target.gradients.totals()
    gradients = [p.grad.clone() / totals["counted"] for p in target.gradients.parameters]
    target.gradients.clear()
    return gradients, totals


def assert_same(a: tuple, b: tuple) -> None:
    for x, y in zip(a[0], b[0], strict=True):
        torch.testing.assert_close(x, y, atol=1e-9, rtol=0)
    for name, value in a[1].items():
        assert value == pytest.approx(b[1][name], abs=1e-9), name


CASES = [(kind, make) for kind in ("llama", "qwen3") for make in (policy, critic)]
CASES += [("llama", policy_with(loss)) for loss in sorted(LOSSES) if loss != "dis"]


def case_name(value: object) -> str:
    return value.keywords["algo__loss"] if isinstance(value, functools.partial) else getattr(value, "__name__", str(value))


@pytest.mark.parametrize(("kind", "make"), CASES, ids=case_name)
@settings(max_examples=6)
@given(order=st.permutations(range(6)), budget=st.integers(1, 120), noise=st.lists(st.sampled_from(["empty", "masked"]), max_size=2))
def test_gradient_does_not_depend_on_split_order_or_empty_micro_batches(kind, make, order, budget, noise):
    """C64-C67: sums of gradients, one global count."""
    target = make(kind)
    feed(target, list(range(6)))
    whole = outcome(target)
    for group in plan(LENGTHS, budget, order):
        feed(target, group)
    for what in noise:
        feed(target, [] if what == "empty" else [0, 3], mask=torch.zeros_like(MASK))
    split = outcome(target)
    split[1]["entropy"], split[1]["entropy_rows"] = whole[1].get("entropy", 0), whole[1].get("entropy_rows", 0)
    assert_same(whole, split)


@pytest.mark.parametrize("loss", ["mse", *sorted(LOSSES)])
def test_padding_after_the_last_action_token_changes_nothing(loss):
    """A longer sample takes another place among the padded groups; its extra context feeds no loss."""
    rng = np.random.default_rng(0)
    short = [segment([0, 1, 1], rng=rng), segment([0, 0, 1, 1, 1], rng=rng)]
    padded = []
    for part, extra in zip(short, (9, 1), strict=True):
        grow = lambda x, fill, n=extra: np.append(x, np.full(n, fill))  # noqa: E731
        padded.append(type(part)(grow(part.token_ids, 3), grow(part.action_mask, False), grow(part.logprobs, np.nan), grow(part.versions, -1)))
    results = []
    for parts in (short, padded):
        made = make_batch([trajectory(i, [p]) for i, p in enumerate(parts)])
        if loss == "mse":
            judge = critic()
            judge.accumulate(CriticBatch(pack(made.samples), torch.linspace(-1, 1, 5, dtype=F64), torch.ones(5).bool()))
            results.append(outcome(judge))
            continue
        target = policy(algo__loss=loss)
        more = {"old": made.behaviour.double() + 0.1, "outcomes": torch.ones(5), "positive_share": 1.0}
        target.accumulate(PolicyBatch(pack(made.samples), made.behaviour.double(), torch.ones(5, dtype=F64), torch.ones(5).bool(), **more))
        results.append(outcome(target))
    assert_same(*results)


@pytest.mark.parametrize(
    "changes", [{}, {"algo__kl_coef": 0.3}, {"algo__entropy_coef": 0.2}, {"algo__detach_ratio": False}, {"algo__eps_low": 0.5, "algo__eps_high": 0.5}]
)
def test_the_policy_gradient_is_the_derivative_of_its_loss(changes):
    """Central differences of the surrogate along a random direction (terms behind sg held at their values)."""
    target = policy(**changes)
    feed(target, list(range(6)))
    gradients, totals = outcome(target)
    parameters = target.gradients.parameters
    base = [p.detach().clone() for p in parameters]
    direction = [torch.randn(p.shape, dtype=F64, generator=torch.Generator().manual_seed(i)) for i, p in enumerate(parameters)]
    from sao.learner.scoring import score

    packed = pack(BATCH.samples)
    behaviour = BATCH.behaviour.double()

    def logprobs_and_entropy(shift: float) -> tuple[torch.Tensor, torch.Tensor]:
        with torch.no_grad():
            for p, b, d in zip(parameters, base, direction, strict=True):
                p.copy_(b + shift * d)
            scores = score(target.model, packed, entropy="sampled")
            for p, b in zip(parameters, base, strict=True):
                p.copy_(b)
        return scores.logprobs, scores.entropy

    at, _ = logprobs_and_entropy(0.0)
    ratio = (at - behaviour).exp()
    algo = target.algo
    weight = torch.where((ratio > 1 - algo.eps_low) & (ratio < 1 + algo.eps_high) & MASK, ratio, 0.0)

    def loss(shift: float) -> float:
        logp, entropy = logprobs_and_entropy(shift)
        moving = weight if algo.detach_ratio else torch.where(weight > 0, (logp - behaviour).exp(), 0.0)
        value = -(moving * ADVANTAGES * logp).sum()
        if algo.kl_coef:
            with torch.no_grad():
                d = score(target.reference, packed).logprobs - logp
            value = value + algo.kl_coef * torch.where(MASK, d.exp() - 1 - d, 0.0).sum()
        value = value - algo.entropy_coef * torch.where(MASK, entropy, 0.0).sum()
        return float(value) / totals["counted"]

    step = 1e-5
    numeric = (loss(step) - loss(-step)) / (2 * step)
    analytic = sum(float((g * d).sum()) for g, d in zip(gradients, direction, strict=True))
    assert analytic == pytest.approx(numeric, rel=1e-5, abs=1e-7)


def test_the_accumulated_loss_equals_the_public_functions():
    target, judge = policy(), critic()
    feed(target, list(range(6)))
    logprobs = target.last[0].logprobs
    public = dis(logprobs, BATCH.behaviour.double(), ADVANTAGES, MASK, eps_low=0.99, eps_high=1e6)
    assert target.apply()["actor/pg_loss"] == pytest.approx(float(public.loss), abs=1e-12)
    packed = pack(BATCH.samples)
    values = judge.evaluate(packed)[packed.rows]
    feed(judge, list(range(6)))
    expected = float(mse(values, ADVANTAGES, MASK).loss)
    assert judge.apply()["critic/vf_loss"] == pytest.approx(expected, abs=1e-12)


def test_the_value_is_read_before_the_action_token():
    """C54: changing the action token itself, or anything after it, leaves its value alone."""
    judge = critic()
    rng = np.random.default_rng(4)
    part = segment([0, 0, 1, 0, 1], rng=rng)
    changed = type(part)(np.array([*part.token_ids[:2], 7, 8, 9]), part.action_mask, part.logprobs, part.versions)
    reads = []
    for p in (part, changed):
        packed = pack(make_batch([trajectory(0, [p])]).samples)
        reads.append(judge.evaluate(packed)[packed.rows])
    assert reads[0][0] == reads[1][0] and reads[0][1] != reads[1][1]


def test_denominator_accepted_rescales_survivors():
    results = {}
    for name in ("all", "accepted"):
        target = policy(algo__denominator=name, algo__eps_low=0.5, algo__eps_high=0.5, optim__policy__lr=0.0)
        feed(target, list(range(6)))
        totals = target.gradients.totals()
        results[name] = target.apply()["actor/pg_loss"]
    assert 0 < totals["accepted"] < totals["counted"]
    assert results["accepted"] * totals["accepted"] == pytest.approx(results["all"] * totals["counted"])
    with pytest.raises(ConfigError, match="denominator"):
        policy(algo__denominator="some")


@pytest.mark.parametrize("make", [policy, critic])
def test_a_non_finite_gradient_is_refused_and_leaves_the_weights(make):
    """C21: never a step, and the next batch starts clean."""
    target = make()
    before = [p.detach().clone() for p in target.gradients.parameters]
    feed(target, [0, 1], advantages=torch.full_like(ADVANTAGES, float("nan")))
    with pytest.raises(LearnerFailure, match="not finite"):
        target.apply()
    assert all(torch.equal(a, b) for a, b in zip(before, target.gradients.parameters, strict=True))
    assert all(p.grad is None for p in target.gradients.parameters) and target.gradients.steps == 0


@pytest.mark.parametrize("make", [policy, critic])
def test_nothing_to_train_on_means_no_step(make):
    target = make()
    feed(target, [0, 1], mask=torch.zeros_like(MASK))
    feed(target, [])
    target.reduce()
    assert target.apply() == {} and target.gradients.steps == 0


def test_gradients_are_clipped_to_the_norm():
    target = critic()
    target.gradients.config.grad_clip = 1e-3
    seen = []
    target.gradients.optimizer.step = lambda: seen.append(float(torch.nn.utils.get_total_norm([p.grad for p in target.gradients.parameters])))
    feed(target, list(range(6)))
    assert target.apply()["critic/grad_norm"] > 1e-3
    assert seen == [pytest.approx(1e-3)]


def test_freezing_matches_names_and_refuses_nothing_and_everything():
    model = critic_model()
    assert freeze(model, [r"\.(self_attn|linear_attn)\."]) == 8
    assert all(p.requires_grad != (".self_attn." in n) for n, p in model.named_parameters())
    assert freeze(model, []) == 0 and all(p.requires_grad for p in model.parameters())
    for patterns, message in (
        (["attention_of_another_model"], "no parameter"),
        ([r"\.self_attn\.", r"\.linear_attn\."], "no parameter"),
        ([".*"], "every parameter"),
        (["("], "regular expression"),
    ):
        with pytest.raises(ConfigError, match=message):
            freeze(model, patterns)
