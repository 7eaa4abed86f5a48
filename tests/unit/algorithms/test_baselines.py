"""The baselines' losses against plain scalar arithmetic and finite differences, and the advantages without a critic by hand. float64."""

import inspect
import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sao.algorithms import outcome as adv
from sao.algorithms.catalogue import ADVANTAGES, LOSSES, find, function_of
from sao.algorithms.outcome import Outcomes
from sao.algorithms.policy_loss import LossInputs, TokenLoss
from sao.config import AlgoConfig

F64 = torch.float64
PPO = {"eps_low": 0.2, "eps_high": 0.28}
ARGUMENTS = {
    "dis": {"eps_low": 0.3, "eps_high": 5.0},
    "reinforce": {},
    "ppo_clip": PPO,
    "tis": {"cap": 2.0},
    "icepop": {"mask_low": 0.5, "mask_high": 5.0} | PPO,
    "vapo": PPO | {"nll_coef": 0.1},
}


def loss(name: str, inputs: LossInputs) -> TokenLoss:
    return function_of("loss", AlgoConfig(loss=name))(inputs, **ARGUMENTS[name])


def clip_loss(r: float, gain: float) -> float:
    return min(r * gain, min(max(r, 0.8), 1.28) * gain)


def expected(name: str, logp: float, behaviour: float, old: float, gain: float, reward: float, share: float) -> tuple[float, float]:
    """(loss, d loss / d logp) of one token, by the formulas of the papers, written apart from the code under test."""
    r = math.exp(logp - behaviour)
    if name == "reinforce":
        return -gain * logp, -gain
    if name == "tis":
        return -min(r, 2.0) * gain * logp, -min(r, 2.0) * gain
    if name == "dis":
        f = r if 0.7 < r < 6.0 else 0.0
        return -f * gain * logp, -f * gain
    if name == "icepop":
        k, r = math.exp(old - behaviour), math.exp(logp - old)
        m = k if 0.5 <= k <= 5.0 else 0.0
        free = r < 1.28 if gain > 0 else r > 0.8
        return -m * clip_loss(r, gain), -m * r * gain * free
    free = r < 1.28 if gain > 0 else r > 0.8
    value, slope = -clip_loss(r, gain), -r * gain * free
    if name == "vapo" and reward > 0:
        return value - 0.1 * logp / share, slope - 0.1 / share
    return value, slope


def random_inputs(seed: int, n: int = 200) -> LossInputs:
    generator = torch.Generator().manual_seed(seed)
    logp = -4 * torch.rand(n, dtype=F64, generator=generator)
    behaviour, old = (logp + 1.2 * torch.randn(n, dtype=F64, generator=generator) for _ in range(2))
    mask = torch.rand(n, generator=generator) < 0.8
    outcomes = (torch.rand(n, generator=generator) < 0.5).double()
    gains = torch.randn(n, dtype=F64, generator=generator)
    share = float((outcomes[mask] > 0).double().mean())
    return LossInputs(logp.requires_grad_(), behaviour, gains, mask, old=old, outcomes=outcomes, positive_share=share)


@pytest.mark.parametrize("name", sorted(LOSSES))
@settings(max_examples=5)
@given(seed=st.integers(0, 2**16))
def test_value_gradient_and_weight_in_closed_form(name, seed):
    inputs = random_inputs(seed)
    token = loss(name, inputs)
    token.total.backward()
    rows = zip(*(x.tolist() for x in (inputs.logprobs, inputs.behaviour, inputs.old, inputs.advantages, inputs.outcomes)), strict=True)
    pairs = [expected(name, *row, inputs.positive_share) for row in rows]
    value = torch.tensor([p[0] for p in pairs], dtype=F64)
    slope = torch.tensor([p[1] for p in pairs], dtype=F64)
    torch.testing.assert_close(token.total.detach(), value[inputs.mask].sum(), atol=1e-9, rtol=1e-9)
    torch.testing.assert_close(inputs.logprobs.grad, torch.where(inputs.mask, slope, 0.0), atol=1e-12, rtol=1e-12)
    assert torch.equal(token.accepted.int() + token.low.int() + token.high.int(), token.counted.int())
    if name != "vapo":  # whose imitation acts on clipped tokens too
        assert not inputs.logprobs.grad[token.low | token.high].any()
        weight = torch.where(token.accepted, token.log_ratio.exp(), 0.0) if token.weight is None else token.weight
        torch.testing.assert_close(inputs.logprobs.grad, torch.where(inputs.mask, -weight * inputs.advantages, 0.0))


@pytest.mark.parametrize("name", sorted(LOSSES))
def test_gradient_against_finite_differences(name):
    """Central differences of the loss with what stands behind sg held at its value: the surrogate of each token is moved alone."""
    inputs = random_inputs(7)
    loss(name, inputs).total.backward()
    step, at = 1e-6, inputs.logprobs.detach()
    detached = name in ("dis", "tis")  # the weight is a constant: differentiate w * A * logp
    token = loss(name, inputs)
    weight = torch.where(token.accepted, token.log_ratio.exp(), 0.0) if token.weight is None else token.weight
    for index in range(0, len(at), 7):

        def moved(by: float, index: int = index) -> float:
            logp = at.clone()
            logp[index] += by
            if detached:
                return float(-(weight * inputs.advantages * logp).sum())
            return float(loss(name, replace(inputs, logprobs=logp)).total)

        numeric = (moved(step) - moved(-step)) / (2 * step)
        assert float(inputs.logprobs.grad[index]) == pytest.approx(numeric, abs=1e-6)


@pytest.mark.parametrize("name", sorted(LOSSES))
@pytest.mark.parametrize("gap", [-900.0, -99.0, 99.0, 900.0])
@pytest.mark.parametrize("gain", [-1.0, 1.0])
def test_an_extreme_ratio_leaves_finite_gradients(name, gap, gain):
    logp = torch.tensor([-1.0, -1.0 + min(gap, 0.0), -math.inf], dtype=F64, requires_grad=True)
    behaviour = torch.tensor([-1.0, -1.0 - max(gap, 0.0), -1.0], dtype=F64)
    ones = torch.ones(3, dtype=F64)
    token = loss(name, LossInputs(logp, behaviour, gain * ones, torch.ones(3).bool(), old=behaviour, outcomes=ones, positive_share=1.0))
    token.total.backward()
    assert torch.isfinite(token.total) and torch.isfinite(logp.grad).all()
    assert token.counted.all() and token.low[2], "a trained probability of 0 counts and gives nothing"


@pytest.mark.parametrize("name", sorted(LOSSES))
@pytest.mark.parametrize("field", ["behaviour", "old", "logprobs"])
def test_a_missing_log_prob_equals_removing_the_token(name, field):
    if field == "old" and name != "icepop":
        return
    inputs = random_inputs(3, n=20)
    broken = {f: getattr(inputs, f).detach().clone() for f in ("logprobs", "behaviour", "advantages", "mask", "old", "outcomes")}
    broken[field][4] = math.nan
    keep = torch.arange(20) != 4
    with_it = LossInputs(**broken, positive_share=0.5)
    without = LossInputs(**{k: v[keep] for k, v in broken.items()}, positive_share=0.5)
    a, b = loss(name, with_it), loss(name, without)
    torch.testing.assert_close(a.total, b.total)
    assert not a.counted[4] and torch.equal(a.counted[keep], b.counted)


@pytest.mark.parametrize("name", sorted(LOSSES))
def test_nothing_to_count_and_the_advantage_is_a_constant(name):
    inputs = random_inputs(1)
    token = loss(name, replace(inputs, mask=torch.zeros_like(inputs.mask), positive_share=0.0))
    token.total.backward()
    assert float(token.total.detach()) == 0 and not inputs.logprobs.grad.any() and not token.counted.any()
    gain = inputs.advantages.clone().requires_grad_()
    loss(name, replace(inputs, advantages=gain)).total.backward()
    assert gain.grad is None


def test_the_declared_defaults_are_those_of_the_signatures():
    """The catalogue imports no torch, so it names keyword arguments apart from the functions: they must not drift."""
    for kind, table in (("loss", LOSSES), ("advantage", ADVANTAGES)):
        for name, entry in table.items():
            if name == "gae":
                continue
            parameters = inspect.signature(function_of(kind, AlgoConfig(**{kind: name}))).parameters.values()
            keywords = {p.name for p in parameters if p.kind is p.KEYWORD_ONLY}
            assert keywords == set(entry.arguments) | set(entry.keys), name
            assert find(kind, name) is entry


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("ppo_clip", {"eps_low": -0.1}),
        ("tis", {"cap": 0.0}),
        ("icepop", {"mask_low": 5.0}),
        ("vapo", {"nll_coef": -1.0}),
        ("dis", {"eps_high": -1.0}),
    ],
)
def test_arguments_out_of_range_are_refused(name, changes):
    with pytest.raises(ValueError, match=next(iter(changes))):
        function_of("loss", AlgoConfig(loss=name))(random_inputs(0), **ARGUMENTS[name] | changes)


def outcomes(rewards, tasks=None, groups=None, kept=None) -> Outcomes:
    n = len(rewards)
    return Outcomes(
        torch.tensor(rewards, dtype=F64),
        tuple(tasks or ["a"] * n),
        torch.tensor(groups if groups is not None else range(n)),
        torch.ones(n).bool() if kept is None else torch.tensor(kept).bool(),
    )


def test_group_advantages_by_hand():
    got, _ = adv.group(outcomes([1, 0, 0, 0, 0.1, 0.1, 0.1, 3], groups=[0, 0, 0, 0, 1, 1, 1, 2]), {})
    std = math.sqrt(3 / 16 * 4 / 3)
    torch.testing.assert_close(got, torch.tensor([0.75 / std, *[-0.25 / std] * 3, 0, 0, 0, 0], dtype=F64))
    assert got[4:].tolist() == [0.0] * 4, "equal outcomes give 0 exactly, whatever rounding says of their mean"


def test_group_leaves_out_what_trains_nothing():
    got, _ = adv.group(outcomes([1, 0, 9], groups=[0, 0, 0], kept=[1, 1, 0]), {})
    torch.testing.assert_close(got, torch.tensor([0.5, -0.5, 0], dtype=F64) / math.sqrt(0.5))


def test_batch_mean_and_outcome():
    both = outcomes([1, 0, 5], kept=[1, 1, 0])
    assert adv.batch_mean(both, {})[0].tolist() == [0.5, -0.5, 0.0]
    assert adv.outcome(both, {})[0].tolist() == [1.0, 0.0, 0.0]
    assert adv.batch_mean(outcomes([1.0], kept=[0]), {})[0].tolist() == [0.0]


def test_running_mean_by_hand():
    first, state = adv.running_mean(outcomes([1, 0, 1, 1], tasks="abaa"), {}, window=2, per_task=True)
    assert first.tolist() == [0.0, 0.0, 0.0, 0.0] and state == {"a": [1.0, 1.0], "b": [0.0]}
    second, after = adv.running_mean(outcomes([0, 1], tasks="ab"), state, window=2, per_task=True)
    assert second.tolist() == [-1.0, 1.0] and after == {"a": [1.0, 0.0], "b": [0.0, 1.0]}
    assert state == {"a": [1.0, 1.0], "b": [0.0]}, "the state given is left as it was"
    everywhere, state = adv.running_mean(outcomes([1, 0, 1], tasks="abc"), {}, window=8, per_task=False)
    assert everywhere.tolist() == [0.0, -1.0, 0.5] and state == {"": [1.0, 0.0, 1.0]}


@settings(max_examples=40)
@given(st.lists(st.tuples(st.sampled_from("abc"), st.floats(-2, 2)), max_size=30), st.integers(1, 9), st.booleans(), st.integers(1, 5))
def test_running_mean_equals_a_slow_reference_however_the_stream_is_cut_into_batches(stream, window, per_task, size):
    state, got = {}, []
    for begin in range(0, len(stream), size):
        part = stream[begin : begin + size]
        values, state = adv.running_mean(outcomes([r for _, r in part], tasks=[t for t, _ in part]), state, window=window, per_task=per_task)
        got += values.tolist()
    for index, (task, reward) in enumerate(stream):
        before = [r for t, r in stream[:index] if t == task or not per_task][-window:]
        assert got[index] == pytest.approx(reward - sum(before) / len(before) if before else 0.0)
