"""What is measured of a stream, against hand-made series whose answer is known."""

from __future__ import annotations

import math

import numpy as np
import pytest

from sao.config import Config, OnlineConfig, PhaseConfig
from sao.online import measures
from sao.online.history import History, returns
from sao.online.measures import Stream, recovery
from sao.online.schedule import Schedule

BATCH = 10


def stream(*parts: tuple[int, float]) -> Stream:
    """Rewards in stretches (length, value), ten to a step, trained in the order of the stream."""
    rewards = np.concatenate([np.full(length, value) for length, value in parts])
    positions = np.arange(len(rewards))
    return Stream(rewards, positions, positions // BATCH)


def test_a_moving_average_is_undefined_until_its_window_is_full():
    assert np.isnan(measures.moving_average([1, 2, 3], 4)).all()
    np.testing.assert_allclose(measures.moving_average([1, 2, 3, 4, 5], 2), [math.nan, 1.5, 2.5, 3.5, 4.5])


def test_steps_until_eighty_percent_is_regained():
    """Down to 0 for 100 prompts, then 1: the average of 40 has 0.8 once 32 of its 40 are ones, in the 14th step of the new phase."""
    found = recovery(
        stream((100, 1.0), (100, 0.0), (100, 1.0)), 100, seconds={s: 2.0 * (s + 1) for s in range(30)}, tokens={s: 7.0 * (s + 1) for s in range(30)}
    )
    assert found is not None
    assert (found.level, found.low, found.dip, found.steps, found.censored, found.learned) == (1.0, 0.0, 1.0, 14, False, True)
    assert (found.seconds, found.tokens) == (28.0, 98.0)


def test_one_that_never_recovers_is_censored_at_the_end_of_its_phase():
    found = recovery(stream((100, 1.0), (100, 0.5), (100, 1.0)), 100, end=200)
    assert found is not None and found.censored and found.steps == 10 and found.low == 0.5
    assert math.isnan(found.tokens)


def test_rewards_from_before_the_shift_do_not_help_the_average_after_it():
    found = recovery(stream((100, 1.0), (39, 0.0), (61, 1.0)), 100)
    assert found is not None and found.low < 0.1 and found.steps > 4


def test_a_level_that_was_never_learned_is_no_recovery():
    found = recovery(stream((100, 0.25), (100, 0.25)), 100)
    assert found is not None and not found.learned


def test_too_few_rewards_on_either_side_are_not_measured():
    assert recovery(stream((39, 1.0), (100, 1.0)), 39) is None
    assert recovery(stream((100, 1.0), (39, 1.0)), 100) is None
    assert recovery(stream((100, 1.0), (100, 1.0), (100, 1.0)), 200, since=170) is None


def test_training_order_decides_and_the_phase_is_by_position():
    """A straggler of the old phase that is trained late does not count for the new one."""
    plain = stream((60, 1.0), (60, 0.0))
    order = np.concatenate([np.arange(50), np.arange(60, 110), np.arange(50, 60), np.arange(110, 120)])
    late = Stream(plain.rewards[order], plain.positions[order], plain.steps)
    found = recovery(late, 60)
    assert found is not None and found.low == 0.0 and found.level == 1.0 and found.censored and found.steps == 7


def test_regret_is_the_shortfall_against_what_was_possible_for_each_prompt():
    np.testing.assert_allclose(measures.dynamic_regret([1, 0, 1]), [0, 1, 1])
    np.testing.assert_allclose(measures.dynamic_regret([1, 0], [1.0, 0.5]), [0, 0.5])


def test_forgetting_is_what_was_known_when_the_phase_ended_less_what_is_known_now():
    accuracy = [(0, 0.0), (10, 0.8), (20, 0.9), (30, 1.0), (40, 0.5), (50, 0.3), (60, 0.2), (70, 0.1)]
    assert measures.forgetting(accuracy, 31) == pytest.approx(0.9 - 0.2)
    assert measures.forgetting(accuracy, 0) is None and measures.forgetting(accuracy, 71) is None


def test_a_policy_that_never_changes_has_forgotten_nothing():
    """16 tasks answered right with probability 0.5, 25 evaluations: the best of them less the last is 0.24 on average."""
    rng = np.random.default_rng(0)
    found = [measures.forgetting([(10 * i, rng.binomial(16, 0.5) / 16) for i in range(25)], 80) for _ in range(400)]
    assert abs(np.mean(found)) < 0.02


def test_savings():
    assert measures.savings(20, 5) == 0.75 and measures.savings(20, 30) == -0.5
    assert measures.savings(None, 5) is None and measures.savings(20, None) is None


def test_steps_to_a_level():
    again = stream((100, 0.0), (100, 1.0))
    assert measures.steps_to_level(again, 0.8, 0, 200) == 14
    assert measures.steps_to_level(again, 0.8, 0, 100) is None


@pytest.mark.parametrize(("level", "found"), [(0.25, []), (0.5, [{"phase": "a", "position": 200, "first_steps": 4, "steps": 4, "savings": 0.0}])])
def test_only_a_phase_that_was_learned_can_save_anything_on_its_return(level, found):
    config = Config()
    config.online = OnlineConfig(phases=[PhaseConfig("a"), PhaseConfig("b")], drift="recurring", period=100)
    history = History(config, stream((100, level), (100, 0.0), (100, level)), [])
    history.shifts = Schedule(config.online, 0).shifts(history.end)
    assert returns(history) == found


def test_a_quantity_around_a_step():
    values = {step: float(step >= 20) for step in range(40)}
    assert measures.around(values, 20, span=5) == (0.0, 1.0)
    assert math.isnan(measures.around(values, 0, span=5)[0])


def test_one_answer_for_everything_is_collapse_whatever_it_earns():
    assert measures.has_collapsed(["a"] * 9 + ["b"]) and not measures.has_collapsed(["a", "b"] * 5)
    assert not measures.has_collapsed([])
