import numpy as np

from sao.inference.prefill import SessionPrefill


def ids(*parts):
    return np.concatenate([np.arange(a, b) for a, b in parts]).astype(np.int32)


def test_only_matching_history_under_another_salt_counts():
    prefill = SessionPrefill(block=8)
    assert prefill.observe("s", "0:1", ids((0, 20)), ids((20, 30)), 0) == 0
    assert prefill.observe("s", "0:1", ids((0, 40)), ids((40, 41)), 24) == 0
    assert prefill.observe("s", "0:2", ids((0, 50)), ids((50, 51)), 0) == 40
    assert prefill.observe("s", "0:3", ids((5, 60)), ids((60, 61)), 0) == 0  # other ids: no history of this session
    assert prefill.observe("t", "0:3", ids((0, 60)), ids((60, 61)), 0) == 0
    assert prefill.tokens == 40


def test_idle_sessions_are_forgotten():
    prefill = SessionPrefill(block=2, sessions=1)
    prefill.observe("a", "1", ids((0, 9)), ids((9, 10)), 0)
    prefill.observe("b", "1", ids((0, 9)), ids((9, 10)), 0)
    assert prefill.observe("a", "2", ids((0, 20)), ids((20, 21)), 0) == 0
