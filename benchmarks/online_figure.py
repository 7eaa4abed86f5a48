"""The figure of `online.py`: reward, and held-out accuracy by style, against steps; one column a method, the mean over seeds with its range."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

COLORS = {"cute": "#d6457a", "chuunibyou": "#6a4fd0", "classical": "#1f8a5b"}
Points = dict[int, list[float]]  # step -> one value a seed


def draw(runs: Sequence[dict[str, Any]]) -> Figure:
    """Two rows: above, the moving average of reward; below, held-out accuracy of each style. Dashed lines are shifts, named by what is rewarded after."""
    methods = list(dict.fromkeys(run["method"] for run in runs))
    figure = Figure(figsize=(2.6 * len(methods) + 0.6, 4.6), layout="constrained")
    figure.get_layout_engine().set(w_pad=0.1)
    rows = figure.subplots(2, len(methods), sharex="col", sharey=True, squeeze=False)
    for column, method in enumerate(methods):
        of = [run for run in runs if run["method"] == method]
        above, below = rows[0][column], rows[1][column]
        above.set_title(method.replace("_", " "))
        below.set_xlabel("training step")
        _line(above, rewards(of), "#444444", "reward")
        for name in dict.fromkeys(name for run in of for name in run["accuracy_by_step"]):
            _line(below, accuracy(of, name), COLORS.get(name, "#444444"), name)
        for shift in of[0]["shifts"]:
            for axes in (above, below):
                axes.axvline(shift["step"], color="#999999", linestyle=":", linewidth=1)
            above.text(shift["step"], 1.03, f" {shift['after']}", fontsize=6, rotation=0, va="bottom")
    rows[0][0].set_ylabel("reward, mean of 40")
    rows[1][0].set_ylabel("held-out accuracy")
    rows[0][0].set_ylim(0, 1.12)
    rows[1][-1].legend(fontsize=7, loc="upper right")
    for axes in rows[1]:
        axes.set_xticks(range(0, 1 + max(len(run["reward_by_step"]) for run in runs), 50))
    return figure


def rewards(runs: Sequence[dict[str, Any]]) -> Points:
    """The moving average at the end of each step, of the runs that have one there."""
    points: Points = {}
    for run in runs:
        for step, value in enumerate(run["reward_by_step"]):
            if value is not None:
                points.setdefault(step, []).append(value)
    return points


def accuracy(runs: Sequence[dict[str, Any]], name: str) -> Points:
    points: Points = {}
    for run in runs:
        for step, value in run["accuracy_by_step"].get(name, ()):
            points.setdefault(step, []).append(value)
    return points


def _line(axes: Axes, points: Points, color: str, label: str) -> None:
    steps = sorted(points)
    axes.fill_between(steps, [min(points[s]) for s in steps], [max(points[s]) for s in steps], color=color, alpha=0.15, linewidth=0)
    axes.plot(steps, [statistics.fmean(points[s]) for s in steps], color=color, linewidth=1.5, label=label)
