"""The configured estimator over episodes: truncation by finish reason, segments, branches, lambda, variants."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

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


@pytest.mark.parametrize("changes", [{"algo__skip_observation": False}, {"algo__value_level": "step_mean"}, {"algo__value_level": "step_last"}])
def test_every_variant_goes_on_with_the_value_after_a_cut(changes):
    """One turn of one token, V = .2 before it and .8 after the observation behind it: 0 - .2 when terminal, .8 - .2 when it goes on."""
    made = one(mask=(0, 1, 0), finish=CUT("tokens"))
    values = torch.tensor([0.1, 0.2, 0.5, 0.8])
    for truncation, expected in (("terminal", -0.2), ("bootstrap", 0.6)):
        got = policy_advantages(made, config(algo__truncation=truncation, **changes).algo, values, torch.tensor([0.5]))
        torch.testing.assert_close(got, torch.tensor([expected]))


def test_a_lambda_of_the_critic_below_one_makes_its_targets_of_its_values():
    """TD(lambda) by hand, lambda .5, V = .2 .4, reward 1: 1 at the last token, .5 * .4 + .5 * 1 before it."""
    made, algo = one(reward=1.0), config(algo__lambda_critic=0.5).algo
    assert needs_values(made, algo) and not needs_values(made, config().algo)
    torch.testing.assert_close(critic_targets(made, algo, torch.tensor([0.1, 0.2, 0.4, 0.6, 0.8])), torch.tensor([0.7, 1.0]))


def test_nothing_in_nothing_out():
    empty = make_batch([])
    assert critic_targets(empty, config().algo, torch.zeros(0)).shape == (0,)
    assert policy_advantages(empty, config().algo, torch.zeros(0), policy_lambda(empty, config().algo)).shape == (0,)


masks = st.lists(st.booleans(), min_size=1, max_size=5).map(lambda bits: [False, *bits])


@settings(max_examples=60)
@given(
    parts=st.lists(st.tuples(masks, st.one_of(st.none(), st.integers(0, 4))), min_size=1, max_size=5).filter(lambda p: any(any(m) for m, _ in p)),
    gamma=st.sampled_from([1.0, 0.9]),
    cut=st.booleans(),
    seed=st.integers(0, 999),
)
def test_segments_against_a_slow_reference(parts, gamma, cut, seed):
    """Advantages and targets of a compacted, branched episode, token by token with plain numbers: who comes after whom is searched, not counted.

    cut: it was cut off and goes on with V after its last segment, which stands behind the outcome in every segment.
    """
    parents, chain = [], None
    for index, (_, wish) in enumerate(parts):
        parent = None if wish is None or wish >= index else wish
        parents.append(chain if parent is None else parent)
        chain = index if parent is None else chain
    given_parents = [None if wish is None or wish >= i else (wish, 0) for i, (_, wish) in enumerate(parts)]
    finish = CUT("tokens") if cut else FinishReason.terminal()
    made = make_batch([trajectory(0, [segment(m, rng=RNG, parent=p) for (m, _), p in zip(parts, given_parents, strict=True)], 1.0, finish)])
    algo = config(algo__gamma=gamma, algo__truncation="bootstrap").algo
    values = torch.tensor(np.random.default_rng(seed).normal(size=made.states))
    counts = [sum(m) for m, _ in parts]
    lam = 1 - 1 / (1.5 * sum(counts))
    per_sample = torch.full((len(made.samples),), lam, dtype=torch.float64)
    outcome = 1.0 + (gamma * float(values[made.end_state[-1]]) if cut else 0.0)
    got, targets = policy_advantages(made, algo, values, per_sample), critic_targets(made, algo, values)

    def follows(later: int, earlier: int) -> bool:
        above = parents[later]
        return above is not None and (above == earlier or follows(above, earlier))

    for sample in made.samples:
        after = sum(counts[other] for other in range(len(parts)) if follows(other, sample.segment))
        decay = gamma * lam
        for place in range(len(sample.actions)):
            advantage = 0.0
            for k in range(len(sample.actions) - 1, place - 1, -1):
                here = float(values[sample.state_offset + sample.actions[k]])
                last = k == len(sample.actions) - 1
                ahead = outcome if last else gamma * float(values[sample.state_offset + sample.actions[k + 1]])
                advantage = ahead - here + (0.0 if last else decay * advantage)
            assert float(got[sample.offset + place]) == pytest.approx(decay**after * advantage, abs=1e-9)
            steps_left = len(sample.actions) - 1 - place + after
            assert float(targets[sample.offset + place]) == pytest.approx(gamma**steps_left * outcome, abs=1e-9)


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
