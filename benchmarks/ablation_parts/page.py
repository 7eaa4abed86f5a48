"""The tables and the figure of docs/concepts/ablation.md, from the JSON of the ablation alone. Text outside the markers is left as it stands."""

from __future__ import annotations

import html
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

BEGIN, END = "<!-- {name}: python benchmarks/ablation.py --report -->", "<!-- end of {name} -->"
COLORS = ("#1f77b4", "#d62728", "#2ca02c", "#9467bd", "#ff7f0e", "#8c564b", "#17becf", "#7f7f7f")


def replace(path: Path, name: str, block: str) -> None:
    """Put `block` between the markers of `name`; a page without them is refused, so that no table goes astray."""
    begin, end = BEGIN.format(name=name), END.format(name=name)
    text = path.read_text()
    if begin not in text or end not in text:
        raise SystemExit(f"{path} has no lines {begin!r} and {end!r} to write the {name} between; put them back")
    path.write_text(re.sub(f"{re.escape(begin)}.*?{re.escape(end)}", lambda _: f"{begin}\n{block}\n{end}", text, flags=re.DOTALL))


def number(value: float | None, digits: int = 3) -> str:
    return "–" if value is None else f"{value:.{digits}f}"


def main_table(rows: dict[str, dict[str, Any]], methods: Sequence[str], bound: int, tasks: Sequence[str]) -> str:
    """One line a method at one bound: final reward on each task and over all, area, collapses, and the state of the optimisation."""
    head = [
        "method",
        *(f"{task}: final" for task in tasks),
        "all: final",
        "area",
        "collapsed",
        "censored",
        "masked A>0",
        "masked A<0",
        "ESS",
        "EV",
        "grad norm",
    ]
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    for method in methods:
        found = [rows.get(f"{method}-{task}-{bound}") for task in (*tasks, "all")]
        if not any(found):
            continue
        cells = [f"{row['final']:.3f} ± {row['final_high'] - row['final']:.3f}" if row else "not run" for row in found]
        whole = found[-1]
        if whole:
            gap = whole["masked_by_gap"].get(str(bound), {})
            cells += [
                number(whole["area"]),
                f"{whole['collapsed']}/{whole['runs'] - whole['censored']}",
                str(whole["censored"]),
                number(gap.get("positive"), 4),
                number(gap.get("negative"), 4),
                number(whole["ess"]),
                number(whole["explained_variance"], 2),
                number(whole["grad_norm"], 2),
            ]
        else:
            cells += ["–"] * (len(head) - 1 - len(cells))
        lines.append(f"| {method} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def bounds_table(rows: dict[str, dict[str, Any]], methods: Sequence[str], bounds: Sequence[int]) -> str:
    """One line a method: final reward, collapses and masked share over all tasks, as the weights get older."""
    lines = ["| method | " + " | ".join(f"bound {b}: final, collapsed, masked" for b in bounds) + " |", "|" + "---|" * (len(bounds) + 1)]
    for method in methods:
        cells = []
        for bound in bounds:
            row = rows.get(f"{method}-all-{bound}")
            cells.append(
                f"{row['final']:.3f} ± {row['final_high'] - row['final']:.3f}, {row['collapsed']}/{row['runs'] - row['censored']}, "
                f"{number(_sum(row['masked_low'], row['masked_high']), 4)}"
                if row
                else "not run"
            )
        lines.append(f"| {method} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _sum(low: float | None, high: float | None) -> float | None:
    return None if low is None or high is None else low + high


def tests_table(tests: dict[str, dict[str, Any]]) -> str:
    lines = ["| sao minus | mean difference (95 %) | p | smallest effect found in 80 % |", "|---|---|---|---|"]
    lines += [
        f"| {name} | {t['mean']:+.3f} ({t['low']:+.3f} to {t['high']:+.3f}) | {t['p']:.4f} | {t['detectable']:.3f} |" for name, t in tests.items()
    ]
    return "\n".join(lines)


def figure(curves: dict[str, dict[str, list[list[float]]]], rollouts: Sequence[float]) -> str:
    """An SVG: one panel a task; each method's mean held-out reward over rollouts, a thin line a seed. curves[task][method] = one curve a seed."""
    width, height, left, top, gap = 300, 210, 40, 34, 26
    panels, names = [], list(dict.fromkeys(name for task in curves.values() for name in task))
    last = max(rollouts) or 1.0
    for index, (task, lines) in enumerate(curves.items()):
        x0 = left + index * (width + gap)
        parts = [f'<text x="{x0}" y="{top - 10}" font-weight="600">{html.escape(task)}</text>']
        for level in (0.0, 0.25, 0.5, 0.75, 1.0):
            y = top + height * (1 - level)
            parts.append(f'<path d="M{x0} {y:.1f}h{width}" stroke="#8884" fill="none"/>')
            if index == 0:
                parts.append(f'<text x="{x0 - 6}" y="{y + 4:.1f}" text-anchor="end">{level:g}</text>')
        for share in (0, 0.5, 1):
            parts.append(f'<text x="{x0 + share * width:.0f}" y="{top + height + 16}" text-anchor="middle">{share * last / 1000:.3g}k</text>')
        for name, seeds in lines.items():
            color = COLORS[names.index(name) % len(COLORS)]
            mean = [sum(values) / len(values) for values in zip(*seeds, strict=True)]
            for curve, thick, opacity in [*((seed, 0.7, 0.25) for seed in seeds), (mean, 2.0, 1.0)]:
                points = " ".join(f"{x0 + width * r / last:.1f},{top + height * (1 - v):.1f}" for r, v in zip(rollouts, curve, strict=True))
                parts.append(f'<polyline points="{points}" fill="none" stroke="{color}" stroke-width="{thick}" opacity="{opacity}"/>')
        panels.append("".join(parts))
    legend = "".join(
        f'<rect x="{left + 130 * i}" y="{top + height + 28}" width="12" height="4" fill="{COLORS[i % len(COLORS)]}"/>'
        f'<text x="{left + 130 * i + 18}" y="{top + height + 34}">{html.escape(name)}</text>'
        for i, name in enumerate(names)
    )
    total = left + len(curves) * (width + gap)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {max(total, left + 130 * len(names))} {top + height + 46}" '
        f'font-family="sans-serif" font-size="11" fill="#555" role="img" aria-label="held-out reward over rollouts">{"".join(panels)}{legend}</svg>\n'
    )
