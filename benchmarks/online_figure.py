"""The figure of `online.py`: reward, and held-out accuracy by style, against steps; one panel a method, the mean over seeds with its range."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

WIDTH, HEIGHT, LEFT, TOP, GAP = 210, 120, 46, 34, 22
COLORS = {"reward": "#444444", "cute": "#d6457a", "chuunibyou": "#6a4fd0", "classical": "#1f8a5b"}
Curve = list[tuple[float, float, float, float]]  # step, mean, lowest, highest


def draw(runs: Sequence[dict[str, Any]]) -> str:
    """An SVG of two rows: above, the moving average of reward; below, held-out accuracy of each style. Vertical lines are shifts."""
    methods = list(dict.fromkeys(run["method"] for run in runs))
    width, height = LEFT + len(methods) * (WIDTH + GAP) + 10, TOP + 2 * (HEIGHT + GAP) + 40
    parts = [f'<rect width="{width}" height="{height}" fill="#ffffff"/>']
    for column, method in enumerate(methods):
        of = [run for run in runs if run["method"] == method]
        steps = max(len(run["reward_by_step"]) for run in of)
        shifts = [(row["step"], row["after"]) for row in of[0]["shifts"]]
        x = LEFT + column * (WIDTH + GAP)
        parts.append(_text(x + WIDTH / 2, 14, method.replace("_", " "), "middle", 12))
        names = list(dict.fromkeys(name for run in of for name in run["accuracy_by_step"]))
        panels = ({"reward": _rewards(of, steps)}, {name: _accuracy(of, name) for name in names})
        for row, curves in enumerate(panels):
            parts.append(_panel(x, TOP + row * (HEIGHT + GAP), steps, shifts, curves, labelled=column == 0))
    titles = ("reward, mean of 40", "held-out accuracy")
    for row, title in enumerate(titles):
        y = TOP + row * (HEIGHT + GAP) + HEIGHT / 2
        parts.append(f'<g transform="translate(12 {y}) rotate(-90)">{_text(0, 0, title, "middle", 10)}</g>')
    at = LEFT
    for name in ("cute", "chuunibyou", "classical"):
        parts.append(
            f'<rect x="{at}" y="{height - 16}" width="14" height="3" fill="{COLORS[name]}"/>' + _text(at + 19, height - 11, name, "start", 10)
        )
        at += 95
    parts.append(_text(width - 10, height - 11, "training steps; line: mean over seeds, band: lowest to highest", "end", 10))
    return f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif">{"".join(parts)}</svg>\n'


def _rewards(runs: Sequence[dict[str, Any]], steps: int) -> Curve:
    by_step = [[run["reward_by_step"][s] for run in runs if s < len(run["reward_by_step"])] for s in range(steps)]
    return [_spread(step, [v for v in values if v is not None]) for step, values in enumerate(by_step) if any(v is not None for v in values)]


def _accuracy(runs: Sequence[dict[str, Any]], name: str) -> Curve:
    found: dict[int, list[float]] = {}
    for run in runs:
        for step, value in run["accuracy_by_step"].get(name, ()):
            found.setdefault(step, []).append(value)
    return [_spread(step, values) for step, values in sorted(found.items())]


def _spread(step: int, values: Sequence[float]) -> tuple[float, float, float, float]:
    return float(step), statistics.fmean(values), min(values), max(values)


def _panel(x: float, y: float, steps: int, shifts: Sequence[tuple[int, str]], curves: dict[str, Curve], *, labelled: bool) -> str:
    def px(step: float) -> float:
        return x + max(0.0, step) / max(1, steps - 1) * WIDTH

    def py(value: float) -> float:
        return y + (1 - value) * HEIGHT

    parts = [f'<rect x="{x}" y="{y}" width="{WIDTH}" height="{HEIGHT}" fill="none" stroke="#bbbbbb"/>']
    for value in (0.0, 0.5, 1.0):
        parts.append(
            f'<path d="M{x} {py(value):.1f}h{WIDTH}" stroke="#e4e4e4"/>' + (_text(x - 5, py(value) + 3, f"{value:g}", "end", 9) if labelled else "")
        )
    for step, name in shifts:
        parts.append(
            f'<path d="M{px(step):.1f} {y}v{HEIGHT}" stroke="#999999" stroke-dasharray="3 3"/>' + _text(px(step) + 3, y + 9, name, "start", 8)
        )
    for step in range(0, steps, 50):
        parts.append(_text(px(step), y + HEIGHT + 11, str(step), "middle", 8))
    for name, curve in curves.items():
        color = COLORS.get(name, "#444444")
        band = [(s, high) for s, _, _, high in curve] + [(s, low) for s, _, low, _ in reversed(curve)]
        if band:
            parts.append(f'<path d="{_path(band, px, py)}Z" fill="{color}" opacity="0.15"/>')
            parts.append(f'<path d="{_path([(s, mean) for s, mean, _, _ in curve], px, py)}" fill="none" stroke="{color}" stroke-width="1.6"/>')
    return "".join(parts)


def _path(points: Sequence[tuple[float, float]], px: Any, py: Any) -> str:
    return "M" + "L".join(f"{px(step):.1f} {py(value):.1f}" for step, value in points)


def _text(x: float, y: float, text: str, anchor: str, size: int) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-size="{size}" fill="#333333">{text}</text>'
