"""What decides about two symbolic answers, in a process that is killed when it takes too long. Imported by nothing else: it loads sympy.

math-verify's reader (latex2sympy2_extended) turns one expression of LaTeX into sympy; `sao.evals.symbolic_text` has split sets, tuples and intervals before.
Its `verify` is asked only where no number can be computed: it rounds to six digits, takes 5 % for 5, joins boxes, and takes a list for an interval.
Numbers are equal when their difference is exactly 0, or has no significant digit with 400 digits of working precision; expressions when that holds at
points drawn from the texts (of which the negative ones count where both sides are real).
"""

from __future__ import annotations

import logging
import random
import resource
import time
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import sympy
from latex2sympy2_extended import latex2sympy
from latex2sympy2_extended.latex2sympy2 import ConversionConfig
from math_verify import verify
from sympy.core.evalf import PrecisionExhausted

from sao.evals.symbolic_text import Atom, Brackets, Collection, Equation, Node, Union, Unreadable, Words, read

WRONG, CORRECT, BAD_ANSWER, BAD_GOLD, TOO_BIG = range(5)
CPU_S = 2
MEMORY = 2 << 30  # bytes of address space: what an answer may make sympy allocate
POINTS, DIGITS = 6, 400
READING = ConversionConfig(interpret_as_mixed_fractions=False, interpret_contains_as_eq=False, lowercase_symbols=False)


def grade(completion: str, row: Mapping[str, Any]) -> int:
    """A code for (answer, gold), called in the worker process alone: it bounds memory and processor time of the process it runs in.

    Processor time, since on a busy machine an honest answer may wait for seconds; the kernel ends the process (SIGXCPU), whatever C code it is in.
    """
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_CPU, (int(time.process_time()) + 1 + CPU_S, resource.getrlimit(resource.RLIMIT_CPU)[1]))
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, resource.getrlimit(resource.RLIMIT_AS)[1]))
    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that it has no time-out of its own: it is not to have one
    return decide(completion, str(row["answer"]))


def decide(answer: str, gold: str) -> int:
    try:
        right = _parsed(read(gold))
    except Exception:  # noqa: BLE001 - whatever sympy raises, the reason is the same
        return BAD_GOLD
    try:
        points = random.Random(zlib.crc32(f"{answer}\0{gold}".encode()))
        return CORRECT if _same(_parsed(read(answer)), right, points) else WRONG
    except (MemoryError, RecursionError, OverflowError):
        return TOO_BIG
    except Exception:  # noqa: BLE001 - the answer made sympy raise, and is to blame
        return BAD_ANSWER


def _parsed(node: Node) -> Any:
    """The same structure with sympy expressions for atoms."""
    match node:
        case Atom(latex):
            return expression(latex)
        case Brackets(opening, items, closing):
            return Brackets(opening, tuple(_parsed(item) for item in items), closing)
        case Collection(items):
            return Collection(tuple(_parsed(item) for item in items))
        case Union(items):
            return Union(tuple(_parsed(item) for item in items))
        case Equation(left, right):
            return Equation(expression(left.latex), expression(right.latex))
    return node


def expression(latex: str) -> Any:
    """One expression, evaluated. Raises whatever the reader does where it is none."""
    found = latex2sympy(latex, normalization_config=None, conversion_config=READING)
    if not isinstance(found, sympy.Basic | sympy.MatrixBase):
        raise Unreadable("it is no expression")
    return found.subs({sympy.Symbol("i"): sympy.I, sympy.Symbol("i", real=True): sympy.I}).doit()


def _same(left: Any, right: Any, points: random.Random) -> bool:
    if isinstance(left, Collection) and isinstance(right, Collection):
        return _matched(_distinct(left.items, points), _distinct(right.items, points), points)
    if isinstance(left, Union) or isinstance(right, Union):
        return bool(_as_set(left) == _as_set(right))
    if isinstance(left, Brackets) and isinstance(right, Brackets):
        same_kind = (left.opening, left.closing, len(left.items)) == (right.opening, right.closing, len(right.items))
        return same_kind and all(_same(a, b, points) for a, b in zip(left.items, right.items, strict=True))
    if isinstance(left, Equation) and isinstance(right, Equation):
        return _same_equation(left, right, points)
    if isinstance(left, Equation) != isinstance(right, Equation):  # `x = 5` names the value 5
        named, value = (left, right) if isinstance(left, Equation) else (right, left)
        return isinstance(named.left, sympy.Symbol) and _same(named.right, value, points)
    if isinstance(left, Words) or isinstance(right, Words):
        return left == right
    if isinstance(left, Collection) != isinstance(right, Collection):  # a set of one value, or one value
        one, other = (left, right) if isinstance(left, Collection) else (right, left)
        return len(one.items) == 1 and _same(one.items[0], other, points)
    if isinstance(left, sympy.Set) or isinstance(right, sympy.Set):
        return bool(_as_set(left) == _as_set(right))
    if isinstance(left, Brackets) or isinstance(right, Brackets):
        return False
    if isinstance(left, sympy.MatrixBase) and isinstance(right, sympy.MatrixBase):
        return left.shape == right.shape and all(_equal(a, b, points) for a, b in zip(left.flat(), right.flat(), strict=True))
    if isinstance(left, sympy.Expr) and isinstance(right, sympy.Expr):
        return _equal(left, right, points)
    return bool(type(left) is type(right) and left == right)


def _as_set(node: Any) -> Any:
    """Intervals and finite sets as sympy's; anything else as it is, equal to no set."""
    match node:
        case Union(items):
            parts = [_as_set(item) for item in items]
            return sympy.Union(*parts) if all(isinstance(part, sympy.Set) for part in parts) else node
        case Collection(items):
            return sympy.FiniteSet(*items) if all(isinstance(item, sympy.Basic) for item in items) else node
        case Brackets(opening, (sympy.Expr() as low, sympy.Expr() as high), closing) if low.is_extended_real and high.is_extended_real:
            return sympy.Interval(low, high, opening == "(", closing == ")")
    return node


def _distinct(items: Sequence[Any], points: random.Random) -> list[Any]:
    kept: list[Any] = []
    for item in items:
        if not any(_same(item, other, points) for other in kept):
            kept.append(item)
    return kept


def _matched(left: Sequence[Any], right: Sequence[Any], points: random.Random) -> bool:
    """Whether each item has a partner of its own on the other side. Equality is transitive, so taking the first partner is enough."""
    rest = list(right)
    for item in left:
        at = next((index for index, other in enumerate(rest) if _same(item, other, points)), None)
        if at is None:
            return False
        del rest[at]
    return not rest


def _same_equation(left: Any, right: Any, points: random.Random) -> bool:
    """Two equations are one when the difference of the sides of the first is a number, not 0, times that of the second."""
    a, b = left.left - left.right, right.left - right.right
    ratio = sympy.cancel(a / b) if b != 0 else sympy.S.Zero
    return bool(ratio.is_number and ratio != 0) or _equal(a, b, points) or _equal(a, -b, points)


def _equal(left: Any, right: Any, points: random.Random) -> bool:
    if left == right:
        return True
    if not (left.is_finite is not False and right.is_finite is not False):
        return False  # infinities are equal to themselves alone
    difference = left - right
    if difference.is_Rational:
        return bool(difference == 0)
    symbols = sorted(difference.free_symbols, key=str)
    if not symbols:
        found = _is_zero(difference)
        return bool(verify(right, left, timeout_seconds=None)) if found is None else found
    decided = 0
    for index in range(POINTS):
        signs = (1,) if index < POINTS // 2 else (-1, 1)
        at = {symbol: sympy.Rational(points.choice(signs) * points.randint(101, 997), points.randint(103, 499)) for symbol in symbols}
        found = _is_zero(difference.subs(at))
        if found is False and not (min(at.values()) < 0 and _leaves_the_reals(left.subs(at), right.subs(at))):
            return False
        decided += found is True
    return decided >= 2 or bool(verify(right, left, timeout_seconds=None))


def _leaves_the_reals(*values: Any) -> bool:
    """Whether a root or logarithm of a negative number is at work: x^{3/4} and \\sqrt[4]{x^3} are one answer, though not to a complex variable."""
    return any(value.evalf(10).is_real is False for value in values)


def _is_zero(number: Any) -> bool | None:
    """Whether a number without symbols is 0; None where it has no finite value that can be computed."""
    try:
        value = number.evalf(10, maxn=DIGITS, strict=True)
    except PrecisionExhausted:
        return True
    except (ValueError, TypeError, NotImplementedError, ZeroDivisionError):
        return None
    if not value.is_number or value.has(sympy.nan, sympy.zoo, sympy.oo) or value.free_symbols:
        return None
    if value.has(sympy.Integral, sympy.Sum, sympy.Product, sympy.Derivative, sympy.Limit):
        return None
    return bool(value == 0)
