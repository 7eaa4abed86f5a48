"""The data contract refuses what breaks it and places rewards where the specification says."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sao.trajectory import ContractError, FinishReason, Segment, Trajectory
from tests.fakes import make_trajectory


def segment(mask, logprobs=None, versions=None):
    mask = np.array(mask, bool)
    return Segment(
        token_ids=np.arange(len(mask)),
        action_mask=mask,
        logprobs=np.where(mask, -1.0, np.nan) if logprobs is None else logprobs,
        versions=np.where(mask, 0, -1) if versions is None else versions,
    )


@given(st.lists(st.booleans(), min_size=1, max_size=30))
def test_turn_ends_are_the_last_token_of_each_run(mask):
    mask[0] = False
    ends = segment(mask).turn_ends()
    slow = [t for t in range(len(mask)) if mask[t] and (t + 1 == len(mask) or not mask[t + 1])]
    assert ends.tolist() == slow


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"mask": [True, True]}, "action_mask\\[0\\]"),
        ({"mask": [False, True], "logprobs": [np.nan, np.nan]}, "action_mask\\[1\\]"),
        ({"mask": [False, False], "logprobs": [np.nan, -1.0]}, "NaN off"),
        ({"mask": [False, True], "logprobs": [np.nan, 0.5]}, "above 0"),
        ({"mask": [False, True], "versions": [-1, -2]}, "below -1"),
        ({"mask": [False, True], "versions": [-1]}, "length"),
        ({"mask": [False, True], "logprobs": [np.nan, -np.inf]}, "action_mask\\[1\\]"),
    ],
)
def test_broken_segments_are_refused(kwargs, message):
    with pytest.raises(ContractError, match=message):
        segment(**kwargs)


def test_a_sampled_token_without_a_logprob_is_context_but_counted():
    one = segment([False, False, True], logprobs=[np.nan, np.nan, -1.0], versions=[-1, 4, 5])
    assert (one.sampled_tokens, one.action_tokens) == (2, 1)


def test_the_outcome_sits_on_the_last_action_token_wherever_observations_trail():
    first, second = segment([False, True, False]), segment([False, False])
    whole = Trajectory(0, "t", "e", (first, second), reward=2.0, finish=FinishReason.terminal(), admitted_version=0)
    assert [r.tolist() for r in whole.token_rewards()] == [[0, 2, 0], [0, 0]]


def test_turn_rewards_sit_on_each_turns_last_action_token():
    mask = [False, True, True, False, True, False]
    whole = Trajectory(
        0, "t", "e", (segment(mask),), reward=1.5, finish=FinishReason.terminal(), admitted_version=0, turn_rewards=np.array([0.5, 1.0])
    )
    assert whole.token_rewards()[0].tolist() == [0, 0, 0.5, 0, 1.0, 0]
    for wrong in ([1.5], [0.5, 0.5]):
        with pytest.raises(ContractError):
            Trajectory(0, "t", "e", (segment(mask),), reward=1.5, finish=FinishReason.terminal(), admitted_version=0, turn_rewards=np.array(wrong))
    with pytest.raises(ContractError, match="several only the outcome"):
        Trajectory(
            0,
            "t",
            "e",
            (segment(mask), segment(mask)),
            reward=1.5,
            finish=FinishReason.terminal(),
            admitted_version=0,
            turn_rewards=np.array([0.5, 1.0]),
        )


def test_no_action_token_must_be_failed():
    with pytest.raises(ContractError, match="must be failed"):
        Trajectory(0, "t", "e", (segment([False, False]),), reward=0.0, finish=FinishReason.terminal(), admitted_version=0)
    with pytest.raises(ContractError, match="not finite"):
        make_trajectory(reward=float("nan"))


def test_versions_span_the_action_tokens():
    whole = make_trajectory(versions=(7, 7, 9), admitted=5)
    assert (whole.oldest_version, whole.newest_version, whole.meta().admitted_version) == (7, 9, 5)


def test_finish_reasons_are_closed():
    assert str(FinishReason.truncated("turns")) == "truncated: turns"
    for wrong in (lambda: FinishReason.truncated("boredom"), lambda: FinishReason.failed(""), lambda: FinishReason("done")):
        with pytest.raises(ContractError):
            wrong()
