"""Metrics from what the loop and the engines report."""

from __future__ import annotations

import pytest

from sao.evals.heldout import EvalResult, Problem
from sao.inference.protocol import EngineSnapshot
from sao.observer import engine_metrics


def snapshot(at: float, uptime: float, generated: int, busy: float) -> EngineSnapshot:
    return EngineSnapshot("engine-0", 1, 0, 0, 0.0, 0, 0, generated, 0, 0, 0, busy, uptime, 0.0, at)


def test_rates_are_differences_over_the_engines_own_clock():
    values = engine_metrics([snapshot(100, 50, 1000, 20)], [snapshot(110, 60, 3000, 25)])
    assert values["engine/tokens_per_s"] == pytest.approx(200) and values["engine/idle_share"] == pytest.approx(0.5)


def test_a_replaced_engine_has_no_rate_against_the_one_before_it():
    values = engine_metrics([snapshot(100, 50, 1000, 20)], [snapshot(110, 2, 30, 1)])
    assert "engine/tokens_per_s" not in values and "engine/idle_share" not in values


@pytest.mark.parametrize(("lost", "says"), [(0, "over 3 problems"), (2, "over 1 of 3 problems, 2 episodes failed and are left out")])
def test_a_mean_over_a_part_does_not_look_like_one_over_all(lost, says):
    problems = tuple(Problem(f"{i}", () if i < lost else (1.0,)) for i in range(3))
    assert EvalResult("during", "env", 5, 1.0, 1.0, 1.0, 1.0, 3 - lost, 0, lost, 9, 1.0, 1, problems).coverage == says
