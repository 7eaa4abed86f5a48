"""Expressions of several integers joined by + - *, and their exact value."""

from __future__ import annotations

import math
import random
import re
import zlib

OPERATORS = "+-*"
HELD_OUT_SHARE = 4  # one expression in so many belongs to the held-out split
_FORM = re.compile(r"\d{1,6}(?:[-+*]\d{1,6}){1,15}", re.ASCII)
_TERM = re.compile(r"([-+]?)(\d+(?:\*\d+)*)")


def value(expression: str) -> int:
    """Value of `2+3*4`, with the usual precedence. Raises ValueError for anything but at most 16 unsigned integers joined by + - *."""
    compact = expression.replace(" ", "")
    if _FORM.fullmatch(compact) is None:
        raise ValueError(f"payload expression {expression!r} is not integers joined by + - *")
    return sum((-1 if sign == "-" else 1) * math.prod(map(int, term.split("*"))) for sign, term in _TERM.findall(compact))


def operations(expression: str) -> list[str]:
    """One operation after the other as it is worked out by hand: `2+3*4` gives `3*4=12`, `2+12=14`. Raises ValueError as `value` does."""
    value(expression)
    numbers = [int(number) for number in re.findall(r"\d+", expression)]
    operators = re.findall(r"[-+*]", expression)
    done = []
    while operators:
        at = operators.index("*") if "*" in operators else 0
        left, operator, right = numbers[at], operators.pop(at), numbers.pop(at + 1)
        numbers[at] = left * right if operator == "*" else left + right if operator == "+" else left - right
        done.append(f"{left}{operator}{right}={numbers[at]}")
    return done


def worked_result(answer: str, count: int) -> str:
    """What a worked answer gives as the result of its operation number `count`, cut behind that number; all of an answer with fewer results.

    `1+2=3, 3+4=7, 7` with count 2 gives `7`: what a model adds because it does not stop is not read.
    """
    parts = answer.split("=", count)
    if len(parts) <= count:
        return answer
    said = re.match(r"\s*-?\d+", parts[count])
    return said.group() if said else ""


def goes_below_zero(expression: str) -> bool:
    """Whether an operation, done one after the other, has a negative result."""
    return any(step.partition("=")[2].startswith("-") for step in operations(expression))


def split_of(expression: str) -> str:
    """`train` or `held_out`: a property of the expression itself, so the two splits are disjoint however tasks are drawn."""
    return "held_out" if zlib.crc32(expression.encode()) % HELD_OUT_SHARE == 0 else "train"


def draw(rng: random.Random, operands: int, smallest: int, largest: int, operators: str) -> str:
    """One expression with operands uniform in smallest..largest and operators uniform in `operators`."""
    numbers = [str(rng.randint(smallest, largest)) for _ in range(operands)]
    return numbers[0] + "".join(rng.choice(operators) + number for number in numbers[1:])
