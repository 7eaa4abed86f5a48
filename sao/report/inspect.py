"""`sao inspect`: a run's trajectories in the terminal, and one of them token by token with what training made of each."""

from __future__ import annotations

import json
import math
import sys
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from sao.errors import UserError
from sao.learner.protocol import DROPPED, FROZEN, MASK_REASONS, NON_FINITE, REJECTED_HIGH, REJECTED_LOW, TRAINED
from sao.report.rundata import RunData, load_run_settings
from sao.report.samples import roles
from sao.report.store import StoredEpisode, read_columns, read_trajectories, stored_steps
from sao.report.tokens import TokenText, tokenizer_candidates

_STYLES = {
    TRAINED: "black on #9fd8cb",
    REJECTED_LOW: "black on #eeb27e",
    REJECTED_HIGH: "black on #ec9aa0",
    NON_FINITE: "black on #c9c9c9",
    DROPPED: "black on #c9c9c9",
    FROZEN: "black on #d7dcc0",
}

PIPED_WIDTH = 160  # columns where no terminal says how many there are


def main(
    run_dir: Path | str, step: int | None = None, episode: int | None = None, console: Console | None = None, *, attempt: int | None = None
) -> None:
    """Print the trajectories of a step (the last by default), or one episode (an ordinal; any attempt of it by default) token by token.

    Raises UserError when the run stored no trajectories, or not that step or episode.
    """
    run_dir, console = Path(run_dir), console if console is not None else Console(width=None if sys.stdout.isatty() else PIPED_WIDTH)
    steps = stored_steps(run_dir)
    if not steps:
        raise UserError(f"{run_dir} holds no stored trajectories; train with logger.trajectories=all")
    if step is not None and step not in steps:
        raise UserError(f"--step {step} is not stored in {run_dir}; it has steps {steps[0]} to {steps[-1]}")
    if episode is None:
        at = steps[-1] if step is None else step
        console.print(_overview(run_dir, at, steps))
        console.print(Text(f"one of them token by token: sao inspect {run_dir} --episode ORDINAL", style="dim"), soft_wrap=True)
        return
    found = read_trajectories(run_dir, [_step_of(run_dir, episode)] if step is None else [step], episode)
    if not found:
        raise UserError(f"--episode {episode} was not trained in step {step}; leave --step out to look in all steps")
    attempts = [stored.trajectory.episode_id.attempt for stored in found]
    if attempt is not None and attempt not in attempts:
        raise UserError(f"--episode {episode}.{attempt} was not trained; its attempt {attempts[-1]} was: --episode {episode}.{attempts[-1]}")
    found = [stored for stored in found if attempt in (None, stored.trajectory.episode_id.attempt)]
    run = load_run_settings(run_dir)
    for stored in found:
        _show(console, stored, run)


def _step_of(run_dir: Path, episode: int) -> int:
    table = read_columns(run_dir, columns=["step", "episode_ordinal"])
    for at, ordinal in zip(reversed(table["step"].to_pylist()), reversed(table["episode_ordinal"].to_pylist()), strict=True):
        if ordinal == episode:
            return int(at)
    raise UserError(f"--episode {episode} is not among the trained trajectories of {run_dir}")


def _overview(run_dir: Path, step: int, steps: list[int]) -> Table:
    columns = read_columns(run_dir, [step])
    names = columns.column_names
    rows = [dict(zip(names, row, strict=True)) for row in zip(*(columns[name].to_pylist() for name in names), strict=True)]
    rewards = [row["reward"] for row in rows if row["segment"] <= 0]
    title = f"step {step} of {steps[0]}..{steps[-1]}: {len(rewards)} trajectories, mean reward {np.mean(rewards):.3f}"
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, title_style="bold")
    for heading in ("episode", "reward", "finish", "turns", "sampled", "tokens", "versions", "stale", "environment", "task"):
        table.add_column(heading, justify="left" if heading in ("finish", "environment", "task") else "right")
    for _, group in groupby(rows, key=lambda row: (row["episode_ordinal"], row["attempt"])):
        parts = list(group)
        row = parts[0]
        span = f"{row['oldest_version']}" if row["oldest_version"] == row["newest_version"] else f"{row['oldest_version']}-{row['newest_version']}"
        table.add_row(
            f"{row['episode_ordinal']}.{row['attempt']}",
            Text(f"{row['reward']:.3g}", style="green" if row["reward"] > 0 else "red"),
            f"{row['finish']} {row['finish_detail']}".strip() + (f" ({len(parts)} segments)" if len(parts) > 1 else ""),
            str(row["turns"]),
            str(sum(part["action_tokens"] for part in parts)),
            str(sum(part["tokens"] for part in parts)),
            span,
            str(row["staleness"]),
            row["environment"],
            row["task_id"],
        )
    return table


def _show(console: Console, stored: StoredEpisode, run: RunData) -> None:
    t = stored.trajectory
    text = TokenText.find(tokenizer_candidates(run.run_dir, run.config, run.command))
    console.rule(f"episode {t.episode_id} · step {stored.step} · reward {t.reward:.3g} · {t.finish}", style="cyan")
    facts = f"{t.environment}, task {t.task_id}; admitted at version {t.admitted_version}, trained at {stored.trained_at_version}, staleness {stored.staleness}"
    console.print(Text(facts, style="dim"))
    if not text.known:
        console.print(Text("the run's tokenizer was not found; token ids are shown", style="yellow"))
    for index, segment in enumerate(t.segments):
        if len(t.segments) > 1:
            console.print(Text(f"\nsegment {index}", style="bold"))
        pieces = text.pieces(segment.token_ids.tolist())
        role, record = roles(segment.action_mask, segment.versions), stored.records[index]
        reason = record.mask_reason if record is not None else np.where(segment.action_mask, TRAINED, 0)
        whole = Text()
        for at, piece in enumerate(pieces):
            style = "dim" if role[at] == "prompt" else "blue" if role[at] == "observation" else _STYLES.get(int(reason[at]), "black on #c9c9c9")
            whole.append(piece.replace("\n", "↵\n"), style)
        console.print(whole)
        console.print()
        console.print(_token_table(stored, index, pieces, role, reason))
    if t.info:
        console.print(Text(f"info     {json.dumps(dict(t.info), ensure_ascii=False, default=str)}", style="dim"))
    if t.metrics:
        console.print(Text(f"metrics  {json.dumps(dict(t.metrics))}", style="dim"))


def _token_table(stored: StoredEpisode, index: int, pieces: list[str], role: Any, reason: Any) -> Table:
    """A row per sampled token; runs of other tokens are one row."""
    segment, record = stored.trajectory.segments[index], stored.records[index]
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for heading in ("position", "token", "id", "version", "engine", "trainer", "ratio", "value", "advantage", "return", "mask"):
        table.add_column(heading, justify="left" if heading in ("token", "mask") else "right", no_wrap=True)
    for kind, group in groupby(range(len(segment)), key=lambda at: str(role[at])):
        positions = list(group)
        if kind != "policy":
            words = repr("".join(pieces[at] for at in positions))[1:-1]
            shown = words if len(words) <= 30 else f"{words[:14]} … {words[-13:]}"
            span = f"{positions[0]}-{positions[-1]}" if len(positions) > 1 else str(positions[0])
            table.add_row(span, Text(shown), *[""] * 8, kind, style="dim")
            continue
        for at in positions:
            numbers = [segment.logprobs[at], *([math.nan] * 5)]
            if record is not None:
                ratio = np.exp(record.trainer_logprobs[at] - segment.logprobs[at])
                numbers = [segment.logprobs[at], record.trainer_logprobs[at], ratio, record.values[at], record.advantages[at], record.returns[at]]
            name = MASK_REASONS[int(reason[at])].replace("_", " ") if record is not None else "no record"
            cells = ["" if not math.isfinite(v) else f"{v:.4f}" for v in numbers]
            style = _STYLES.get(int(reason[at]), "") if int(reason[at]) in (REJECTED_LOW, REJECTED_HIGH) else ""
            token = Text().append(repr(pieces[at])[1:-1] or "·", style)
            table.add_row(str(at), token, str(segment.token_ids[at]), str(segment.versions[at]), *cells, name)
    return table
