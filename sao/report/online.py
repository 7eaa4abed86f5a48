"""The report's section on a stream: what each change cost, what is remembered, and what the guard did. Empty for a run that was neither."""

from __future__ import annotations

import html
import math
from typing import Any

import numpy as np

from sao.online.history import History, read_history, shift_line, summary
from sao.online.measures import COLLAPSED, WINDOW, moving_average
from sao.report.plots import Series, empty_figure, line_chart
from sao.report.rundata import RunData

COLORS = ("c2", "c3", "c4", "c7", "c5", "c6")


def concerns(run: RunData) -> bool:
    """Whether there is a stream or a guard to report on."""
    return bool(run.setting("online.phases")) or any(run.setting(f"online.{key}", 0) for key in ("shadow_drop", "rollback_fall"))


def section(run: RunData) -> str:
    history = read_history(run.run_dir) if run.setting("online.phases") else None
    parts = []
    if history is not None and len(history.stream.rewards):
        facts = summary(history)
        marks = [(float(history.step_of(shift)), shift.after) for shift in history.shifts]
        parts += [
            _reward(history, marks),
            _grid(_accuracy(history, marks), _explained(history, marks), _regret(history, marks)),
            _table(history, facts),
        ]
    elif run.setting("online.phases"):
        parts.append('<p class="missing">no trajectories are kept, so the stream cannot be measured (logger.trajectories)</p>')
    return "".join(parts) + _guard(run)


def _grid(*figures: str) -> str:
    return f'<div class="grid2">{"".join(figures)}</div>'


def _reward(history: History, marks: list[tuple[float, str]]) -> str:
    """Reward by prompt in training order, drawn over steps; each step has several prompts, so a prompt has a share of a step."""
    steps, averaged = history.stream.steps, moving_average(history.stream.rewards)
    batch = history.config.train.batch_size
    known = np.isfinite(averaged)
    at = (np.arange(len(steps)) / batch)[known]
    note = f"mean of the last {WINDOW} rewards; lines mark where another phase begins to be rewarded"
    return line_chart(
        "Reward", [Series("reward", at.tolist(), averaged[known].tolist(), "c1")], note=note, height=260, wide=True, y_range=(0, 1), marks=marks
    )


def _accuracy(history: History, marks: list[tuple[float, str]]) -> str:
    series = [
        Series(name, [float(step) for step, _ in values], [value for _, value in values], color)
        for (name, values), color in zip(history.accuracy.items(), COLORS * len(history.accuracy), strict=False)
    ]
    return line_chart(
        "Held-out accuracy by phase", series, note="what each phase would pay, on held-out prompts of its own", y_range=(0, 1), marks=marks
    )


def _explained(history: History, marks: list[tuple[float, str]]) -> str:
    series = [Series("explained variance", [float(s) for s in history.explained], list(history.explained.values()), "c1")]
    return line_chart(
        "Explained variance of the critic", series, note="undefined where all rewards of a batch are alike", y_range=(None, 1), marks=marks
    )


def _regret(history: History, marks: list[tuple[float, str]]) -> str:
    if history.regret is None:
        return empty_figure("Regret", "the environment does not say what was possible (a class method optimum)")
    at = [i / history.config.train.batch_size for i in range(len(history.stream.rewards))]
    return line_chart(
        "Regret",
        [Series("regret", at, history.regret.tolist(), "c5")],
        note="rewards missed so far, against the best at each time",
        y_range=(0, None),
        marks=marks,
    )


def _table(history: History, facts: dict[str, Any]) -> str:
    columns = ("", "level before", "lowest after", "steps to 80 %", "tokens", "seconds", "explained variance before / after")
    rows = "".join(f"<tr>{''.join(_cell(text, i) for i, text in enumerate(_shift_cells(row)))}</tr>" for row in facts["shifts"])
    head = "".join(f'<th class="n">{title}</th>' if title else "<th>shift</th>" for title in columns)
    lines = [f"{row['phase']} came back at prompt {row['position']:,}: {_saved(row)}" for row in facts["returns"]]
    if facts["forgetting"]:
        lost = ", ".join(f"{name} {value:+.2f}" for name, value in facts["forgetting"].items())
        lines.append(f"forgotten, held-out accuracy when a phase ended less the last: {lost}")
    share = facts["majority_answer"]
    verdict = '<span class="chip bad">collapsed</span>' if facts["collapsed"] else '<span class="chip good">no collapse</span>'
    if share is not None:
        lines.append(f"the commonest of the last {len(history.answers)} answers is {share:.0%} of them ({COLLAPSED:.0%} would be collapse)")
    said = "".join(f'<p class="note">{html.escape(line)}</p>' for line in [*map(shift_line, facts["shifts"]), *lines])
    return f'<div class="panel"><div class="tools">{verdict}</div><table class="t"><tr>{head}</tr>{rows}</table>{said}</div>'


def _shift_cells(row: dict[str, Any]) -> list[str]:
    head = f"{row['before']} → {row['after']}, step {row['step']}"
    explained = f"{_number(row['explained_before'])} / {_number(row['explained_after'])}"
    if "level" not in row:
        return [head, "–", "–", "too few rewards", "–", "–", explained]
    if not row["learned"]:
        return [head, _number(row["level"]), _number(row["low"]), "level too low", "–", "–", explained]
    more = "> " if row["censored"] else ""
    tokens, seconds = (_number(row[key], ",.0f") for key in ("tokens", "seconds"))
    return [head, _number(row["level"]), _number(row["low"]), f"{more}{row['steps']}", more + tokens, more + seconds, explained]


def _saved(row: dict[str, Any]) -> str:
    if row["first_steps"] is None or row["steps"] is None:
        return "its earlier level was not reached on both visits"
    saved = f" ({row['savings']:+.0%} saved)" if row["savings"] is not None else ""
    return f"{row['steps']} steps to its earlier level, {row['first_steps']} the first time{saved}"


def _number(value: float | None, spec: str = ".2f") -> str:
    return "–" if value is None or not math.isfinite(value) else format(value, spec)


def _cell(text: str, index: int) -> str:
    return f'<td class="n">{html.escape(text)}</td>' if index else f"<td>{html.escape(text)}</td>"


def _guard(run: RunData) -> str:
    """Versions refused and rolled back, with the steps at which it happened."""
    if not any(run.setting(f"online.{key}", 0) for key in ("shadow_drop", "rollback_fall")):
        return ""
    rows = []
    for name, text in (("refused", "refused by shadow evaluation"), ("rolled_back", "rolled back because reward fell")):
        x, y = run.series(f"online/{name}")
        steps = [int(step) for step, value, before in zip(x, y, [0.0, *y], strict=False) if value > before]
        where = f"at step {', '.join(map(str, steps))}" if steps else ""
        rows.append(f'<tr><td>{text}</td><td class="n">{int(y[-1]) if y else 0}</td><td>{where}</td></tr>')
    x, y = run.series("eval/shadow/mean", "eval")
    passed = run.series("eval/shadow/passed", "eval")[1]
    good = [(a, b) for a, b, ok in zip(x, y, passed, strict=False) if ok]
    bad = [(a, b) for a, b, ok in zip(x, y, passed, strict=False) if not ok]
    series = [
        Series(label, [a for a, _ in points], [b for _, b in points], color, "dots")
        for label, points, color in (("passed", good, "c2"), ("refused", bad, "c5"))
    ]
    chart = (
        line_chart("Shadow evaluations", series, x_label="version", note="held-out mean of a version before it serves", y_range=(0, 1)) if x else ""
    )
    return f'<div class="panel"><table class="t"><tr><th>versions</th><th class="n">count</th><th></th></tr>{"".join(rows)}</table></div>{chart}'
