"""The value of an expression that the policy wrote, without evaluating it as code: integers, + - * / and brackets."""

from __future__ import annotations

import re
from fractions import Fraction

MOST_CHARS = 200
TOKEN = re.compile(r"\s*(?:(\d{1,9})|(.))", re.ASCII)


class NotArithmetic(ValueError):
    """A text that is no expression of integers, + - * / and brackets, or divides by 0."""


def value(text: str) -> tuple[Fraction, list[int]]:
    """The exact value of an expression and the integers in it, in order. Raises NotArithmetic."""
    if len(text) > MOST_CHARS:
        raise NotArithmetic(f"longer than {MOST_CHARS} characters")
    found = TOKEN.findall(text.strip().replace("×", "*").replace("÷", "/"))
    tokens: list[int | str] = [int(number) if number else sign for number, sign in found]
    parser = _Parser(tokens)
    result = parser.sum()
    if parser.at != len(tokens):
        raise NotArithmetic(f"{tokens[parser.at]!r} was not expected")
    return result, [token for token in tokens if isinstance(token, int)]


class _Parser:
    """Recursive descent; its depth is bounded by the length of the text."""

    def __init__(self, tokens: list[int | str]) -> None:
        self.tokens = tokens
        self.at = 0

    def next(self, wanted: str) -> str:
        """The token here if it is one of the characters wanted, else an empty text."""
        token = self.tokens[self.at] if self.at < len(self.tokens) else ""
        if not isinstance(token, str) or token not in tuple(wanted):
            return ""
        self.at += 1
        return token

    def sum(self) -> Fraction:
        total = self.product()
        while sign := self.next("+-"):
            term = self.product()
            total = total + term if sign == "+" else total - term
        return total

    def product(self) -> Fraction:
        total = self.factor()
        while sign := self.next("*/"):
            factor = self.factor()
            if sign == "/" and factor == 0:
                raise NotArithmetic("division by 0")
            total = total * factor if sign == "*" else total / factor
        return total

    def factor(self) -> Fraction:
        if self.next("-"):
            return -self.factor()
        if self.next("("):
            inside = self.sum()
            if not self.next(")"):
                raise NotArithmetic("a bracket is not closed")
            return inside
        token = self.tokens[self.at] if self.at < len(self.tokens) else ""
        if not isinstance(token, int):
            raise NotArithmetic("a number is missing")
        self.at += 1
        return Fraction(token)
