"""One-line programs that solve problems of the generator (`sao.envs.math.families`), for demonstrations: the numbers are copied from the text."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Sequence

Numbers = Sequence[int]

# Family -> (the program that a reader would write for the numbers of a problem, its value).
PROGRAMS: dict[str, tuple[Callable[[Numbers], str], Callable[[Numbers], int]]] = {
    "last_digits": (lambda n: f"{n[0]}**{n[1]}%{n[2]}", lambda n: pow(n[0], n[1], n[2])),
    "digit_sum": (lambda n: f"sum(map(int,str({n[0]}**{n[1]}-{n[2]})))", lambda n: sum(map(int, str(n[0] ** n[1] - n[2])))),
}
# What a warm start imitates after the clean ones: most answers are guessed, some programs have a number copied wrong.
MIXTURE = {"no_tool": 0.55, "good": 0.3, "miscopy": 0.15}


def worked(family: str, question: str, slip: random.Random | None = None) -> tuple[str, str]:
    """The program for a problem and what it prints. slip: draws one number of it that is copied wrong."""
    numbers = [int(number) for number in re.findall(r"\d+", question)]
    if slip is not None:
        at = slip.randrange(2)
        numbers[at] = max(1, numbers[at] + slip.choice((-1, 1)))
    program, value = PROGRAMS[family]
    return program(numbers), str(value(numbers))
