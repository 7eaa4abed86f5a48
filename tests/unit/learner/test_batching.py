"""Samples, packing and the plan of micro-batches."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sao.errors import ConfigError, LearnerFailure
from sao.learner.batching import make_batch, pack, plan, shuffled
from sao.trajectory import FinishReason, SamplingSpec, Segment
from tests.unit.learner.learner_builders import batch, segment, trajectory

RNG = np.random.default_rng(0)


@settings(max_examples=80)
@given(st.lists(st.integers(1, 40), max_size=20), st.integers(1, 50), st.integers(0, 99))
def test_plan_places_every_sample_once_within_the_budget(lengths, budget, seed):
    order = shuffled(len(lengths), seed)
    groups = plan(lengths, budget, order)
    assert [i for g in groups for i in g] == order
    for group in groups:
        assert sum(lengths[i] for i in group) <= budget or len(group) == 1
    assert groups == plan(lengths, budget, order)


def test_plan_without_samples_and_with_a_bad_budget():
    assert plan([], 8) == []
    with pytest.raises(ConfigError, match="tokens_per_micro_batch"):
        plan([1], 0)


def test_shuffles_depend_on_every_seed():
    assert shuffled(20, 0, 1, 0) == shuffled(20, 0, 1, 0)
    assert len({tuple(shuffled(20, *s)) for s in ((0, 1, 0), (0, 1, 1), (0, 2, 0), (1, 1, 0))}) == 4


def test_batches_are_sorted_by_episode_whatever_order_they_came_in():
    episodes = batch(5)
    a, b = make_batch(episodes), make_batch(episodes[::-1])
    assert [t.episode_id for t in a.trajectories] == [t.episode_id for t in b.trajectories] == [(i, 0) for i in range(5)]
    assert torch.equal(a.behaviour, b.behaviour) and torch.equal(a.rewards, b.rewards)


def test_every_segment_carries_the_outcome_on_its_last_action_token():
    parts = [segment([0, 1, 1, 0], rng=RNG), segment([0, 0], rng=RNG), segment([0, 1, 0, 1], rng=RNG)]
    made = make_batch([trajectory(0, parts, 0.5)])
    assert [s.segment for s in made.samples] == [0, 2]
    assert made.rewards.tolist() == [0.0, 0.5, 0.0, 0.5]


def test_turn_rewards_stay_on_their_turns():
    one = trajectory(0, [segment([0, 1, 1, 0, 1, 0], rng=RNG)], 3.0, turn_rewards=np.array([1.0, 2.0]))
    assert make_batch([one]).rewards.tolist() == [0.0, 1.0, 2.0]


def test_packing_by_hand():
    made = make_batch([trajectory(0, [segment([0, 1, 0, 1], rng=RNG)]), trajectory(1, [segment([0, 0, 1], rng=RNG)])])
    packed = pack([made.samples[1], made.samples[0]])
    assert packed.cu_seq_lens.tolist() == [0, 3, 7] and packed.position_ids.tolist() == [[0, 1, 2, 0, 1, 2, 3]]
    assert packed.rows.tolist() == [1, 3, 5]  # the position before each action token
    assert packed.slots.tolist() == [2, 0, 1]
    assert packed.targets.tolist() == packed.input_ids[0, [2, 4, 6]].tolist()
    # states: sample 0 owns 0..4, sample 1 owns 5..8; the state after a token is one further
    assert packed.state_slots.tolist() == [6, 7, 8, 1, 2, 3, 4]
    assert made.state_of.tolist() == [1, 3, 7] and made.end_state.tolist() == [4, 8]


def test_empty_packs_and_batches():
    assert make_batch([]).action_tokens == 0 and make_batch([]).states == 0
    assert pack([]).tokens == 0 and pack([]).cu_seq_lens.tolist() == [0]


def test_a_turn_that_saw_two_versions_is_not_pure_even_through_a_missing_logprob():
    rng = np.random.default_rng(0)
    clean = segment([0, 1, 1, 0, 1, 1], rng=rng, version=[0, 3, 3, 0, 3, 4])
    assert make_batch([trajectory(0, [clean])]).pure.tolist() == [True, True, False, False]
    ids = np.arange(5)
    holed = Segment(ids, np.array([0, 1, 0, 1, 0], bool), np.array([np.nan, -1, np.nan, -1, np.nan]), np.array([-1, 3, 4, 3, -1]))
    assert make_batch([trajectory(0, [holed])]).pure.tolist() == [False, False]


def test_failed_episodes_and_truncated_distributions_are_refused():
    failed = trajectory(3, [segment([0, 1], rng=RNG)], finish=FinishReason.failed("sandbox"))
    with pytest.raises(LearnerFailure, match=r"3\.0.*sandbox"):
        make_batch([failed])
    for spec in (SamplingSpec(top_p=0.9), SamplingSpec(top_k=5), SamplingSpec(min_p=0.1), SamplingSpec(temperature=0.0)):
        base = segment([0, 1], rng=RNG)
        bad = Segment(base.token_ids, base.action_mask, base.logprobs, base.versions, spec)
        with pytest.raises(ConfigError, match="top_p=1"):
            make_batch([trajectory(0, [bad])])


def test_drop_takes_truncated_episodes_out_by_their_finish_reason():
    cut = trajectory(0, [segment([0, 1, 1], rng=RNG)], finish=FinishReason.truncated("turns"))
    whole = trajectory(1, [segment([0, 1], rng=RNG)])
    assert make_batch([cut, whole], drop_truncated=True).trained.tolist() == [False, False, True]
    assert make_batch([cut, whole]).trained.all()
