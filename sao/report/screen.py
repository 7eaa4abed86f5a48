"""The rich screen: reward curve, health of the asynchronous loop, time left."""

from __future__ import annotations

import threading
import time
from collections import deque
from typing import Any

from rich import box
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from sao.report.curve import braille_curve, smooth, value_range
from sao.report.live import DONE, Track, clock_text, dropped_text, guarded_text
from sao.report.trust import Verdict

_REDRAWS_PER_S = 2.0
_LOG_LINES = 3
_MARGIN = 6  # columns left of the curve for its axis


class RichProgress:
    """Draws in place on its own thread, at most twice a second; the last frame stays on the terminal after `close`."""

    def __init__(
        self, total_steps: int, *, run: str = "", model: str = "", environment: str = "", folder: str = "", console: Console | None = None
    ) -> None:
        self._console = console if console is not None else Console()
        self._track = Track(total_steps)
        self._names = (run, model, environment)
        self._folder = folder
        self._lock = threading.Lock()
        self._phase = "starting"
        self._phase_began = time.monotonic()
        self._logs: deque[str] = deque(maxlen=_LOG_LINES)
        self._spinner = Spinner("dots", style="cyan")
        self._closed = False
        self._live = Live(
            console=self._console, get_renderable=self.frame, refresh_per_second=_REDRAWS_PER_S, transient=False, vertical_overflow="crop"
        )
        self._live.start()

    def phase(self, text: str) -> None:
        with self._lock:
            self._phase = text
            self._phase_began = time.monotonic()

    def log(self, text: str) -> None:
        with self._lock:
            self._logs.extend(text.splitlines())

    def update(self, **changes: Any) -> None:
        with self._lock:
            self._track.update(changes)

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._live.stop()

    def frame(self) -> RenderableType:
        """The whole screen as one renderable, fitted to the terminal."""
        with self._lock:
            width, height = self._console.width, self._console.height
            inner = max(40, min(width, 140) - 4)
            columns = 3 if inner >= 96 else 2
            stats = self._stats(columns)
            curve_rows = max(3, min(13, height - 12 // columns - _LOG_LINES - 11)) | 1  # odd, so that one row is the middle
            body: list[RenderableType] = [*self._curve(inner, curve_rows), Text(), stats, self._dropped(), Text(), self._bar(inner)]
            if self._folder:
                body.append(Text(no_wrap=True, overflow="ellipsis").append(f"{'run folder':<14}", "dim").append(self._folder))
            if self._logs:
                body += [Text(line, style="dim", no_wrap=True, overflow="ellipsis") for line in self._logs]
            return Panel(
                Group(*body),
                title=self._title(),
                title_align="left",
                subtitle=self._status(),
                subtitle_align="left",
                box=box.ROUNDED,
                border_style="bright_black",
                width=inner + 4,
                padding=(0, 1),
            )

    def _title(self) -> Text:
        run, model, environment = self._names
        title = Text().append(" SAO ", "bold reverse cyan")
        if run:
            title.append(f" {run}", "bold")
        rest = " on ".join(part for part in (model, environment) if part)
        return title.append(f"  {rest} " if rest else " ")

    def _status(self) -> Text:
        text = Text(" ")
        if self._closed:
            passed = f" {clock_text(self._track.elapsed_s())} "
            if self._phase == DONE:
                return text.append("●", "green").append(f" {DONE}", "bold").append(passed, "dim")
            return text.append("■", "yellow").append(f" ended while: {self._phase}", "bold").append(passed, "dim")
        frame = self._spinner.render(time.monotonic())
        text.append_text(frame if isinstance(frame, Text) else Text("●", style="green"))
        text.append(f" {self._phase} ", style="bold")
        return text.append(f"{clock_text(time.monotonic() - self._phase_began)} ", style="dim")

    def _curve(self, inner: int, rows: int) -> list[Text]:
        points = [(float(step), reward) for step, reward in self._track.rewards]
        values = [reward for _, reward in points]
        low, high = value_range(values)
        end = float(max(self._track.total_steps, points[-1][0] if points else 1.0, 2.0))
        width = inner - _MARGIN - 1
        head = Text().append("reward", "bold")
        if values:
            head.append(f"  {smooth(values)[-1]:.3f}", style="bold green").append(f"  moving average; last step {values[-1]:.3f}", style="dim")
        else:
            head.append("  the curve begins with the first training step", style="dim")
        state = self._track.state
        if state.accuracy_before is not None:
            head.append("   held out ", style="dim").append(f"{state.accuracy_before:.3f}", style="bold")
            if state.accuracy_after is not None:
                head.append(" → ", style="dim").append(f"{state.accuracy_after:.3f}", style="bold green")
        lines = [head]
        drawn = braille_curve(points, width, rows, (1.0, end), (low, high))
        for index, row in enumerate(drawn):
            share = 1 - index / max(1, rows - 1)
            labelled = index in (0, rows - 1) or (index == rows // 2)
            label = f"{low + (high - low) * share:5.2f}" if labelled else " " * 5
            lines.append(Text().append(label, "dim").append(" ┤" if labelled else " │", style="bright_black").append_text(row))
        axis = Text(" " * _MARGIN + "╰" + "─" * width, style="bright_black")
        last = f"step {end:.0f}"
        ticks = Text(" " * (_MARGIN + 1) + "1" + last.rjust(width - 1), style="dim")
        return [*lines, axis, ticks]

    def _stats(self, columns: int) -> Table:
        s = self._track.state
        bound = f" of {s.staleness_bound} allowed" if s.staleness_bound is not None else ""
        over = s.staleness_bound is not None and s.staleness_max is not None and s.staleness_max > s.staleness_bound
        cells: list[tuple[str, Text]] = [
            ("generated", _number(s.tokens_per_s, ",.0f", unit=" tok/s")),
            ("staleness", _number(s.staleness_mean, ".2f", unit=" mean")),
            ("published", Text().append(f"{s.publications}×", "bold").append(f"  version {s.version}", style="dim")),
            ("engines idle", _idle(s.engine_idle)),
            ("staleness max", _number(s.staleness_max, "d", "bold red" if over else "bold", bound)),
            ("canary gap", _number(s.canary_gap, ".1e", unit=" log-prob")),
            ("learner idle", _idle(s.learner_idle)),
            ("in flight", Text().append(f"{s.in_flight}", "bold").append(" episodes", style="dim")),
            ("buffered", Text().append(f"{s.buffered}", "bold").append(" episodes", style="dim")),
            ("response", _number(s.response_length, ",.1f", unit=" tokens")),
            ("entropy", _number(s.entropy, ".3f", unit=" nats")),
            ("critic", _critic(s.critic)),
        ]
        table = Table.grid(expand=True, padding=(0, 2, 0, 0))
        for _ in range(columns):
            table.add_column(ratio=1, no_wrap=True, overflow="ellipsis")
        rendered = [Text().append(f"{name:<14}", "dim").append_text(value) for name, value in cells]
        for start in range(0, len(rendered), columns):
            table.add_row(*rendered[start : start + columns])
        return table

    def _dropped(self) -> Text:
        dropped = self._track.state.dropped
        text = Text(no_wrap=True, overflow="ellipsis").append(f"{'dropped':<14}", "dim")
        text.append(dropped_text(dropped), "bold yellow" if any(dropped.values()) else "bold")
        guarded = guarded_text(self._track.state)
        return text.append("    versions ", "dim").append(guarded, "bold yellow") if guarded else text

    def _bar(self, inner: int) -> Text:
        s, total = self._track.state, max(1, self._track.total_steps)
        left = self._track.left_s()
        head = f"step {s.step}/{total}  "
        tail = f"  {s.step / total:.0%}   {clock_text(self._track.elapsed_s())} passed" + (f"   {clock_text(left)} left" if left is not None else "")
        width = max(10, inner - len(head) - len(tail))
        full = round(width * min(1.0, s.step / total))
        return Text().append(head, "bold").append("━" * full, style="cyan").append("━" * (width - full), style="bright_black").append(tail)


def _number(value: float | None, spec: str, style: str = "bold", unit: str = "") -> Text:
    return Text().append("–", "dim") if value is None else Text().append(format(value, spec), style).append(unit, "dim")


def _critic(verdict: Verdict | None) -> Text:
    if verdict is None:
        return Text("–", style="dim")
    explained = Text("–" if verdict.explained is None else f"{verdict.explained:.0%}", style="bold")
    return explained.append(" explained", "dim") if verdict.trusted else explained.append(" not trusted yet", "yellow")


def _idle(share: float | None) -> Text:
    if share is None:
        return Text("–", style="dim")
    share = min(1.0, max(0.0, share))
    full = round(8 * share)
    return (
        Text("▮" * full, style="yellow" if share > 0.4 else "green")
        .append("▮" * (8 - full), style="bright_black")
        .append(f" {share:.0%}", style="bold")
    )
