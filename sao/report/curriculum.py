"""The report's section of a curriculum: what was drawn, and what it earned."""

from __future__ import annotations

from typing import Literal

from sao.report.figures import COLORS
from sao.report.plots import Series, line_chart
from sao.report.rundata import RunData

PREFIX = "curriculum"
Style = Literal["line", "stack"]
KINDS = {"unsolved": "hardly ever", "sometimes": "sometimes", "solved": "nearly always"}


def concerns(run: RunData) -> bool:
    return run.setting("data.curriculum", "off") != "off"


def section(run: RunData) -> str:
    """A row of charts for each environment that has a curriculum of its own."""
    levels = [name.rsplit("/", 1)[1] for name in run.names(rf"{PREFIX}/level/.+")]
    single = [name.rsplit("/", 1)[1] for name in run.names(rf"{PREFIX}/seen/.+")]
    figures = [figure for environment in levels for figure in _levels(run, environment)] + [_tasks(run, environment) for environment in single]
    return f'<div class="grid2">{"".join(figures)}</div>' if figures else '<p class="missing">no draw was recorded</p>'


def _levels(run: RunData, environment: str) -> list[str]:
    def series(kind: str, style: Style) -> list[Series]:
        start = f"{PREFIX}/{kind}/{environment}/"
        names = run.names(f"{start}.+")
        return [_series(run, name, f"level {name.removeprefix(start)}", index, style) for index, name in enumerate(names)]

    mean = [_series(run, f"{PREFIX}/level/{environment}", "mean level", 0, "line")]
    return [
        line_chart(f"Levels drawn, {environment}", series("share", "stack"), note="share of the draws to come, the floor included", y_range=(0, 1)),
        line_chart(f"Reward by level, {environment}", series("reward", "line"), note="mean of each level's last rewards, as the curriculum sees it"),
        line_chart(f"Mean level, {environment}", mean, note="of the draws to come; 0 is the easiest", y_range=(0, None)),
    ]


def _tasks(run: RunData, environment: str) -> str:
    kinds = [_series(run, f"{PREFIX}/{kind}/{environment}", f"{words} solved", index, "stack") for index, (kind, words) in enumerate(KINDS.items())]
    seen = run.series(f"{PREFIX}/seen/{environment}")[1]
    note = f"of the tasks seen, which in the end were {seen[-1]:.0%} of all" if seen else ""
    return line_chart(f"Tasks by recent reward, {environment}", kinds, note=note, y_range=(0, 1))


def _series(run: RunData, name: str, label: str, index: int, style: Style) -> Series:
    x, y = run.series(name)
    return Series(label, x, y, COLORS[index % len(COLORS)], style)
