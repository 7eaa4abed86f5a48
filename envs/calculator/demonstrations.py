"""Demonstrations of mixed quality: what the warm start imitates.

Two thirds of the mixture answers without the tool, which is wrong: a policy that imitates it is left with partial skill (it knows the moves,
its greedy answer is wrong), so reinforcement learning has something to do. Slips of other kinds put errors and recoveries on the policy's path.
"""

from __future__ import annotations

import random
from dataclasses import replace

from sao.envs.calculator.arithmetic import OPERATIONS, Problem

MIXTURE = {"no_tool": 0.64, "good": 0.27, "recover": 0.03, "miscopy": 0.02, "early_stop": 0.02, "wrong_order": 0.01, "give_up": 0.01}
CLEAN = {"good": 0.88, "recover": 0.12}


def script(problem: Problem, rng: random.Random, clean: bool) -> list[str]:
    """What a demonstrator does: the expressions it sends to the tool, in order, then its answer."""
    mixture = CLEAN if clean else MIXTURE
    kind = rng.choices(list(mixture), list(mixture.values()))[0]
    if kind == "no_tool":
        return [_guess(problem, rng)]
    calls = [_bad_call(problem, rng)] if kind in ("recover", "give_up") else []
    if kind == "give_up":
        return [*calls, _guess(problem, rng)]
    if kind == "miscopy":
        problem = replace(problem, operands=_miscopied(problem.operands, rng))
    second_first = problem.second_first and kind != "wrong_order"
    (a, b, c), (first, second) = problem.operands, problem.operators
    if second_first:
        middle = OPERATIONS[second](b, c)
        calls += [f"{b}{second}{c}", f"{a}{first}{middle}"]
    else:
        middle = OPERATIONS[first](a, b)
        calls += [f"{a}{first}{b}", f"{middle}{second}{c}"]
    if kind == "early_stop":
        return [*calls[:-1], str(middle)]
    return [*calls, str(problem.evaluate(second_first))]


def _guess(problem: Problem, rng: random.Random) -> str:
    """A number of about the right size."""
    return str(rng.randint(10, 10 ** len(str(abs(problem.answer)))))


def _bad_call(problem: Problem, rng: random.Random) -> str:
    """An expression the tool refuses: too much, an operator short, an operand short."""
    (a, b, c), (first, second) = problem.operands, problem.operators
    return rng.choice([problem.expression, f"{b}{c}", f"{a}{first}", f"{first}{b}{second}"])


def _miscopied(operands: tuple[int, int, int], rng: random.Random) -> tuple[int, int, int]:
    """The middle operand with one digit replaced."""
    digits = list(str(operands[1]))
    digits[rng.randrange(len(digits))] = str(rng.randint(1, 9))
    return operands[0], int("".join(digits)), operands[2]
