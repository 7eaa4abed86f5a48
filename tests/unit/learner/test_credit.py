"""The configured estimator over episodes: truncation by finish reason, segments, branches, lambda, variants."""

import numpy as np
import pytest
import torch

from sao.errors import ConfigError
from sao.learner.batching import make_batch
from sao.learner.credit import check_algo, critic_targets, needs_values, policy_advantages, policy_lambda
from sao.trajectory import FinishReason
from tests.unit.learner.learner_builders import config, segment, trajectory

RNG = np.random.default_rng(0)
CUT = FinishReason.truncated


def one(mask=(0, 1, 1, 0), reward=0.0, finish=None):
    return make_batch([trajectory(0, [segment(list(mask), rng=RNG)], reward, finish)])


@pytest.mark.parametrize("by", ["tokens", "turns", "time"])
def test_truncation_terminal_and_bootstrap_by_hand(by):
    """C56. States 0..4 of a 4-token segment, V = .1 .2 .4 .6 .8; the last token present is an observation, V after it .8."""
    values = torch.tensor([0.1, 0.2, 0.4, 0.6, 0.8])
    made = one(finish=CUT(by))
    terminal, bootstrap = config().algo, config(algo__truncation="bootstrap").algo
    lam = torch.tensor([0.5])
    torch.testing.assert_close(policy_advantages(made, terminal, values, lam), torch.tensor([0.2 - 0.5 * 0.4, -0.4]))
    torch.testing.assert_close(policy_advantages(made, bootstrap, values, lam), torch.tensor([0.2 + 0.5 * 0.4, 0.4]))
    torch.testing.assert_close(critic_targets(made, terminal, values), torch.zeros(2))
    torch.testing.assert_close(critic_targets(made, bootstrap, values), torch.tensor([0.8, 0.8]))
    assert needs_values(made, bootstrap) and not needs_values(made, terminal)


def test_a_terminal_end_never_bootstraps_however_long_the_episode():
    made = one(mask=[0] + [1] * 200)
    assert not needs_values(made, config(algo__truncation="bootstrap").algo)
    assert critic_targets(made, config(algo__truncation="bootstrap").algo, torch.ones(made.states)).tolist() == [0.0] * 200


def chain(parents=(None, None, None)):
    masks = ([0, 1, 1], [0, 1], [0, 1, 1, 1])
    parts = [segment(m, rng=RNG, parent=None if p is None else (p, 1)) for m, p in zip(masks, parents, strict=True)]
    return make_batch([trajectory(0, parts, 1.0)])


def test_segments_share_the_outcome_and_decay_over_later_tokens():
    """V = 0, lam = .5: the chain equals the uncut episode of 6 action tokens."""
    made = chain()
    got = policy_advantages(made, config().algo, torch.zeros(made.states), torch.full((3,), 0.5))
    torch.testing.assert_close(got, 0.5 ** torch.arange(5, -1, -1.0))
    assert critic_targets(made, config().algo, torch.zeros(made.states)).tolist() == [1.0] * 6
    discounted = critic_targets(made, config(algo__gamma=0.5).algo, torch.zeros(made.states))
    torch.testing.assert_close(discounted, 0.5 ** torch.arange(5, -1, -1.0))


def test_parallel_branches_count_their_descendants_only():
    made = chain(parents=(None, 0, 0))
    got = policy_advantages(made, config().algo, torch.zeros(made.states), torch.full((3,), 0.5))
    torch.testing.assert_close(got, torch.tensor([0.5**5, 0.5**4, 1.0, 0.25, 0.5, 1.0]))


def test_lambda_counts_the_whole_episode():
    made = chain()
    torch.testing.assert_close(policy_lambda(made, config().algo), torch.full((3,), 8 / 9, dtype=torch.float64))
    torch.testing.assert_close(policy_lambda(made, config(algo__lambda_length="turns").algo), torch.full((3,), 7 / 9, dtype=torch.float64))
    assert policy_lambda(made, config(algo__lambda_policy=0.3).algo).tolist() == pytest.approx([0.3] * 3)


def test_variants_differ_from_the_default_where_they_should():
    made = one(mask=(0, 1, 1, 0, 0, 1), reward=1.0)
    values = torch.linspace(0.1, 0.7, made.states)
    lam = torch.tensor([0.5])
    base = policy_advantages(made, config().algo, values, lam)
    every = policy_advantages(made, config(algo__skip_observation=False).algo, values, lam)
    assert every[2] == base[2] and not torch.allclose(every[:2], base[:2])
    for level in ("step_mean", "step_last"):
        stepped = policy_advantages(made, config(algo__value_level=level).algo, values, lam)
        assert stepped[0] == stepped[1] and stepped[2] == base[2]


def test_nothing_in_nothing_out():
    empty = make_batch([])
    assert critic_targets(empty, config().algo, torch.zeros(0)).shape == (0,)
    assert policy_advantages(empty, config().algo, torch.zeros(0), policy_lambda(empty, config().algo)).shape == (0,)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"algo__truncation": "ignore"}, "truncation"),
        ({"algo__whiten": "yes"}, "whiten"),
        ({"algo__gamma": 1.5}, "gamma"),
        ({"algo__alpha": 0.0}, "alpha"),
        ({"algo__skip_observation": False, "algo__value_level": "step_mean"}, "value_level"),
    ],
)
def test_refusals(changes, message):
    with pytest.raises(ConfigError, match=message):
        check_algo(config(**changes).algo)
