"""What is concluded from the cells: collapse and recovery with their censoring, intervals, paired tests and their power. numpy alone.

The definitions of collapse, recovery and censoring stand in the docstring of benchmarks/ablation.py; `collapse` below is their code.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

FALLEN = 0.5  # of the best so far
RECOVERED = 0.8  # of the best before the fall
PATIENCE = 3  # evaluations in a row
RESAMPLES = 20_000


@dataclass(frozen=True)
class Collapse:
    """kind: none, collapsed, or censored (fallen at the end, too late to tell). at, recovered: indices of evaluations; None where it did not happen."""

    kind: Literal["none", "collapsed", "censored"]
    at: int | None = None
    recovered: int | None = None

    def waited(self, evaluations: int) -> int | None:
        """Evaluations from collapse to recovery, or, when it did not recover (right-censored), to the end of the run."""
        return None if self.at is None or self.kind != "collapsed" else (self.recovered or evaluations - 1) - self.at


def collapse(curve: Sequence[float], diverged: bool = False) -> Collapse:
    """The first collapse of a held-out curve. A run whose gradient was not finite at some step has collapsed there or before."""
    fallen = 0
    best = -math.inf
    for index, value in enumerate(curve):
        best = max(best, value)
        fallen = fallen + 1 if value < FALLEN * best else 0
        if fallen == PATIENCE:
            at = index - PATIENCE + 1
            later = [i for i in range(index + 1, len(curve)) if curve[i] >= RECOVERED * best]
            return Collapse("collapsed", at, later[0] if later else None)
    if diverged:
        return Collapse("collapsed", len(curve) - 1)
    return Collapse("censored", len(curve) - fallen) if fallen else Collapse("none")


def area(curve: Sequence[float]) -> float:
    """Mean height under the curve by trapezoids, in units of reward."""
    y = np.asarray(curve, float)
    return float(y[0]) if len(y) == 1 else float(((y[1:] + y[:-1]) / 2).mean())


def student_interval(values: Sequence[float]) -> tuple[float, float, float]:
    """(mean, low, high) of the 95 % interval of Student's t over seeds; infinitely wide below two values."""
    y = np.asarray(values, float)
    if len(y) < 2:
        return float(y.mean()), -math.inf, math.inf
    t = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776, 6: 2.571, 7: 2.447, 8: 2.365, 9: 2.306, 10: 2.262, 15: 2.145}.get(len(y), 1.96)
    half = t * float(y.std(ddof=1)) / math.sqrt(len(y))
    return float(y.mean()), float(y.mean()) - half, float(y.mean()) + half


def wilson(successes: int, n: int) -> tuple[float, float]:
    """95 % interval of a rate."""
    if n == 0:
        return 0.0, 1.0
    z = 1.959964
    centre, spread = (successes + z * z / 2) / (n + z * z), z * math.sqrt(successes * (n - successes) / n + z * z / 4) / (n + z * z)
    return max(0.0, centre - spread), min(1.0, centre + spread)


@dataclass(frozen=True)
class Paired:
    """mean of the differences with its 95 % bootstrap interval; two-sided p of `no difference`; detectable: the smallest true difference found in 80 %."""

    mean: float
    low: float
    high: float
    p: float
    detectable: float
    pairs: int


def paired_bootstrap(differences: Sequence[float], *, seed: int = 0, resamples: int = RESAMPLES) -> Paired:
    """p = share of resampled means of the CENTRED differences at least as large as the observed one in size (with the usual + 1).

    Resampling is over pairs. Power: the test is repeated on samples of the centred differences shifted by an effect; `detectable` is the smallest effect of
    a grid that reaches p < 0.05 in 80 % of them. With all differences equal there is no spread to test against: p is 1 when they are 0, else 1 / resamples.
    """
    d = np.asarray(differences, float)
    generator = np.random.default_rng(seed)
    centred = d - d.mean()
    means = centred[generator.integers(len(d), size=(resamples, len(d)))].mean(1)
    size = abs(d.mean())
    tolerance = 1e-12 * max(1.0, float(np.abs(d).max()))
    p = 1.0 if size <= tolerance else (1 + int((np.abs(means) >= size - tolerance).sum())) / (1 + resamples)
    low, high = np.quantile(d.mean() + means, [0.025, 0.975])
    return Paired(float(d.mean()), float(low), float(high), float(p), _detectable(centred, generator), len(d))


def _detectable(centred: NDArray[np.float64], generator: np.random.Generator, studies: int = 300, resamples: int = 400) -> float:
    n = len(centred)
    samples = centred[generator.integers(n, size=(studies, n))]
    means, rest = samples.mean(1), samples - samples.mean(1, keepdims=True)
    critical = np.empty(studies)
    for study in range(studies):
        critical[study] = np.quantile(np.abs(rest[study][generator.integers(n, size=(resamples, n))].mean(1)), 0.95)
    spread = float(centred.std(ddof=1)) / math.sqrt(n)
    for effect in np.linspace(0.0, 6.0, 121) * spread:
        if (np.abs(means + effect) > critical).mean() >= 0.8:
            return float(effect)
    return 6.0 * spread


def summarise(records: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """One row of the table: a method at a bound on one task or, with several records, over all of them (pairs of seed and task)."""
    copies = [copy for record in records for copy in record["copies"]]
    ends = [collapse(copy["curve"], copy["diverged_at"] is not None) for copy in copies]
    collapsed, censored = (sum(e.kind == kind for e in ends) for kind in ("collapsed", "censored"))
    judged = len(ends) - censored
    finals = [copy["final"] for copy in copies]
    mean, low, high = student_interval(finals)
    return {
        "final": mean,
        "final_low": low,
        "final_high": high,
        "finals": finals,
        "start": float(np.mean([copy["curve"][0] for copy in copies])),
        "area": float(np.mean([area(copy["curve"]) for copy in copies])),
        "runs": len(copies),
        "collapsed": collapsed,
        "censored": censored,
        "diverged": sum(copy["diverged_at"] is not None for copy in copies),
        "recovered": sum(e.recovered is not None for e in ends),
        "collapse_rate": collapsed / judged if judged else None,
        "collapse_interval": wilson(collapsed, judged),
        "collapse_if_censored_count": (collapsed + censored) / len(ends),
        **{
            name: _mean(copies, name)
            for name in ("ess", "explained_variance", "grad_norm", "critic_grad_norm", "log_ratio", "masked_low", "masked_high")
        },
        "masked_by_gap": masked_by_gap(copies),
    }


def _mean(copies: Sequence[dict[str, Any]], name: str) -> float | None:
    found = [x for copy in copies for x in copy["windows"].get(name, ()) if x is not None and math.isfinite(x)]
    return float(np.mean(found)) if found else None


def masked_by_gap(copies: Sequence[dict[str, Any]]) -> dict[str, dict[str, float | None]]:
    """By version gap: tokens, and the share without a gradient among those of positive and of negative advantage, and below and above the band."""
    total: dict[int, NDArray[np.int64]] = {}
    for copy in copies:
        for gap, counts in copy["masked"].items():
            total[int(gap)] = total.get(int(gap), np.zeros(6, np.int64)) + np.asarray(counts)
    out = {}
    for gap, (up, up_cut, down, down_cut, low, high) in sorted(total.items()):
        n = int(up + down)
        out[str(gap)] = {
            "tokens": n,
            "positive": float(up_cut / up) if up else None,
            "negative": float(down_cut / down) if down else None,
            "low": float(low / n) if n else None,
            "high": float(high / n) if n else None,
        }
    return out


def best_rates(records: Sequence[dict[str, Any]]) -> dict[str, float]:
    """The rate with the highest mean final reward over the sweep's seeds for each `method-task`; the smaller one at equality."""
    chosen = {}
    for record in records:
        spec = record["spec"]
        finals: dict[float, list[float]] = {}
        for copy in record["copies"]:
            finals.setdefault(copy["lr"], []).append(copy["final"])
        chosen[f"{spec['method']}-{spec['task']}"] = max(sorted(finals), key=lambda lr: float(np.mean(finals[lr])))
    return chosen
