"""Metrics from what the loop and the engines report."""

from __future__ import annotations

import pytest

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
