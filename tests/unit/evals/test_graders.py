"""What counts as the answer of a completion, and as the same number."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sao.evals.graders import Unparseable, Verdict, extract, grade_math, number


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (r"so \boxed{42}.", "42"),
        (r"\boxed{1} and then \boxed{2}", "2"),
        (r"\boxed{\boxed{7}}", "7"),
        (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        (r"\boxed {\{3\}}", r"\{3\}"),
        (r"\boxed{5} then \boxed{6", "5"),
        (r"\boxed{\boxed{7}", "7"),
        (r"<think>\boxed{1}</think> it is \boxed{2}", "2"),
        (r"a</think>\boxed{1}</think>\boxed{3}", "3"),
        ("  42 \n", "42"),
        (r"\boxed{}", ""),
        ("<think>it is 5</think>6", "6"),
    ],
)
def test_the_answer_of_a_completion(text: str, answer: str) -> None:
    assert extract(text) == answer


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (r"\boxed{42", "the box is not closed"),
        (r"\boxed{42\}", "the box is not closed"),
        (r"<think>\boxed{42}", "nothing is said after the reasoning"),
        (r"<think>\boxed{42}</think>", "nothing is said after the reasoning"),
        ("", "the answer is empty"),
        (r"\boxed{}", "the answer is empty"),
        ("The answer is 42", "not one integer or simple fraction"),
        (r"\boxed{42, 43}", "not one integer or simple fraction"),
        (r"\boxed{4 2}", "not one integer or simple fraction"),
        (r"\boxed{x^2}", "not one integer or simple fraction"),
        (r"\boxed{1/0}", "divides by 0"),
        (r"\boxed{1e3}", "not one integer or simple fraction"),
        (r"\boxed{4٢}", "not one integer or simple fraction"),
        (r"\boxed{__import__('os')}", "not one integer or simple fraction"),
        (r"\boxed{9**9**9**9}", "not one integer or simple fraction"),
        ("9" * 1_000_000, "1000000 characters, more than 400"),
    ],
)
def test_an_answer_that_cannot_be_compared_says_why(text: str, reason: str) -> None:
    verdict = grade_math(text, "42")
    assert not verdict and verdict.kind == "unparseable" and reason in verdict.reason


DRESSED = [
    "42",
    "042",
    "+42",
    " 42 ",
    "$42$",
    r"\$42",
    r"$\$42.00$",
    "42.0",
    "42.",
    r"42^\circ",
    r"42^{\circ}",
    "42°",
    r"42\text{ cm}",
    r"\text{42}",
    r"42\%",
    "n = 42",
    r"\ 42\,",
]


@pytest.mark.parametrize("text", DRESSED)
def test_dress_does_not_matter_but_percent_does(text: str) -> None:
    assert bool(grade_math(f"\\boxed{{{text}}}", "42")) is ("%" not in text)
    assert bool(grade_math(text, "0.42")) is ("%" in text)


@pytest.mark.parametrize(
    ("answer", "gold", "same"),
    [
        ("1,234", "1234", True),
        (r"1{,}234", "1234", True),
        (r"1\,234", "1234", True),
        ("12,34", "1234", False),
        ("0.1,234", "1234", False),
        ("-0", "0", True),
        ("000", "0", True),
        ("−5", "-5", True),
        ("5", "-5", False),
        (r"\frac{2}{4}", "1/2", True),
        (r"-\dfrac{3}{4}", "-0.75", True),
        (r"\frac{-3}{4}", "-3/4", True),
        (".5", "1/2", True),
        ("0.333333333333333333", "1/3", False),
        ("1/1000000000000000001", "1/1000000000000000000", False),
        ("5", r"5\%", False),
        ("0.05", r"5\%", True),
    ],
)
def test_numbers_are_compared_exactly(answer: str, gold: str, same: bool) -> None:
    assert bool(grade_math(answer, gold)) is same


@given(st.integers(-(10**12), 10**12), st.integers(1, 10**6))
def test_every_way_to_write_a_fraction_is_the_same_number(top: int, bottom: int) -> None:
    sign, size = "-" if top < 0 else "", abs(top)
    value = Fraction(top, bottom)
    for text in (f"{top}/{bottom}", f"{sign}\\frac{{{size}}}{{{bottom}}}", f"${sign}{size}/{bottom}$", f"{sign}{size:,}/{bottom}"):
        assert number(text) == value
    assert grade_math(f"\\boxed{{{top}}}", str(top)) and not grade_math(str(top + 1), str(top))


@given(st.text(max_size=200))
def test_whatever_is_said_gets_a_verdict(text: str) -> None:
    assert grade_math(text, "7").kind in ("correct", "wrong", "unparseable")
    assert grade_math("\\boxed{" + text, "7").kind in ("correct", "wrong", "unparseable")


def test_a_verdict_is_true_exactly_when_correct() -> None:
    assert [bool(Verdict(kind)) for kind in ("correct", "wrong", "unparseable", "timeout")] == [True, False, False, False]


def test_a_gold_answer_that_is_no_number_is_a_mistake_of_the_caller() -> None:
    with pytest.raises(ValueError, match=r"the gold answer 'many' cannot be graded against"):
        grade_math("42", "many")
    with pytest.raises(Unparseable):
        number("many")
