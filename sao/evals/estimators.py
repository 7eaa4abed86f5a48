"""What n samples per problem say about a policy: pass@k, mean@k, majority@k, and how sure that is. Plain functions, numpy only.

Everything here treats the PROBLEM as the unit that was drawn: samples of one problem are averaged first, then problems, and the interval
resamples problems. Resampling single samples would call 16 answers to one question 16 independent observations and be far too narrow.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray


def pass_at_k(n: int, c: int, k: int) -> float:
    """The probability that at least one of k samples, drawn without replacement from n of which c are correct, is correct.

    1 - C(n - c, k) / C(n, k) (Chen et al. 2021, eq. 1), as a product of n - c + 1 .. n terms below 1, so that no factorial overflows.
    Raises ValueError for k > n, which no estimate from n samples can answer, and for numbers that no experiment gives.
    """
    if not 0 <= c <= n:
        raise ValueError(f"{c} correct of {n} samples is impossible")
    if k < 1:
        raise ValueError(f"pass@{k} is not defined; k must be at least 1")
    if k > n:
        raise ValueError(f"pass@{k} cannot be estimated from {n} samples; draw at least {k}")
    if n - c < k:
        return 1.0
    return float(1.0 - np.prod(1.0 - k / np.arange(n - c + 1, n + 1)))


def mean_at_k(rewards: Sequence[float] | Sequence[Sequence[float]] | NDArray[Any], k: int | None = None) -> float:
    """The mean over problems of the mean reward of their first k samples (all of them, when k is None).

    rewards: one sequence per problem, of any lengths, or the samples of one problem alone. Raises ValueError when a problem has fewer than k
    samples, or none.
    """
    problems = list(rewards)
    if not problems:
        raise ValueError("mean@k needs at least one problem")
    if np.ndim(problems[0]) == 0:
        problems = [problems]
    return float(np.mean([_first(np.asarray(problem, dtype=np.float64), k, "mean").mean() for problem in problems]))


def majority_at_k(answers: Sequence[str | None], gold: str, k: int | None = None, *, normalise: Callable[[str], str] | None = None) -> float:
    """1.0 when the commonest of one problem's first k answers is `gold`, else 0.0; both are normalised first.

    None is an answer that could not be read: it has no vote. Of equally common answers the one seen first wins, so that the result does not
    depend on how a dictionary is ordered. Raises ValueError for k > n.
    """
    plain = normalise or normalise_answer
    votes: dict[str, int] = {}
    for answer in _first(answers, k, "majority"):
        if answer is not None:
            votes[plain(answer)] = votes.get(plain(answer), 0) + 1
    if not votes:
        return 0.0
    return float(max(votes, key=votes.__getitem__) == plain(gold))  # max returns the first of equals, and dicts keep the order of insertion


def normalise_answer(text: str) -> str:
    """Case, white space and ways to write a number do not make two answers: ' 007 ', '7.0' and '$7$' are '7', '1,000' is '1000'."""
    answer = " ".join(text.split()).strip("$ ").casefold()
    number = re.fullmatch(r"([+-]?)(\d+|\d{1,3}(?:,\d{3})+)(?:\.(\d*))?", answer)
    if not number:
        return answer
    sign, whole, decimals = number.groups()
    value = (whole.replace(",", "").lstrip("0") or "0") + (f".{decimals.rstrip('0')}" if (decimals or "").rstrip("0") else "")
    return f"-{value}" if sign == "-" and value != "0" else value


def bootstrap_interval(values: NDArray[Any], *, seed: int, draws: int = 2000, level: float = 0.95) -> tuple[float, float]:
    """Percentile bootstrap of the mean over the first axis, one value per problem; the value itself when there is only one."""
    if len(values) < 2:
        return float(values.min()), float(values.max())
    rng = np.random.default_rng(seed)
    means = rng.choice(values, size=(draws, len(values))).mean(axis=1)
    tail = (1 - level) / 2
    return float(np.quantile(means, tail)), float(np.quantile(means, 1 - tail))


def wilson_interval(successes: int, n: int, z: float = 1.96) -> tuple[float, float]:
    """Wilson's score interval of a share, one outcome a problem (Wilson 1927); unlike a bootstrap it does not call 5 of 5 certain."""
    if n < 1 or not 0 <= successes <= n:
        raise ValueError(f"{successes} of {n} is no share")
    share, spread = successes / n, z * z / n
    middle = (share + spread / 2) / (1 + spread)
    half = z * ((share * (1 - share) + spread / 4) / n) ** 0.5 / (1 + spread)
    return max(0.0, middle - half), min(1.0, middle + half)


def _first(samples: Any, k: int | None, what: str) -> Any:
    """The first k samples, or all."""
    if k is not None and k < 1:
        raise ValueError(f"{what}@{k} is not defined; k must be at least 1")
    if k is not None and k > len(samples):
        raise ValueError(f"{what}@{k} cannot be estimated from {len(samples)} samples; draw at least {k}")
    if len(samples) == 0:
        raise ValueError(f"{what}@k needs at least one sample")
    return samples if k is None else samples[:k]
