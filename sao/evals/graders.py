r"""Grading mathematical answers: what a completion says, and whether that is the gold answer.

The answer is the last balanced `\boxed{}` after the last `</think>`, of nested ones the innermost; a text without any box is taken as the answer itself.
Integers and simple rationals (`7`, `-3/4`, `\frac{3}{4}`, `0.75`, `5\%`) are compared exactly, as fractions, so nothing is rounded and nothing evaluated.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction
from typing import Literal

MOST_CHARS = 400  # of an answer; no number that anyone is asked for is longer
BOX = re.compile(r"\\boxed\s*\{")
BRACES = re.compile(r"\\boxed\s*\{|\\.|[{}]", re.DOTALL)  # an escaped brace is a character like any other
THIN = re.compile(r"\\[,;:! ]|~")
SPACE = re.compile(r"(?<!\d)\s+|\s+(?!\d)", re.ASCII)  # between digits it is no dress: 4 2 is not 42
TEXT = re.compile(r"\\(?:text|mathrm|textbf|mathbf)\s*\{([^{}]*)\}")
DEGREES = re.compile(r"\^\{?\\circ\}?|°|\\degree")
THOUSANDS = re.compile(r"(?<![\d.])\d{1,3}(?:(?:,|\{,\})\d{3})+(?!\d)", re.ASCII)
DECIMAL = r"(?:\d+\.?\d*|\.\d+)"
NUMBER = re.compile(
    rf"(?P<sign>[+-]?)(?:(?P<top>{DECIMAL})(?:/(?P<bottom>{DECIMAL}))?|\\[dt]?frac\{{(?P<over>[+-]?{DECIMAL})\}}\{{(?P<under>{DECIMAL})\}})", re.ASCII
)
NAME = re.compile(r"[A-Za-z]=")


class Unparseable(ValueError):
    """A text holds no answer that can be compared; the message is the reason."""


@dataclass(frozen=True)
class Verdict:
    """True exactly when correct. `reason`: why an answer is unparseable."""

    kind: Literal["correct", "wrong", "unparseable", "timeout"]
    reason: str = ""

    def __bool__(self) -> bool:
        return self.kind == "correct"


def extract(completion: str) -> str:
    """What a completion gives as its answer. Raises Unparseable when a box is there but none is closed, or nothing is said after the reasoning."""
    said = completion.rpartition("</think>")[2].partition("<think>")[0]
    content = _last_box(said)
    if content is not None:
        return content.strip()
    if BOX.search(said):
        raise Unparseable("the box is not closed")
    if not said.strip():
        raise Unparseable("nothing is said after the reasoning" if "think>" in completion else "the answer is empty")
    return said.strip()


def _last_box(text: str) -> str | None:
    """What stands in the box that begins last of those that are closed; None without one. One pass, however many are opened."""
    opened: list[tuple[int, bool]] = []
    last: tuple[int, int] | None = None
    for found in BRACES.finditer(text):
        if found[0].endswith("{") and found[0] != r"\{":
            opened.append((found.end(), found[0] != "{"))
        elif found[0] == "}" and opened:
            begin, box = opened.pop()
            if box and (last is None or begin > last[0]):
                last = begin, found.start()
    return text[last[0] : last[1]] if last else None


def number(text: str) -> Fraction:
    r"""The exact value of an integer or simple rational, whatever it is dressed in: `$ , ^\circ \text{} .0`, leading zeros, a name before `=`.

    Raises Unparseable with the reason.
    """
    if len(text) > MOST_CHARS:
        raise Unparseable(f"the answer has {len(text)} characters, more than {MOST_CHARS}")
    plain = TEXT.sub(lambda found: found[1] if any(map(str.isdigit, found[1])) else "", text)
    plain = DEGREES.sub("", plain).replace(r"\$", "").replace("$", "").replace("\\left", "").replace("\\right", "").replace("−", "-")
    plain = SPACE.sub("", THIN.sub("", THOUSANDS.sub(lambda found: re.sub(r"[,{}]", "", found[0]), plain)))
    plain = NAME.sub("", plain, count=1) if NAME.match(plain) else plain
    percent = plain.endswith("%")
    plain = plain.removesuffix("%").removesuffix("\\").removesuffix(".")
    found = NUMBER.fullmatch(plain)
    if found is None:
        raise Unparseable("the answer is empty" if not plain else "the answer is not one integer or simple fraction")
    top, bottom = (found["top"], found["bottom"] or "1") if found["top"] else (found["over"], found["under"])
    if not Fraction(bottom):
        raise Unparseable("the answer divides by 0")
    value = Fraction(top) / Fraction(bottom) * (-1 if found["sign"] == "-" else 1)
    return value / 100 if percent else value


def grade_math(answer: str, gold: str) -> Verdict:
    """Whether a completion, or an answer taken from one, is the gold answer. The verdict is truthy exactly when it is.

    Raises ValueError for a gold answer that is not a number itself; loaders refuse such rows beforehand.
    """
    try:
        right = number(extract(gold))
    except Unparseable as error:
        raise ValueError(f"the gold answer {gold[:80]!r} cannot be graded against: {error}") from None
    try:
        said = number(extract(answer))
    except Unparseable as error:
        return Verdict("unparseable", str(error))
    return Verdict("correct" if said == right else "wrong")
