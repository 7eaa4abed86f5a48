"""The estimators against definitions that are slow and obvious."""

from __future__ import annotations

import itertools
from fractions import Fraction
from math import comb

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sao.evals.estimators import bootstrap_interval, majority_at_k, mean_at_k, normalise_answer, pass_at_k, wilson_interval


@given(st.integers(1, 8).flatmap(lambda n: st.tuples(st.just(n), st.integers(0, n), st.integers(1, n))))
def test_pass_at_k_is_the_share_of_subsets_with_a_correct_sample(case):
    n, c, k = case
    subsets = list(itertools.combinations([i < c for i in range(n)], k))
    assert pass_at_k(n, c, k) == pytest.approx(sum(map(any, subsets)) / len(subsets))


@given(st.integers(1, 5000).flatmap(lambda n: st.tuples(st.just(n), st.integers(0, n), st.integers(1, n))))
def test_pass_at_k_is_exact_where_factorials_overflow(case):
    n, c, k = case
    assert pass_at_k(n, c, k) == pytest.approx(float(1 - Fraction(comb(n - c, k), comb(n, k))), abs=1e-12)


@given(st.lists(st.booleans(), min_size=1, max_size=40))
def test_pass_at_1_is_the_mean_and_pass_at_k_grows(correct):
    n, c = len(correct), sum(correct)
    curve = [pass_at_k(n, c, k) for k in range(1, n + 1)]
    assert curve[0] == pytest.approx(mean_at_k([float(x) for x in correct]))
    assert all(a <= b + 1e-12 for a, b in itertools.pairwise(curve))
    assert curve[-1] == float(c > 0)


@pytest.mark.parametrize(("n", "c", "k"), [(4, 1, 5), (0, 0, 1), (4, 1, 0), (4, 5, 1), (4, -1, 1)])
def test_what_no_experiment_can_answer_is_refused(n, c, k):
    with pytest.raises(ValueError):
        pass_at_k(n, c, k)


def test_mean_at_k_weighs_problems_and_not_samples():
    assert mean_at_k([[1.0], [0.0, 0.0, 0.0]]) == 0.5
    assert mean_at_k([[1.0, 0.0], [0.0, 1.0]], k=1) == 0.5
    assert mean_at_k(np.array([[1.0, 0.0, 0.5]]), 2) == 0.5
    for rewards, k in (([[1.0], [0.0, 1.0]], 2), ([], None), ([[]], None), ([[1.0]], 0)):
        with pytest.raises(ValueError):
            mean_at_k(rewards, k)


@given(st.lists(st.sampled_from(["1", "2", "3", None]), min_size=1, max_size=9), st.sampled_from("123"), st.data())
def test_majority_is_the_first_of_the_commonest(answers, gold, data):
    k = data.draw(st.none() | st.integers(1, len(answers)))
    votes = [a for a in answers[: k or len(answers)] if a is not None]
    most = max((votes.count(a) for a in votes), default=0)
    winner = next((a for a in votes if votes.count(a) == most), None)
    assert majority_at_k(answers, gold, k) == float(winner == gold)


def test_majority_counts_equal_answers_together_and_refuses_too_few():
    assert majority_at_k(["007", "5", "$7.0$"], "7") == 1.0
    assert majority_at_k(["5", "7"], "7") == 0.0
    assert majority_at_k(["A", "b", "B"], "b", normalise=str) == 0.0
    with pytest.raises(ValueError, match="majority@3"):
        majority_at_k(["1", "2"], "1", 3)


@pytest.mark.parametrize(
    ("text", "plain"),
    [("  12 ", "12"), ("-0", "0"), ("+3", "3"), ("1,234.50", "1234.5"), ("12,34", "12,34"), ("X  y", "x y"), ("000", "0"), ("3.", "3")],
)
def test_ways_to_write_an_answer(text, plain):
    assert normalise_answer(text) == plain
    assert normalise_answer(plain) == plain


@settings(max_examples=25)
@given(st.floats(0.1, 0.9), st.integers(0, 1000))
def test_the_interval_covers_the_mean_and_narrows_with_problems(p, seed):
    rng = np.random.default_rng(seed)
    few, many = (rng.random(40) < p).astype(float), (rng.random(4000) < p).astype(float)
    for values in (few, many):
        low, high = bootstrap_interval(values, seed=seed)
        assert low <= values.mean() <= high
    (a, b), (c, d) = bootstrap_interval(few, seed=0), bootstrap_interval(many, seed=0)
    assert few.std() == 0 or d - c < b - a
    expected = 2 * 1.96 * many.std() / np.sqrt(len(many))
    assert d - c == pytest.approx(expected, rel=0.2)


def test_an_interval_of_a_share_is_wilsons():
    low, high = wilson_interval(5, 10)  # Newcombe 1998, table I gives 81/263: 0.2553 to 0.3662
    assert (round(low, 3), round(high, 3)) == (0.237, 0.763)
    assert [round(x, 4) for x in wilson_interval(81, 263)] == [0.2553, 0.3662]
    assert wilson_interval(5, 5)[0] < 0.6 and wilson_interval(5, 5)[1] == 1.0 and wilson_interval(0, 5)[0] == 0.0
    with pytest.raises(ValueError):
        wilson_interval(0, 0)
