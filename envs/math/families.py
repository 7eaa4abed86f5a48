"""AIME-shaped problems made up on the spot: integer answers from 0 to 999, each computed twice by ways that share nothing.

Synthetic: they have the form of the contest's problems and none of its text. A family draws a problem of a level (1 the easiest, 5 the hardest); `answer`
is a formula or a clever way, `check` counts or simulates. A problem on which the two differ is never given out.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable
from dataclasses import dataclass

LEVELS = (1, 2, 3, 4, 5)
LARGEST = 999


@dataclass(frozen=True)
class Problem:
    question: str
    answer: int
    check: Callable[[], int]


class WrongAnswer(AssertionError):
    """A family's two ways disagree: a bug of ours."""


def congruences(rng: random.Random, level: int) -> Problem:
    """The least number with given remainders: by the Chinese remainder theorem, and by trying."""
    moduli = {1: (3, 5), 2: (5, 7), 3: (7, 11), 4: (4, 9, 11), 5: (7, 11, 13)}[level]
    wanted = [rng.randrange(modulus) for modulus in moduli]
    product = math.prod(moduli)
    answer = sum(r * (product // m) * pow(product // m, -1, m) for r, m in zip(wanted, moduli, strict=True)) % product
    told = " and ".join(f"remainder {r} when divided by {m}" for r, m in zip(wanted, moduli, strict=True))
    return Problem(
        f"Find the smallest non-negative integer that leaves {told}.",
        answer,
        lambda: next(n for n in itertools.count() if all(n % m == r for r, m in zip(wanted, moduli, strict=True))),
    )


def last_digits(rng: random.Random, level: int) -> Problem:
    """A power modulo m: by squaring, and one factor at a time."""
    modulus = (10, 10, 100, 1000, 1000)[level - 1]
    base, exponent = rng.randint(2, 9 if level < 3 else 99), rng.randint(2, 10 ** min(level, 4))

    def one_by_one() -> int:
        value = 1
        for _ in range(exponent):
            value = value * base % modulus
        return value

    return Problem(f"Find the remainder when {base}^{{{exponent}}} is divided by {modulus}.", pow(base, exponent, modulus), one_by_one)


def multiples(rng: random.Random, level: int) -> Problem:
    """How many numbers up to n are divisible by a or b (and not by c): by inclusion and exclusion, and by counting."""
    n = rng.randint(20, 100) if level == 1 else rng.randint(100, 200 * level)
    a, b, c = rng.sample((2, 3, 4, 5, 6, 7, 9, 10, 11, 12), 3)
    if level < 3:
        answer = n // a + n // b - n // math.lcm(a, b)
        return Problem(
            f"How many integers from 1 to {n} are divisible by {a} or by {b}?", answer, lambda: sum(k % a == 0 or k % b == 0 for k in range(1, n + 1))
        )
    with_c = n // math.lcm(a, c) + n // math.lcm(b, c) - n // math.lcm(a, b, c)
    return Problem(
        f"How many integers from 1 to {n} are divisible by {a} or by {b}, but not by {c}?",
        n // a + n // b - n // math.lcm(a, b) - with_c,
        lambda: sum((k % a == 0 or k % b == 0) and k % c != 0 for k in range(1, n + 1)),
    )


def lattice_paths(rng: random.Random, level: int) -> Problem:
    """Paths on a grid that avoid a point, modulo 1000: by binomials, and step by step."""
    width, height = rng.randint(2, 4 + level), rng.randint(2, 4 + level)
    x, y = rng.randint(1, width - 1), rng.randint(1, height - 1)
    total = math.comb(width + height, width) - math.comb(x + y, x) * math.comb(width + height - x - y, width - x)

    def step_by_step() -> int:
        ways = [[0] * (height + 1) for _ in range(width + 1)]
        for i, j in itertools.product(range(width + 1), range(height + 1)):
            if (i, j) == (0, 0):
                ways[i][j] = 1
            elif (i, j) != (x, y):
                ways[i][j] = (ways[i - 1][j] if i else 0) + (ways[i][j - 1] if j else 0)
        return ways[width][height] % 1000

    return Problem(
        f"A path from (0,0) to ({width},{height}) moves one unit right or one unit up at each step and does not pass through ({x},{y}). "
        "Find the remainder when the number of such paths is divided by 1000.",
        total % 1000,
        step_by_step,
    )


def dice(rng: random.Random, level: int) -> Problem:
    """The probability of a sum as m/n in lowest terms, asked as m + n: by generating function, and by listing all throws."""
    sides = [rng.randint(4, 4 + level) for _ in range(2 if level < 4 else 3)]
    wanted = rng.randint(len(sides) + 1, sum(sides) - 1)
    ways = [1]
    for side in sides:
        ways = [sum(ways[k - face] for face in range(1, side + 1) if 0 <= k - face < len(ways)) for k in range(len(ways) + side)]
    divisor = math.gcd(ways[wanted], math.prod(sides))

    def listed() -> int:
        throws = [sum(faces) for faces in itertools.product(*(range(1, side + 1) for side in sides))]
        m, n = throws.count(wanted), len(throws)
        while (common := math.gcd(m, n)) > 1:
            m, n = m // common, n // common
        return m + n

    named = " and ".join(f"one with {side} sides" for side in sides)
    return Problem(
        f"Fair dice are thrown together: {named}, each numbered from 1. The probability that the numbers add up to {wanted} is m/n in lowest terms. Find m+n.",
        (ways[wanted] + math.prod(sides)) // divisor,
        listed,
    )


def recurrence(rng: random.Random, level: int) -> Problem:
    """A term of a linear recurrence modulo 1000: by powers of its matrix, and term by term."""
    p, q = rng.randint(1, level + 1), rng.randint(1, level + 1)
    first, second = rng.randint(0, 9), rng.randint(1, 9)
    n = rng.randint(3, 3 + 2 * level) if level < 4 else rng.randint(20, 200)

    def times(a: tuple[int, ...], b: tuple[int, ...]) -> tuple[int, ...]:
        return (
            (a[0] * b[0] + a[1] * b[2]) % 1000,
            (a[0] * b[1] + a[1] * b[3]) % 1000,
            (a[2] * b[0] + a[3] * b[2]) % 1000,
            (a[2] * b[1] + a[3] * b[3]) % 1000,
        )

    power: tuple[int, ...] = (1, 0, 0, 1)
    square: tuple[int, ...] = (p, q, 1, 0)
    left = n - 1
    while left:
        power = times(power, square) if left % 2 else power
        square, left = times(square, square), left // 2

    def term_by_term() -> int:
        a, b = first, second
        for _ in range(n - 1):
            a, b = b, p * b + q * a
        return a % 1000

    rule = f"{p if p > 1 else ''}a_{{k-1}} + {q if q > 1 else ''}a_{{k-2}}"
    return Problem(
        f"A sequence has a_1 = {first}, a_2 = {second} and a_k = {rule} for k > 2. Find the remainder when a_{{{n}}} is divided by 1000.",
        (power[2] * second + power[3] * first) % 1000,
        term_by_term,
    )


def digit_sum(rng: random.Random, level: int) -> Problem:
    """The sum of the digits of a^n - b: of Python's number, and of one multiplied out by hand."""
    base, exponent, minus = rng.choice((2, 3, 9, 10, 11)), rng.randint(2 * level, 4 * level), rng.randint(0, 9 * level)
    minus = min(minus, base**exponent - 1)

    def by_hand() -> int:
        digits = [1]  # least first
        for _ in range(exponent):
            carry = 0
            for place in range(len(digits)):
                carry, digits[place] = divmod(digits[place] * base + carry, 10)
            while carry:
                carry, digit = divmod(carry, 10)
                digits.append(digit)
        for _ in range(minus):
            place = next(place for place, digit in enumerate(digits) if digit)
            digits[place] -= 1
            digits[:place] = [9] * place
        return sum(digits)

    return Problem(f"Find the sum of the decimal digits of {base}^{{{exponent}}} - {minus}.", sum(map(int, str(base**exponent - minus))), by_hand)


FAMILIES: dict[str, Callable[[random.Random, int], Problem]] = {
    made.__name__: made for made in (congruences, last_digits, multiples, lattice_paths, dice, recurrence, digit_sum)
}


def draw(rng: random.Random, family: str, level: int) -> Problem:
    """One problem whose answer is from 0 to 999 and was found twice."""
    while True:
        problem = FAMILIES[family](rng, level)
        if 0 <= problem.answer <= LARGEST:
            break
    if problem.check() != problem.answer:
        raise WrongAnswer(f"{family}: {problem.question} has the answer {problem.check()}, not {problem.answer}")
    return problem
