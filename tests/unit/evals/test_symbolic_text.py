"""Reading answers: one spelling, and sets, points, intervals and equations told apart."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from sao.evals.symbolic_text import Atom, Brackets, Collection, Equation, Union, Unreadable, Words, read


@pytest.mark.parametrize(
    ("text", "node"),
    [
        (r"\dfrac12", Atom(r"\frac{1}{2}")),
        (r"x \in (-\infty, 3]", Brackets("(", (Atom(r"-\infty"), Atom("3")), "]")),
        (r"\{1, \tfrac12\}", Collection((Atom("1"), Atom(r"\frac{1}{2}")))),
        ("1 < x <= y^2", Brackets("(", (Atom("1"), Atom("y^{2}")), "]")),
        ("3x+y=7", Equation(Atom("3x+y"), Atom("7"))),
        ("S = {1}", Atom("1")),
        (r"\text{East}", Words("east")),
        (r"10{,}080", Atom("10080")),
        (r"[0,1]\cup\{2\}", Union((Brackets("[", (Atom("0"), Atom("1")), "]"), Collection((Atom("2"),))))),
        ("2^10", Atom("2^{10}")),
        (r"0.1\overline{6}", Atom(r"(\frac{15}{90})")),
        ("xy", Atom("xy")),
    ],
)
def test_structure(text, node):
    assert read(text) == node or (text.startswith("S") and read(text).right == node)


def test_plus_minus_is_two_values():
    assert read(r"2 \pm \sqrt3") == Collection((Atom(r"2 + \sqrt{3}"), Atom(r"2 - \sqrt{3}")))


@pytest.mark.parametrize(
    ("text", "reason"),
    [("", "empty"), ("(1, 2", "brackets"), ("4 2", "side by side"), ("1 = 1 = 1", "chain"), ("1 < x > 0", "both ways"), ("12_2", "base 2")],
)
def test_what_cannot_be_read_says_why(text, reason):
    with pytest.raises(Unreadable, match=reason):
        read(text)


PIECES = st.sampled_from(
    [*"0123456789xyab()[]{},.=<>^_-+*/!|$% ", r"\frac", r"\sqrt", r"\{", r"\}", r"\pm", r"\cup", r"\in", r"\text{or}", r"\le", r"\overline", r"\pi", "\\", "^\\circ"]
)  # fmt: skip


@given(st.lists(PIECES, max_size=40).map("".join))
@example(r"\sqrt(")
@example("^(")
@example("." * 9 + r"\overline{1}")
def test_any_text_is_read_or_refused(text):
    try:
        read(text)
    except Unreadable as error:
        assert str(error)
