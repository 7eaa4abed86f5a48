"""Charts as HTML with inline SVG: no library, no network.

The SVG holds only shapes in a 0..1000 square stretched to the figure, with strokes that do not stretch; labels are HTML beside it. So a
chart is sharp at every width. Each chart carries its numbers as JSON for the hover of report.js.
"""

from __future__ import annotations

import html
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

BOX = 1000.0
MAX_POINTS = 700


@dataclass(frozen=True)
class Series:
    """One quantity. color is a CSS variable name without dashes (`c1`). style: line, faint (under a smoothed line), dots, area (filled to 0)."""

    name: str
    x: Sequence[float]
    y: Sequence[float]
    color: str = "c1"
    style: Literal["line", "faint", "dots", "area", "stack"] = "line"
    digits: str = ".3g"
    low: Sequence[float] = ()
    high: Sequence[float] = ()


def ticks(low: float, high: float, count: int = 4) -> list[float]:
    """Round numbers inside [low, high], about `count` of them."""
    if not high > low:
        return [low]
    raw = (high - low) / count
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(power * m for m in (1, 2, 2.5, 5, 10) if power * m >= raw * 0.999)
    first = math.ceil(low / step - 1e-9)
    return [i * step for i in range(first, math.floor(high / step + 1e-9) + 1)]


def log_ticks(low: float, high: float) -> list[float]:
    """Powers of ten inside [low, high], at most six."""
    first, last = math.ceil(math.log10(low) - 1e-9), math.floor(math.log10(high) + 1e-9)
    stride = max(1, math.ceil((last - first + 1) / 6))
    return [10.0**i for i in range(first, last + 1, stride)]


def short(value: float) -> str:
    """A label of a few characters: 0.25, 12.5k, 3e-6."""
    size = abs(value)
    if size >= 1e6:
        return f"{value / 1e6:.3g}M"
    if size >= 1e4:
        return f"{value / 1e3:.3g}k"
    if 0 < size < 1e-3:
        return f"{value:.0e}".replace("e-0", "e-")
    return f"{value:.4g}"


def line_chart(
    title: str,
    series: Sequence[Series],
    *,
    x_label: str = "step",
    note: str = "",
    y_range: tuple[float | None, float | None] = (None, None),
    log: bool = False,
    height: int = 190,
    wide: bool = False,
    rule: tuple[float, str] | None = None,
    shade: Sequence[tuple[float, float]] = (),
    marks: Sequence[tuple[float, str]] = (),
) -> str:
    """A chart of one or more series. `rule` is a labelled horizontal line, `marks` are labelled vertical ones, `shade` stretches of x on a warning ground.

    Empty series are left out; without any the figure says so.
    """
    stacked = _stack([_thin(s) for s in series if s.style == "stack" and len(s.x)])
    shown = [_thin(s) for s in series if s.style != "stack" and len(s.x)] + stacked
    if log:
        shown = [_positive(s) for s in shown]
        shown = [s for s in shown if len(s.x)]
    if not shown:
        return empty_figure(title, "no data: nothing was recorded for it", wide)
    xs = [x for s in shown for x in s.x]
    ys = [y for s in shown for y in (*s.y, *s.low, *s.high)] + ([rule[0]] if rule else [])
    if stacked or any(s.style == "area" for s in shown):
        ys.append(0.0)
    x0, x1 = min(xs), max(xs)
    if x1 <= x0:
        x0, x1 = x0 - 0.5, x1 + 0.5
    y0, y1 = _range(min(ys), max(ys), y_range, log)

    def px(x: float) -> float:
        return (x - x0) / (x1 - x0) * BOX

    def py(y: float) -> float:
        share = math.log(y / y0) / math.log(y1 / y0) if log else (y - y0) / (y1 - y0)
        return BOX * (1 - share)

    levels = log_ticks(y0, y1) if log else ticks(y0, y1)
    shapes = [_shade(px, max(x0, a - 0.5), min(x1, b + 0.5)) for a, b in shade]
    shapes += [f'<path class="grid" d="M0 {py(y):.1f}H{BOX:.0f}"/>' for y in levels]
    shapes += [f'<path class="rule" d="M{px(x):.1f} 0V{BOX:.0f}"/>' for x, _ in marks]
    if rule:
        shapes.append(f'<path class="rule" d="M0 {py(rule[0]):.1f}H{BOX:.0f}"/>')
    for s in [s for s in shown if s.style == "stack"] + [s for s in shown if s.style != "stack"]:
        shapes.append(_shape(s, px, py))
    labels = [f'<span class="yl" style="top:{py(y) / 10:.2f}%">{short(y)}</span>' for y in levels]
    labels += [f'<span class="ml" style="left:{px(x) / 10:.2f}%">{html.escape(text)}</span>' for x, text in marks]
    labels += [f'<span class="xl" style="left:{px(x) / 10:.2f}%">{short(x)}</span>' for x in ticks(x0, x1, 8 if wide else 5)]
    if rule:
        labels.append(f'<span class="rl" style="top:{py(rule[0]) / 10:.2f}%">{html.escape(rule[1])}</span>')
    data: dict[str, object] = {
        "x0": x0, "x1": x1, "y0": y0, "y1": y1, "log": log, "xl": x_label,
        "s": [{"n": s.name, "c": s.color, "x": _round(s.x), "y": _round(s.y), "v": [format(v, s.digits) for v in _own(s, stacked)]} for s in shown],
    }  # fmt: skip
    return _figure(title, note, _legend(shown), shapes, labels, data, height, wide, x_label)


def _shade(px: Callable[[float], float], begin: float, end: float) -> str:
    return f'<rect class="shade" x="{px(begin):.1f}" y="0" width="{px(end) - px(begin):.1f}" height="{BOX:.0f}"/>'


def bar_chart(
    title: str,
    names: Sequence[str],
    values: Sequence[float],
    *,
    x_label: str,
    colors: Sequence[str] = (),
    note: str = "",
    unit: str = "",
    height: int = 190,
    wide: bool = False,
    log: bool = False,
) -> str:
    """Vertical bars with their values on top; `names` are the labels below, `unit` follows the value on hover."""
    if not values or (log and not any(v > 0 for v in values)):
        return empty_figure(title, "no data: nothing was recorded for it", wide)
    high = max(values) * (3 if log else 1.12) or 1.0
    low = min(v for v in values if v > 0) / 3 if log else 0.0

    def py(v: float) -> float:
        if log:
            return BOX * (1 - math.log(max(v, low) / low) / math.log(high / low))
        return BOX * (1 - v / high)

    pitch = BOX / len(values)
    shapes = [f'<path class="grid" d="M0 {py(y):.1f}H{BOX:.0f}"/>' for y in (log_ticks(low, high) if log else ticks(0, high))]
    labels = [f'<span class="yl" style="top:{py(y) / 10:.2f}%">{short(y)}</span>' for y in (log_ticks(low, high) if log else ticks(0, high))]
    stride = max(1, math.ceil(len(values) / 16))
    for i, (name, value) in enumerate(zip(names, values, strict=True)):
        color = colors[i] if colors else "c1"
        top = py(value)
        shapes.append(
            f'<rect class="bar" fill="var(--{color})" x="{(i + 0.14) * pitch:.1f}" y="{top:.1f}" width="{pitch * 0.72:.1f}" height="{BOX - top:.1f}"/>'
        )
        if i % stride == 0:
            labels.append(f'<span class="xl" style="left:{(i + 0.5) * pitch / 10:.2f}%">{html.escape(name)}</span>')
        if len(values) <= 16:
            labels.append(f'<span class="bl" style="left:{(i + 0.5) * pitch / 10:.2f}%;top:{top / 10:.2f}%">{_bar_label(value)}</span>')
    data: dict[str, object] = {
        "bars": [
            {"n": f"{x_label} {n}", "v": f"{short(v)} {unit}".strip(), "c": colors[i] if colors else "c1"}
            for i, (n, v) in enumerate(zip(names, values, strict=True))
        ]
    }
    return _figure(title, note, "", shapes, labels, data, height, wide, x_label)


def empty_figure(title: str, why: str, wide: bool = False) -> str:
    return f'<figure class="plot{" wide" if wide else ""}"><figcaption><b>{html.escape(title)}</b></figcaption><p class="missing">{html.escape(why)}</p></figure>'


def sparkline(values: Sequence[float]) -> str:
    """A line the size of a word."""
    values = [v for v in values if math.isfinite(v)]
    if len(values) < 2:
        return ""
    stride = max(1, len(values) // 80)
    kept = values[::stride]
    low, high = min(kept), max(kept)
    span = high - low or 1.0
    path = " ".join(f"{i / (len(kept) - 1) * BOX:.0f},{BOX * (0.95 - 0.9 * (v - low) / span):.0f}" for i, v in enumerate(kept))
    return f'<svg class="spark" viewBox="0 0 1000 1000" preserveAspectRatio="none"><polyline points="{path}"/></svg>'


def interval(rows: Sequence[tuple[str, float, float, float, str]]) -> str:
    """Means with their intervals on a common 0..1 track: (label, mean, low, high, colour)."""
    parts = []
    for label, mean, low, high, color in rows:
        low, mean, high = (min(1.0, max(0.0, v)) * 100 for v in (low, mean, high))
        said = html.escape(f"{label}: {mean:.1f} % ({low:.1f} to {high:.1f})")
        parts.append(
            f'<div class="ci" title="{said}"><i style="left:{low:.1f}%;width:{max(0.6, high - low):.1f}%;background:var(--{color})"></i>'
            f'<b style="left:{mean:.1f}%;background:var(--{color})"></b></div>'
        )
    return f'<div class="cis">{"".join(parts)}<div class="scale"><span>0</span><span>0.5</span><span>1</span></div></div>'


def _shape(s: Series, px: object, py: object) -> str:
    points = [(px(x), py(y)) for x, y in zip(s.x, s.y, strict=True)]  # type: ignore[operator]
    color = f"var(--{s.color})"
    if s.style == "dots":
        whiskers = "".join(f"M{x:.1f} {py(a):.1f}V{py(b):.1f}" for (x, _), a, b in zip(points, s.low, s.high, strict=False))  # type: ignore[operator]
        dots = "".join(f"M{x:.1f} {y:.1f}h.01" for x, y in points)
        return (
            f'<path class="whisker" stroke="{color}" d="{whiskers}"/><path class="halo" d="{dots}"/><path class="dot" stroke="{color}" d="{dots}"/>'
        )
    path = "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in points)
    if s.style == "faint":
        return f'<path class="faint" stroke="{color}" d="{path}"/>'
    if s.style == "stack":
        back = "L".join(f"{px(x):.1f} {py(y):.1f}" for x, y in reversed(list(zip(s.x, s.low, strict=True))))  # type: ignore[operator]
        return f'<path class="stack" fill="{color}" d="{path}L{back}Z"/>'
    fill = f'<path class="area" fill="{color}" d="{path}L{points[-1][0]:.1f} {BOX:.0f}L{points[0][0]:.1f} {BOX:.0f}Z"/>' if s.style == "area" else ""
    if len(points) == 1:
        return f'<path class="dot" stroke="{color}" d="M{points[0][0]:.1f} {points[0][1]:.1f}h.01"/>'
    return f'{fill}<path class="line" stroke="{color}" d="{path}"/>'


def _stack(layers: list[Series]) -> list[Series]:
    """Layers on top of each other over their common x; `low` is each one's floor."""
    if not layers:
        return []
    values = [dict(zip(s.x, s.y, strict=True)) for s in layers]
    xs = sorted(set().union(*values))
    floor = [0.0] * len(xs)
    out: list[Series] = []
    for layer, value in zip(layers, values, strict=True):
        top = [f + max(0.0, value.get(x, 0.0)) for f, x in zip(floor, xs, strict=True)]
        out.append(Series(layer.name, xs, top, layer.color, "stack", layer.digits, low=floor))
        floor = top
    return out


def _own(s: Series, stacked: Sequence[Series]) -> Sequence[float]:
    return [top - floor for top, floor in zip(s.y, s.low, strict=True)] if s in stacked else s.y


def _thin(s: Series) -> Series:
    """At most MAX_POINTS points, each the mean of its bucket, so that a long run's page stays small."""
    size = math.ceil(len(s.x) / MAX_POINTS)
    if size <= 1:
        return s
    starts = range(0, len(s.x), size)
    means = [[sum(v[i : i + size]) / len(v[i : i + size]) for i in starts] for v in (s.x, s.y)]
    return Series(s.name, means[0], means[1], s.color, s.style, s.digits)


def _positive(s: Series) -> Series:
    pairs = [(x, y) for x, y in zip(s.x, s.y, strict=True) if y > 0]
    return Series(s.name, [x for x, _ in pairs], [y for _, y in pairs], s.color, s.style, s.digits)


def _range(low: float, high: float, wanted: tuple[float | None, float | None], log: bool) -> tuple[float, float]:
    if log:
        return 10 ** math.floor(math.log10(low) - 1e-9), 10 ** math.ceil(math.log10(high) + 1e-9)
    air = (high - low) * 0.06 or abs(high) * 0.1 or 1.0
    low = low if low == 0 else low - air
    high += air
    return (low if wanted[0] is None else min(wanted[0], low + air)), (high if wanted[1] is None else max(wanted[1], high - air))


def _bar_label(value: float) -> str:
    return (
        f"{value:.0f}"
        if value == int(value) and value < 1e4
        else f"{value:.1e}".replace("e-0", "e-")
        if value < 1e-3
        else short(float(f"{value:.3g}"))
    )


def _round(values: Sequence[float]) -> list[float]:
    return [float(f"{v:.5g}") for v in values]


def _legend(shown: Sequence[Series]) -> str:
    keys = [f'<span><i style="background:var(--{s.color})" class="{s.style}"></i>{html.escape(s.name)}</span>' for s in shown]
    return f'<div class="legend">{"".join(keys)}</div>' if len(shown) > 1 else ""


def _figure(
    title: str, note: str, legend: str, shapes: list[str], labels: list[str], data: dict[str, object], height: int, wide: bool, x_label: str
) -> str:
    svg = f'<svg viewBox="0 0 1000 1000" preserveAspectRatio="none" role="img" aria-label="{html.escape(title)}">{"".join(shapes)}</svg>'
    payload = html.escape(json.dumps(data, separators=(",", ":"), allow_nan=False))
    note = f'<span class="note">{html.escape(note)}</span>' if note else ""
    return (
        f'<figure class="plot{" wide" if wide else ""}"><figcaption><b>{html.escape(title)}</b>{note}</figcaption>{legend}'
        f'<div class="axes" style="min-height:{height}px" data-plot="{payload}">{svg}{"".join(labels)}<span class="xn">{html.escape(x_label)}</span></div></figure>'
    )
