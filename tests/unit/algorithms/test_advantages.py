"""Golden numbers of the specification, hand-computed tables, an independent oracle, and invariances of the advantage estimators."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sao.algorithms.advantages import (
    combine_segments,
    every_position_gae,
    later_action_tokens,
    length_adaptive_lambda,
    skip_observation_gae,
    step_level_gae,
    whiten,
)

F64 = torch.float64


def grid(*rows: list[float], dtype: torch.dtype = F64) -> torch.Tensor:
    return torch.tensor(rows, dtype=dtype)


def test_golden_lambda():
    got = length_adaptive_lambda(torch.tensor([1, 2, 3, 6, 100, 1000]))
    torch.testing.assert_close(got, torch.tensor([1 / 3, 2 / 3, 7 / 9, 8 / 9, 0.993333, 0.999333]), atol=1e-6, rtol=0)


def test_lambda_is_clamped_to_the_unit_interval():
    assert length_adaptive_lambda(torch.tensor([0, 1]), alpha=0.5).tolist() == [0.0, 0.0]
    with pytest.raises(ValueError, match="alpha"):
        length_adaptive_lambda(torch.tensor([1]), alpha=0.0)


def test_golden_gae():
    rewards, values = grid([0, 0, 0, 0, 1, 0]), grid([0.1, 0.2, 9, -9, 0.4, 7])
    mask = torch.tensor([[1, 1, 0, 0, 1, 0]]).bool()
    advantages, _ = skip_observation_gae(rewards, values, mask, lam=7 / 9)
    torch.testing.assert_close(advantages, grid([0.6185185185, 0.6666666667, 0, 0, 0.6, 0]), atol=1e-9, rtol=0)
    _, returns = skip_observation_gae(rewards, values, mask, lam=1.0)
    torch.testing.assert_close(returns, grid([1, 1, 0, 0, 1, 0]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_one_lambda_per_row_and_the_input_type_comes_back(dtype):
    rewards = grid([0, 1], [0, 1], dtype=dtype)
    values = grid([0.5, 0.25], [0.5, 0.25], dtype=dtype)
    mask = torch.ones(2, 2, dtype=torch.bool)
    advantages, returns = skip_observation_gae(rewards, values, mask, lam=torch.tensor([0.0, 1.0]))
    assert advantages.dtype == returns.dtype == dtype
    torch.testing.assert_close(advantages, grid([-0.25, 0.75], [0.5, 0.75], dtype=dtype))
    for bad in (torch.ones(2, 1), torch.ones(3)):
        with pytest.raises(ValueError, match="lam"):
            skip_observation_gae(rewards, values, mask, lam=bad)


def test_half_precision_goes_up_to_float32():
    half = torch.zeros(1, 3, dtype=torch.bfloat16)
    assert skip_observation_gae(half, half, torch.ones(1, 3).bool())[0].dtype == torch.float32


@pytest.mark.parametrize(
    ("mask", "reward_at", "expected"),
    [
        ([0, 1, 1, 0], 2, [0.0, 0.8, 0.7, 0.0]),  # a trailing observation holds no reward and takes none
        ([0, 1, 0, 1], 3, [0.0, 0.8, 0.0, 0.6]),
        ([1, 1, 1, 1], 3, [0.9, 0.8, 0.7, 0.6]),
        ([0, 0, 0, 1], 3, [0.0, 0.0, 0.0, 0.6]),
        ([0, 1, 0, 0], 1, [0.0, 0.8, 0.0, 0.0]),
    ],
)
def test_value_before_the_token_and_reward_on_the_last_action_token(mask, reward_at, expected):
    """C53, C54: with lam = 1, A_t = R - V(s_t), V read before token t, whatever stands on observations."""
    rewards = torch.full((1, 4), 55.0, dtype=F64)
    rewards[0, torch.tensor(mask).bool()] = 0.0
    rewards[0, reward_at] = 1.0
    advantages, returns = skip_observation_gae(rewards, grid([0.1, 0.2, 0.3, 0.4]), torch.tensor([mask]).bool())
    torch.testing.assert_close(advantages, grid(expected))
    torch.testing.assert_close(returns, torch.tensor([mask], dtype=F64))


def test_truncation_terminal_against_bootstrap():
    """C56 by hand, gamma 0.9, lam 0.5, V = .2 .4, bootstrap .8: delta = .16 and .32 (terminal: -.4)."""
    rewards, values, mask = grid([0, 0]), grid([0.2, 0.4]), torch.ones(1, 2).bool()
    terminal, _ = skip_observation_gae(rewards, values, mask, gamma=0.9, lam=0.5)
    torch.testing.assert_close(terminal, grid([0.16 + 0.45 * -0.4, -0.4]))
    bootstrapped, returns = skip_observation_gae(rewards, values, mask, gamma=0.9, lam=0.5, bootstrap=torch.tensor([0.8]))
    torch.testing.assert_close(bootstrapped, grid([0.16 + 0.45 * 0.32, 0.32]), atol=1e-7, rtol=0)
    torch.testing.assert_close(returns, bootstrapped + values)


def test_what_stands_off_the_mask_cannot_leak():
    rewards, values = grid([float("nan"), 0, float("inf"), 1]), grid([float("inf"), 0.5, float("nan"), 0.25])
    advantages, returns = skip_observation_gae(rewards, values, torch.tensor([[0, 1, 0, 1]]).bool())
    assert torch.isfinite(advantages).all() and torch.isfinite(returns).all()


def test_no_action_token_at_all():
    for shape in ((2, 3), (1, 0), (0, 4)):
        x = torch.zeros(shape)
        advantages, returns = skip_observation_gae(x, x, x.bool())
        assert advantages.shape == returns.shape == shape and not advantages.any()


def naive(rewards: list[float], values: list[float], gamma: float, lam: float, end: float) -> list[float]:
    out, advantage, following = [], 0.0, end
    for reward, value in zip(reversed(rewards), reversed(values), strict=True):
        advantage = reward + gamma * following - value + gamma * lam * advantage
        following = value
        out.append(advantage)
    return out[::-1]


number = st.floats(-3, 3, allow_nan=False, width=32)
tokens = st.lists(st.tuples(number, number), min_size=1, max_size=12)


@settings(max_examples=60)
@given(tokens, st.floats(0, 1), st.floats(0, 1), number)
def test_matches_the_textbook_recursion(data, gamma, lam, end):
    rewards, values = [x[0] for x in data], [x[1] for x in data]
    got, _ = skip_observation_gae(
        grid(rewards), grid(values), torch.ones(1, len(data)).bool(), gamma=gamma, lam=lam, bootstrap=torch.tensor([end], dtype=F64)
    )
    torch.testing.assert_close(got[0], torch.tensor(naive(rewards, values, gamma, lam, end), dtype=F64), atol=1e-9, rtol=1e-9)


@settings(max_examples=60)
@given(tokens, st.lists(st.integers(0, 4), min_size=13, max_size=13), st.floats(0, 1), st.floats(0, 1))
def test_inserting_masked_tokens_changes_nothing(data, gaps, gamma, lam):
    """C51: bit for bit, however long the observations and whatever rewards and values stand on them."""
    dense = grid([x[0] for x in data]), grid([x[1] for x in data]), torch.ones(1, len(data)).bool()
    rewards, values, mask = [], [], []
    for index, gap in enumerate(gaps[: len(data) + 1]):
        rewards += [7.0] * gap
        values += [-13.0] * gap
        mask += [False] * gap
        if index < len(data):
            rewards.append(data[index][0])
            values.append(data[index][1])
            mask.append(True)
    spread = torch.tensor([mask])
    plain = skip_observation_gae(*dense, gamma=gamma, lam=lam)
    for a, b in zip(plain, skip_observation_gae(grid(rewards), grid(values), spread, gamma=gamma, lam=lam), strict=True):
        assert torch.equal(a[0], b[spread])
        assert not b[~spread].any()


@pytest.fixture
def torchrl_functional():
    """torchrl takes its decay factors in the default type: float64 here, so that it is an oracle to 1e-12."""
    functional = pytest.importorskip("torchrl.objectives.value.functional")
    before = torch.get_default_dtype()
    torch.set_default_dtype(F64)
    yield functional
    torch.set_default_dtype(before)


@pytest.mark.integration
@pytest.mark.parametrize("gamma", [0.97, 1.0])
@pytest.mark.parametrize("lam", [0.0, 0.9, 1.0])
@pytest.mark.parametrize("cut", [False, True])
def test_torchrl_agrees_on_the_compressed_sequence(torchrl_functional, gamma, lam, cut):
    """GAE, and the critic's targets as TD(lambda) returns: an oracle that we did not write. Marked for its import, which takes ten seconds."""
    generator = torch.Generator().manual_seed(0)
    rewards, values = (torch.randn(5, 40, dtype=F64, generator=generator) for _ in range(2))
    ends = torch.randn(5, dtype=F64, generator=generator) if cut else torch.zeros(5, dtype=F64)
    mask = torch.rand(5, 40, generator=generator) < 0.4
    for row in range(5):
        keep = mask[row]
        value, reward = values[row][keep][:, None], rewards[row][keep][:, None]
        following = torch.cat([value[1:], ends[row].reshape(1, 1)])
        done = torch.zeros_like(value, dtype=torch.bool)
        done[-1] = True
        terminated = done & (not cut)
        oracle, _ = torchrl_functional.generalized_advantage_estimate(gamma, lam, value, following, reward, done, terminated)
        target = torchrl_functional.td_lambda_return_estimate(gamma, lam, following, reward, done, terminated)
        got, returns = skip_observation_gae(
            rewards[row : row + 1], values[row : row + 1], keep[None], gamma=gamma, lam=lam, bootstrap=ends[row : row + 1]
        )
        torch.testing.assert_close(got[0, keep], oracle[:, 0], atol=1e-12, rtol=0)
        torch.testing.assert_close(returns[0, keep], target[:, 0], atol=1e-12, rtol=0)


def test_every_position_gae_pays_for_observations():
    rewards, values, mask = grid([0, 0, 0, 0, 1, 0]), grid([0.1, 0.2, 0.9, -0.9, 0.4, 7]), torch.tensor([[1, 1, 0, 0, 1, 0]]).bool()
    got, _ = every_position_gae(rewards, values, mask, lam=0.5)
    whole = torch.tensor(naive([0, 0, 0, 0, 1], [0.1, 0.2, 0.9, -0.9, 0.4], 1.0, 0.5, 0.0), dtype=F64)
    torch.testing.assert_close(got[0, mask[0]], whole[mask[0, :5]])
    assert not got[~mask].any()


def test_step_level_values_by_hand():
    """Turns (a a) o (a): mean values 0.3 and 0.5, last values 0.4 and 0.5; lam 0.5, reward 1 at the end."""
    rewards, values, mask = grid([0, 0, 0, 1]), grid([0.2, 0.4, 9, 0.5]), torch.tensor([[1, 1, 0, 1]]).bool()
    mean, _ = step_level_gae(rewards, values, mask, how="mean", lam=0.5)
    torch.testing.assert_close(mean, grid([0.45, 0.45, 0, 0.5]))
    last, returns = step_level_gae(rewards, values, mask, how="last", lam=0.5)
    torch.testing.assert_close(last, grid([0.35, 0.35, 0, 0.5]))
    torch.testing.assert_close(returns, grid([0.75, 0.75, 0, 1.0]))
    with pytest.raises(ValueError, match="how"):
        step_level_gae(rewards, values, mask, how="median")


def test_later_tokens_of_chains_and_branches():
    assert later_action_tokens([3, 2, 4]) == [6, 4, 0]
    assert later_action_tokens([3, 2, 4], [None, 0, 0]) == [6, 0, 0]
    assert later_action_tokens([3, 2, 4, 1], [None, 0, None, 1]) == [7, 1, 0, 0]
    with pytest.raises(ValueError, match="precede"):
        later_action_tokens([1, 1], [None, 1])


def test_a_compacted_episode_equals_the_uncut_one_but_for_values_at_the_seam():
    """With V = 0 the chain of segments gives exactly the advantages of the episode in one piece."""
    lam, gamma = 0.8, 0.9
    whole, _ = skip_observation_gae(grid([0, 0, 0, 0, 1]), grid([0] * 5), torch.ones(1, 5).bool(), gamma=gamma, lam=lam)
    mask = torch.tensor([[1, 1, 0], [1, 1, 1]]).bool()
    local, _ = skip_observation_gae(grid([0, 1, 0], [0, 0, 1]), grid([0] * 3, [0] * 3), mask, gamma=gamma, lam=lam)
    combined = combine_segments(local, later_action_tokens([2, 3]), gamma=gamma, lam=lam)
    torch.testing.assert_close(combined[mask], whole[0])


@pytest.mark.parametrize("count", [0, 1, 2, 50])
def test_whiten(count):
    generator = torch.Generator().manual_seed(count)
    advantages = torch.randn(2, 40, dtype=F64, generator=generator) * 3 + 1
    mask = torch.zeros(2, 40, dtype=torch.bool)
    mask.view(-1)[:count] = True
    got = whiten(advantages, mask)
    assert not got[~mask].any() and got.shape == advantages.shape
    if count < 2:
        assert torch.equal(got[mask], advantages[mask])
    else:
        assert abs(float(got[mask].mean())) < 1e-9 and abs(float(got[mask].std()) - 1) < 1e-6
