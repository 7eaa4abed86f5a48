"""The report's section on long episodes: how long they were, which limit ended them, what of their context was cut, summed up or begun anew."""

from __future__ import annotations

import html
from collections import Counter

import numpy as np
from numpy.typing import NDArray

from sao.report.figures import COLORS, grid, metric_lines
from sao.report.plots import Series, bar_chart, line_chart, short
from sao.report.rundata import RunData

MOST_BARS = 16
# How an episode can end, by the finish that is recorded, and the limits that make it end so.
ENDINGS = {
    "terminal": ("the environment said so", ()),
    "truncated: turns": ("out of turns, or cut off by the environment", ("rollout.max_turns",)),
    "truncated: tokens": ("out of tokens", ("rollout.max_tokens", "rollout.context_tokens", "engine.max_model_len", "rollout.max_compactions")),
    "truncated: time": ("out of time", ("rollout.time_limit_s",)),
}
LOST = {"time_limit": "out of time before the first token", "prompt_too_long": "the opening left no room for a token"}


def concerns(run: RunData) -> bool:
    """Whether an episode was more than one turn with an end of its own."""
    if run.episodes:
        return bool((run.episodes["turns"] > 1).any() or (run.episodes["finish"] != "terminal").any())
    return any(value > 1 for value in run.series("rollout/turns_mean")[1]) or any(value > 0 for value in run.series("rollout/truncated_frac")[1])


def section(run: RunData) -> str:
    shown = [
        _distribution(run, "turns", "Turns of an episode", "turns"),
        _distribution(run, "tokens", "Tokens of an episode", "tokens, all segments"),
    ]
    if run.setting("rollout.compaction", "off") != "off" or _any(run, "rollout/compactions") or _any(run, "rollout/segments/forked"):
        shown += [
            _distribution(run, "segments", "Segments of an episode", "one more for each compaction, and for each fork"),
            _counts(run, "Compactions", {"rollout/compactions": "summaries", "rollout/segments/forked": "forks of the template"}, "per trajectory"),
            _counts(run, "Tokens of summaries", {"rollout/summary_tokens": "tokens"}, "sampled and trained, per trajectory"),
        ]
    if _any(run, "rollout/observations"):
        shown.append(_cut(run))
    if blocked := {name: name.removeprefix("rollout/blocked_s/") for name in run.names(r"rollout/blocked_s/.+")}:
        note = "seconds per trajectory in which an environment's code let no other episode of its worker run"
        shown.append(_counts(run, "Event loop held", blocked, note))
    return _endings(run) + grid(*shown)


def endings(run: RunData) -> dict[str, float]:
    """Trained episodes by how they ended; where none are stored, their share by the metrics."""
    if run.episodes:
        return dict(Counter(run.episodes["finish"].tolist()))
    named = {name: name.removeprefix("rollout/finish/").replace("_", ": ", 1) for name in run.names(r"rollout/finish/.+")}
    steps = max(1, len(run.axis("train")))
    return {label: sum(run.series(name)[1]) / steps for name, label in named.items()}


def _endings(run: RunData) -> str:
    counts = endings(run)
    total = sum(counts.values()) or 1.0
    lost = {LOST[reason]: count for reason, count in run.ledger.get("prompts", {}).get("dropped", {}).items() if reason in LOST}
    rows = [
        (
            f"{label}: {ENDINGS[label][0]}" if label in ENDINGS else label,
            counts.get(label, 0),
            f"{counts.get(label, 0) / total:.1%}",
            _limits(run, label),
        )
        for label in dict.fromkeys([*ENDINGS, *counts])
    ]
    rows += [(f"dropped: {why}", count, "", "") for why, count in lost.items()]
    body = "".join(
        f'<tr><td>{html.escape(what)}</td><td class="n">{short(count) if run.episodes or not share else ""}</td><td class="n">{share}</td>'
        f'<td class="mono">{html.escape(limits)}</td></tr>'
        for what, count, share, limits in rows
    )
    head = '<tr><th>how episodes ended</th><th class="n">episodes</th><th class="n">of the trained</th><th>limits</th></tr>'
    return f'<div class="panel"><table class="t">{head}{body}</table></div>'


def _limits(run: RunData, label: str) -> str:
    """The settings that can end an episode so; one that is 0 or belongs to a compaction that is off cannot."""
    keys = ENDINGS[label][1] if label in ENDINGS else ()
    off = run.setting("rollout.compaction", "off") == "off"
    values = {key: run.setting(key) for key in keys if not (off and "compaction" in key)}
    return "  ".join(f"{key}={value}" for key, value in values.items() if value)


def _distribution(run: RunData, name: str, title: str, note: str) -> str:
    if not run.episodes:
        mean = {"turns": "rollout/turns_mean", "tokens": "rollout/total_tokens_mean", "segments": "rollout/segments_mean"}[name]
        return metric_lines(run, title, [(mean, "mean")], note=note, y_range=(0, None))
    width, labels, counts = bins(run.episodes[name])
    note += "; every trained episode" + (f"; a bar spans {width}" if width > 1 else "")
    return bar_chart(title, labels, counts, x_label=name, note=note, unit="episodes")


def bins(values: NDArray[np.integer]) -> tuple[int, list[str], list[float]]:
    """Width, first numbers and counts of at most MOST_BARS ranges of whole numbers."""
    low, high = int(values.min()), int(values.max())
    width = -(-(high - low + 1) // MOST_BARS)
    counts = np.bincount((values - low) // width)
    return width, [str(low + width * index) for index in range(len(counts))], [float(count) for count in counts]


def _counts(run: RunData, title: str, names: dict[str, str], note: str) -> str:
    """Metrics that a step without an occurrence leaves out."""
    rows = run.axis("train")
    x = [float(row["step"]) for row in rows]
    series = [
        Series(label, x, [float(row.get(name, 0.0)) for row in rows], color) for (name, label), color in zip(names.items(), COLORS, strict=False)
    ]
    return line_chart(title, series, note=note, y_range=(0, None))


def _cut(run: RunData) -> str:
    rows = [r for r in run.axis("train") if r.get("rollout/observations")]
    share = [r.get("rollout/observations_cut", 0.0) / r["rollout/observations"] for r in rows]
    keep = run.setting("rollout.observation_keep", "head")
    tokens = f" or {tokens} tokens" if (tokens := run.setting("rollout.observation_tokens")) else ""
    note = f"share of the environments' messages longer than {run.setting('rollout.observation_limit')} characters{tokens}; kept: {keep}"
    return line_chart("Observations cut", [Series("share", [float(r["step"]) for r in rows], share, "c1")], note=note, y_range=(0, None))


def _any(run: RunData, name: str) -> bool:
    return any(run.series(name)[1])
