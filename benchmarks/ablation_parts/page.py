"""The tables and the figure of docs/concepts/ablation.md, from the JSON of the ablation alone. Text outside the markers is left as it stands."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure

BEGIN, END = "<!-- {name}: python benchmarks/ablation.py --report -->", "<!-- end of {name} -->"


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
    """One line a method: final reward, collapses, masked shares by sign and effective sample size over all tasks, as the weights get older."""
    lines = [
        "| method | " + " | ".join(f"bound {b}: final; collapsed; masked A>0, A<0; ESS" for b in bounds) + " |",
        "|" + "---|" * (len(bounds) + 1),
    ]
    for method in methods:
        cells = []
        for bound in bounds:
            row = rows.get(f"{method}-all-{bound}")
            if not row:
                cells.append("not run")
                continue
            gap = row["masked_by_gap"].get(str(bound), {})
            masked = f"{number(gap.get('positive'), 4)}, {number(gap.get('negative'), 4)}"
            collapsed = f"{row['collapsed']}/{row['runs'] - row['censored']}"
            cells.append(f"{row['final']:.3f} ± {row['final_high'] - row['final']:.3f}; {collapsed}; {masked}; {number(row['ess'])}")
        lines.append(f"| {method} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def sweep_table(tuning: dict[str, Any], methods: Sequence[str], tasks: Sequence[str]) -> str:
    """One line a method: mean final reward and collapses over all tasks at each rate of the sweep, and the rate that was chosen on each task."""
    lines = ["| method | " + " | ".join(f"{rate:g}: final; collapsed" for rate in tuning["rates"]) + " | chosen (" + ", ".join(tasks) + ") |"]
    lines.append("|" + "---|" * (len(tuning["rates"]) + 2))
    for method in methods:
        cells = []
        for rate in tuning["rates"]:
            found = [(final, kind) for name, _, lr, _, final, kind in tuning["runs"] if name == method and lr == rate]
            cells.append(
                f"{np.mean([final for final, _ in found]):.3f}; {sum(kind == 'collapsed' for _, kind in found)}/{len(found)}" if found else "–"
            )
        chosen = ", ".join(f"{tuning['chosen'][f'{method}-{task}']:g}" if f"{method}-{task}" in tuning["chosen"] else "–" for task in tasks)
        lines.append(f"| {method} | " + " | ".join(cells) + f" | {chosen} |")
    return "\n".join(lines)


def tests_table(tests: dict[str, dict[str, Any]]) -> str:
    lines = ["| sao minus | mean difference (95 %) | p | smallest effect found in 80 % |", "|---|---|---|---|"]
    lines += [
        f"| {name} | {t['mean']:+.3f} ({t['low']:+.3f} to {t['high']:+.3f}) | {_p(t['p'])} | {t['detectable']:.3f} |" for name, t in tests.items()
    ]
    return "\n".join(lines)


def _p(value: float) -> str:
    return "< 0.0001" if value < 1e-4 else f"{value:.4f}"


def figure(curves: dict[str, dict[str, list[list[float]]]], rollouts: Sequence[float]) -> Figure:
    """One panel a task; each method's mean held-out reward over rollouts, a thin line a seed. curves[task][method] = one curve a seed."""
    drawn = Figure(figsize=(3.4 * len(curves) + 1.6, 3.2), layout="constrained")
    panels = drawn.subplots(1, len(curves), sharey=True, squeeze=False)[0]
    names = list(dict.fromkeys(name for task in curves.values() for name in task))
    for axes, (task, lines) in zip(panels, curves.items(), strict=True):
        axes.set_title(task)
        axes.set_xlabel("rollouts")
        axes.set_ylim(0, 1)
        for name, seeds in lines.items():
            color = f"C{names.index(name)}"
            for seed in seeds:
                axes.plot(rollouts, seed, color=color, linewidth=0.6, alpha=0.3)
            axes.plot(rollouts, np.mean(seeds, axis=0), color=color, linewidth=1.8, label=name, zorder=3 if name == names[0] else 2)
    panels[0].set_ylabel("held-out reward")
    handles, labels = panels[0].get_legend_handles_labels()
    drawn.legend(handles, labels, loc="outside right center", fontsize=8)
    return drawn
