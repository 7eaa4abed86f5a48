"""DIS, its baselines' building blocks, the value loss: golden numbers, closed-form gradients, and what non-finite numbers may not do."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sao.algorithms.off_policy import ratio_metrics
from sao.algorithms.policy_loss import LossInputs, dis, dis_sum, entropy_sum, kl_k3_sum
from sao.algorithms.value_loss import explained_variance, mse

F64 = torch.float64
BAND = {"eps_low": 0.3, "eps_high": 5.0}


def vector(*x: float, grad: bool = False, dtype: torch.dtype = F64) -> torch.Tensor:
    return torch.tensor(x, dtype=dtype, requires_grad=grad)


def test_golden_band_through_the_gradient():
    ratios = vector(0.69, 0.70, 0.71, 1, 5.99, 6.00, 6.01)
    logp = ratios.log().requires_grad_()
    out = dis(logp, torch.zeros(7, dtype=F64), torch.ones(7, dtype=F64), torch.ones(7).bool(), **BAND)
    out.loss.backward()
    torch.testing.assert_close(-logp.grad * 7, vector(0, 0, 0.71, 1, 5.99, 0, 0))
    assert out.metrics["sao/dis_masked_frac_low"] == pytest.approx(2 / 7)
    assert out.metrics["sao/dis_masked_frac_high"] == pytest.approx(2 / 7)


def test_golden_gradient():
    logp = vector(-2.0, grad=True)
    dis(logp, vector(-2.1), vector(1.0), torch.tensor([True]), **BAND).loss.backward()
    assert float(logp.grad) == pytest.approx(-1.10517, abs=1e-5)


def test_the_literal_reading_carries_one_plus_log_pi():
    logp = vector(-2.0, grad=True)
    total = dis_sum(LossInputs(logp, vector(-2.1), vector(1.0), torch.tensor([True])), **BAND, detach_ratio=False).total
    total.backward()
    assert float(logp.grad) == pytest.approx(-math.exp(0.1) * (1 - 2.0))


@settings(max_examples=50)
@given(st.lists(st.tuples(st.floats(-6, -0.01), st.floats(-6, -0.01), st.floats(-3, 3), st.booleans()), min_size=1, max_size=8))
def test_gradient_in_closed_form(rows):
    """d loss / d logp_t = -f(r_t) A_t / n on the mask, 0 off it; the band does not look at the sign of A."""
    logp, behaviour, advantage, mask = (torch.tensor([r[i] for r in rows], dtype=torch.bool if i == 3 else F64) for i in range(4))
    logp.requires_grad_()
    dis(logp, behaviour, advantage, mask, **BAND).loss.backward()
    ratio = (logp.detach() - behaviour).exp()
    weight = torch.where((ratio > 0.7) & (ratio < 6.0) & mask, ratio, 0.0)
    torch.testing.assert_close(logp.grad, -weight * advantage / max(int(mask.sum()), 1))


def test_the_denominator_counts_rejected_tokens():
    logp, behaviour = vector(-1, -1, -9), vector(-1, -1, -1)
    loss = dis(logp, behaviour, torch.ones(3, dtype=F64), torch.ones(3).bool(), **BAND).loss
    assert float(loss) == pytest.approx(2 / 3)
    assert float(dis(logp, behaviour, torch.ones(3, dtype=F64), torch.ones(3).bool(), **BAND, denominator=8).loss) == pytest.approx(2 / 8)


@pytest.mark.parametrize("gap", [-99.0, 99.0, 800.0])
def test_a_rejected_extreme_ratio_leaves_finite_zero_gradients(gap):
    """C21: masking by multiplication would give 0 * inf."""
    logp = vector(-1.0, -1.0 + min(gap, 0.0), grad=True)
    behaviour = vector(-1.0, -1.0 - max(gap, 0.0))
    for detach in (True, False):
        logp.grad = None
        dis_sum(LossInputs(logp, behaviour, vector(1.0, 1.0), torch.ones(2).bool()), **BAND, detach_ratio=detach).total.backward()
        assert torch.isfinite(logp.grad).all() and logp.grad[1] == 0


def test_probability_zero_is_rejected_not_excluded():
    logp = vector(-math.inf, -1.0, grad=True)
    out = dis(logp, vector(-1.0, -1.0), vector(1.0, 1.0), torch.ones(2).bool(), **BAND)
    out.loss.backward()
    assert logp.grad.tolist() == [0.0, -0.5] and out.metrics["off_policy/tokens"] == 2


@pytest.mark.parametrize("missing", [math.nan, math.inf, -math.inf])
def test_a_missing_behaviour_logprob_equals_removing_the_token(missing):
    """C22, C68: out of the loss, the metrics and the default denominator, and counted."""
    with_it, without = vector(-1.0, -2.0, -0.5, grad=True), vector(-1.0, -0.5, grad=True)
    a = dis(with_it, vector(-1.1, missing, -0.4), vector(1.0, 1.0, -2.0), torch.ones(3).bool(), **BAND)
    b = dis(without, vector(-1.1, -0.4), vector(1.0, -2.0), torch.ones(2).bool(), **BAND)
    a.loss.backward()
    b.loss.backward()
    assert torch.equal(a.loss, b.loss) and torch.equal(with_it.grad[[0, 2]], without.grad) and with_it.grad[1] == 0
    assert a.metrics.pop("off_policy/non_finite_tokens") == 1 and b.metrics.pop("off_policy/non_finite_tokens") == 0
    assert a.metrics == b.metrics


def test_an_empty_mask_gives_zero_and_no_undefined_metric():
    """C23."""
    logp = vector(-1.0, -2.0, grad=True)
    nothing = torch.zeros(2).bool()
    out = dis(logp, vector(math.nan, math.nan), vector(math.nan, 1.0), nothing, **BAND)
    out.loss.backward()
    assert float(out.loss.detach()) == 0 and not logp.grad.any()
    assert out.metrics == {"off_policy/tokens": 0.0, "off_policy/non_finite_tokens": 0.0}
    assert mse(logp, logp, nothing).metrics == {"critic/tokens": 0.0}


@pytest.mark.parametrize(("given_", "kept"), [(torch.bfloat16, torch.float32), (torch.float16, torch.float32), (F64, F64)])
def test_precision(given_, kept):
    x = torch.full((2, 2), -1.0, dtype=given_)
    assert dis(x, x, x, torch.ones(2, 2).bool(), **BAND).loss.dtype == kept
    assert mse(x, x, torch.ones(2, 2).bool()).loss.dtype == kept


def test_the_advantage_is_a_constant():
    advantage = vector(1.0, grad=True)
    logp = vector(-1.0, grad=True)
    dis(logp, vector(-1.0), advantage, torch.tensor([True]), **BAND).loss.backward()
    assert advantage.grad is None and logp.grad is not None


def test_ratio_metrics_split_by_version_gap():
    """C27: engine mismatch at gap 0, staleness beyond."""
    gaps = torch.tensor([0, 0, 1, 6, 40, 2])
    log_ratio = vector(0.0, 0.0, 0.5, -1.0, 2.0, math.nan)
    counted = torch.tensor([1, 1, 1, 1, 1, 0]).bool()
    low, high = log_ratio < -0.5, log_ratio > 1.5
    got = ratio_metrics(log_ratio, counted, low, high, gaps)
    assert got["off_policy/gap_0/tokens"] == 2 and got["off_policy/gap_0/abs_log_ratio_mean"] == 0
    assert got["off_policy/gap_1/ratio_mean"] == pytest.approx(math.exp(0.5))
    assert got["off_policy/gap_5_8/masked_frac"] == 1 and got["off_policy/gap_17_up/masked_frac"] == 1
    assert not any(k.startswith("off_policy/gap_2/") for k in got)
    weights = vector(1, 1, math.exp(0.5), 0, 0)
    assert got["sao/ess"] == pytest.approx(float(weights.sum() ** 2 / (5 * weights.square().sum())))
    assert all(math.isfinite(v) for v in got.values())


def test_kl_k3_and_entropy():
    logp, reference = vector(-1.0, -2.0, -3.0, grad=True), vector(-1.5, -1.0, math.nan)
    total = kl_k3_sum(logp, reference, torch.ones(3).bool())
    assert float(total.detach()) == pytest.approx((math.exp(-0.5) - 0.5) + (math.exp(1.0) - 2))
    total.backward()
    torch.testing.assert_close(logp.grad, vector(1 - math.exp(-0.5), 1 - math.exp(1.0), 0.0))
    assert float(entropy_sum(vector(1.0, 2.0), torch.tensor([True, False]))) == 1.0


def test_mse_has_no_factor_one_half_and_targets_no_gradient():
    values, returns = vector(1.0, 2.0, math.nan, grad=True), vector(0.0, 4.0, 1.0, grad=True)
    out = mse(values, returns, torch.tensor([1, 1, 0]).bool())
    out.loss.backward()
    assert float(out.loss) == pytest.approx(2.5)
    torch.testing.assert_close(values.grad, vector(1.0, -2.0, 0.0))
    assert returns.grad is None
    assert float(mse(values, returns, torch.tensor([1, 1, 0]).bool(), denominator=10).loss) == pytest.approx(0.5)


def test_explained_variance():
    mask = torch.tensor([1, 1, 1, 0]).bool()
    returns = vector(0.0, 1.0, 1.0, 9.0)
    assert explained_variance(returns, returns, mask) == pytest.approx(1.0)
    assert explained_variance(torch.zeros(4), returns, mask) == pytest.approx(0.0)
    assert explained_variance(torch.zeros(4), torch.full((4,), 0.1), mask) is None
    assert explained_variance(torch.zeros(4), returns, torch.zeros(4).bool()) is None
