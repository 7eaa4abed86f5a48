"""Exact integer arithmetic of the calculator task: what the tool computes, and the answer it is checked against."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable
from dataclasses import dataclass

OPERATIONS: dict[str, Callable[[int, int], int]] = {"+": operator.add, "-": operator.sub, "*": operator.mul}
_ONE = re.compile(r"\s*(-?\d{1,9})\s*([-+*])\s*(-?\d{1,9})\s*", re.ASCII)
_TWO = re.compile(r"(\d{1,9})([-+*])(\d{1,9})([-+*])(\d{1,9})", re.ASCII)


class OperationError(ValueError):
    """A call the tool does not execute; the message is what the policy reads."""


def one_operation(expression: object) -> int:
    """Value of one operation on two integers of at most nine digits, such as `12*-3`. Raises OperationError for anything else."""
    match = _ONE.fullmatch(expression) if isinstance(expression, str) else None
    if match is None:
        raise OperationError("not one operation on two integers")
    left, sign, right = match.groups()
    return OPERATIONS[sign](int(left), int(right))


@dataclass(frozen=True)
class Problem:
    """`a p b q c` with the usual precedence."""

    operands: tuple[int, int, int]
    operators: tuple[str, str]

    @classmethod
    def parse(cls, expression: str) -> Problem:
        match = _TWO.fullmatch(expression.replace(" ", ""))
        if match is None:
            raise ValueError(f"payload expression {expression!r} is not three integers joined by two of + - *")
        a, first, b, second, c = match.groups()
        return cls((int(a), int(b), int(c)), (first, second))

    @property
    def expression(self) -> str:
        (a, b, c), (first, second) = self.operands, self.operators
        return f"{a}{first}{b}{second}{c}"

    @property
    def second_first(self) -> bool:
        """Whether the second operation binds stronger and has to be done first."""
        return self.operators[1] == "*" and self.operators[0] != "*"

    @property
    def answer(self) -> int:
        return self.evaluate(self.second_first)

    def evaluate(self, second_first: bool) -> int:
        """Value in the given order of operations."""
        (a, b, c), (first, second) = self.operands, self.operators
        if second_first:
            return OPERATIONS[first](a, OPERATIONS[second](b, c))
        return OPERATIONS[second](OPERATIONS[first](a, b), c)
