"""`sao inspect`: a run's trajectories in the terminal, and one of them token by token with what training made of each; what was dropped, and why."""

from __future__ import annotations

import json
import math
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from sao.algorithms.catalogue import DIS
from sao.errors import UserError
from sao.learner.protocol import DROPPED, FROZEN, MASK_REASONS, NON_FINITE, REJECTED_HIGH, REJECTED_LOW, TRAINED, SegmentRecord
from sao.report.dropped import Dropped, read_dropped, read_tokens
from sao.report.rundata import RunData, load_run_settings
from sao.report.store import StoredEpisode, read_columns, read_trajectories, stored_steps
from sao.report.tokens import TokenText, makers, segment_title, tokenizer_candidates
from sao.trajectory import EpisodeId, Segment, Trajectory

_STYLES = {
    TRAINED: "black on #9fd8cb",
    REJECTED_LOW: "black on #eeb27e",
    REJECTED_HIGH: "black on #ec9aa0",
    NON_FINITE: "black on #c9c9c9",
    DROPPED: "black on #c9c9c9",
    FROZEN: "black on #d7dcc0",
}
_CONTEXT_STYLES = {"environment": "blue", "earlier": "magenta"}
_MASKS = {
    NON_FINITE: "out: no finite log-prob",
    DROPPED: "out: episode dropped",
    FROZEN: "out: actor frozen",
}
IN_A_BATCH = {"truncated": "in step {}'s batch but not trained", "rolled_back": "trained in step {}, then undone"}  # losses whose tokens lie there
PIPED_WIDTH = 200  # columns where no terminal says how many there are
SHOWN_LOSSES = 400

Name = tuple[int, int | None]  # an episode's ordinal, and its attempt where one is given


def main(run_dir: Path | str, episode: Name | None = None, *, step: int | None = None, dropped: bool = False, console: Console | None = None) -> None:
    """Print the trajectories of a step (the last by default), one episode token by token, or what was dropped.

    Raises UserError when the run stored no trajectories, or not that step or episode, or when both an episode and what was dropped are asked for.
    """
    if episode is not None and dropped:
        raise UserError("--dropped lists what was lost, and an episode is shown with what became of it; leave one of the two out")
    run_dir, console = Path(run_dir), console if console is not None else Console(width=None if sys.stdout.isatty() else PIPED_WIDTH)
    steps = stored_steps(run_dir)
    if episode is not None:
        _episode(run_dir, episode, step, steps, console)
    elif dropped:
        _losses(run_dir, step, console)
    else:
        at = _step(run_dir, step, steps)
        console.print(_overview(run_dir, at, steps))
        console.print(Text(f"one of them token by token: sao inspect {run_dir} EPISODE; what was lost: --dropped", style="dim"), soft_wrap=True)


def _step(run_dir: Path, step: int | None, steps: list[int]) -> int:
    if not steps:
        raise UserError(f"{run_dir} holds no stored trajectories; train with logger.trajectories=all")
    if step is not None and step not in steps:
        raise UserError(f"--step {step} is not stored in {run_dir}; it has steps {steps[0]} to {steps[-1]}")
    return steps[-1] if step is None else step


# ---------------------------------------------------------------------- lists


def _overview(run_dir: Path, step: int, steps: list[int]) -> Table:
    columns = read_columns(run_dir, [step])
    names = columns.column_names
    rows = [dict(zip(names, row, strict=True)) for row in zip(*(columns[name].to_pylist() for name in names), strict=True)]
    if not rows:
        raise UserError(f"step {step} of {run_dir} is stored without a trajectory; remove its file, or choose another --step")
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


def _losses(run_dir: Path, step: int | None, console: Console) -> None:
    last = {loss.episode_id: loss for loss in read_dropped(run_dir)}  # an attempt that a resume repeated counts once, as in the ledger
    found = [loss for loss in last.values() if step in (None, loss.step)]
    if not found:
        console.print(Text(f"nothing was dropped and no attempt failed{'' if step is None else f' at step {step}'}", style="bold"))
        return
    trained = _trained_ordinals(run_dir)
    for retried, what in ((False, "dropped"), (True, "failed attempts that were retried")):
        reasons = Counter(loss.reason for loss in found if loss.retried == retried)
        if reasons:
            console.print(Text(f"{what}: {', '.join(f'{count} {reason}' for reason, count in reasons.most_common())}", style="bold"))
    table = Table(box=box.SIMPLE_HEAD)
    for heading in ("episode", "reason", "what became of it", "step", "version", "sampled", "environment", "task", "message"):
        table.add_column(heading, justify="right" if heading in ("episode", "step", "version", "sampled") else "left")
    for loss in found[-SHOWN_LOSSES:]:
        numbers = str(loss.step), str(loss.version), str(loss.tokens)
        words = loss.message.splitlines()[0] if loss.message else ""
        table.add_row(str(loss.episode_id), Text(loss.reason, "yellow"), _fate(loss, trained), *numbers, loss.environment, loss.task_id, Text(words))
    console.print(table)
    if len(found) > SHOWN_LOSSES:
        console.print(Text(f"the newest {SHOWN_LOSSES} of {len(found)}; --step narrows them", style="dim"))


def _fate(loss: Dropped, trained: set[int]) -> str:
    """What became of the prompt. A resumed run goes back to before some of its losses and may train their prompts after all."""
    if loss.retried:
        return "tried again"
    if loss.episode_id.ordinal in trained and loss.reason not in IN_A_BATCH:
        return "dropped, but the resumed run trained it"
    return "dropped"


def _trained_ordinals(run_dir: Path) -> set[int]:
    return set(read_columns(run_dir, columns=["episode_ordinal"])["episode_ordinal"].to_pylist())


# ---------------------------------------------------------------------- one episode


def _episode(run_dir: Path, name: Name, step: int | None, steps: list[int], console: Console) -> None:
    ordinal, attempt = name
    shown = str(ordinal) if attempt is None else f"{ordinal}.{attempt}"
    losses = [loss for loss in read_dropped(run_dir) if loss.episode_id.ordinal == ordinal and step in (None, loss.step)]
    if not losses:
        _step(run_dir, step, steps)
    at = [step] if step in steps else _steps_of(run_dir, ordinal) if step is None else []
    trained = read_trajectories(run_dir, at, ordinal) if at else []
    if not losses and not trained:
        where = (
            f"step {step}; leave --step out to look in all steps"
            if step is not None
            else f"{run_dir}: it was never submitted, or still ran at the end"
        )
        raise UserError(f"episode {shown} is neither among the trained nor among the dropped trajectories of {where}")
    attempts = sorted({*(loss.episode_id.attempt for loss in losses), *(stored.trajectory.episode_id.attempt for stored in trained)})
    if attempt is not None and attempt not in attempts:
        there = " and ".join(f"{ordinal}.{number}" for number in attempts)
        raise UserError(f"episode {shown} does not exist in {run_dir}; of {ordinal} there is {there}")
    run = load_run_settings(run_dir)
    view = _View(console, run)
    cut = {loss.episode_id: loss for loss in losses if loss.reason in IN_A_BATCH}
    for loss in losses:
        if attempt in (None, loss.episode_id.attempt) and not (loss.reason in IN_A_BATCH and trained):
            view.loss(loss, read_tokens(run_dir, loss), retrained=bool(trained))
    for stored in trained:
        if attempt in (None, stored.trajectory.episode_id.attempt):
            view.trained(stored, cut.get(stored.trajectory.episode_id))


def _steps_of(run_dir: Path, episode: int) -> list[int]:
    """The step whose file has this episode; none where no file has."""
    table = read_columns(run_dir, columns=["step", "episode_ordinal"])
    pairs = zip(table["step"].to_pylist(), table["episode_ordinal"].to_pylist(), strict=True)
    return sorted({int(step) for step, ordinal in pairs if ordinal == episode})


class _View:
    """Episodes of one run on a console."""

    def __init__(self, console: Console, run: RunData) -> None:
        self.console = console
        self.text = TokenText.find(tokenizer_candidates(run.run_dir, run.config, run.command))
        self.rule = f"; {rule}" if (rule := run.rule) else ""
        words = (
            ("ratio below the band", "ratio above the band") if run.loss == DIS else (f"cut from {side} by {run.loss}" for side in ("below", "above"))
        )
        below, above = (f"out: {said}" for said in words)
        self.masks = {**_MASKS, REJECTED_LOW: below, REJECTED_HIGH: above}

    def trained(self, stored: StoredEpisode, cut: Dropped | None) -> None:
        """An episode that was in a batch. cut: its loss, when the batch left it out or was undone."""
        t = stored.trajectory
        what = (IN_A_BATCH[cut.reason] if cut else "step {}").format(stored.step)
        self.console.rule(f"episode {t.episode_id} · {what} · reward {t.reward:.3g} · {t.finish}", style="cyan")
        self._say(
            f"{t.environment}, task {t.task_id}; admitted at version {t.admitted_version}, trained at {stored.trained_at_version}, "
            f"staleness {stored.staleness}{self.rule}"
        )
        if cut:
            self._say(f"why      {cut.reason}: {cut.message}", "yellow")
        if all(record is None for record in stored.records):
            self._say("the run folder has no per-token training record of this episode; what the engine logged is all there is", "yellow")
        self._tokens(t, stored.records)

    def loss(self, loss: Dropped, stored: StoredEpisode | None, *, retrained: bool) -> None:
        following = EpisodeId(loss.episode_id.ordinal, loss.episode_id.attempt + 1)
        fate = f"tried again as {following}" if loss.retried else "dropped; after a resume it was trained" if retrained else "dropped"
        self.console.rule(f"episode {loss.episode_id} · not trained: {loss.reason} · {fate}", style="yellow")
        sitting = f", after {loss.sitting} resumes" if loss.sitting else ""
        self._say(
            f"{loss.environment}, task {loss.task_id}; version {loss.version}, lost during step {loss.step}{sitting}; {loss.tokens} tokens sampled"
        )
        self._say(f"why      {loss.reason}: {loss.message}", "yellow")
        if stored is not None:
            self._tokens(stored.trajectory, stored.records)
        elif loss.tokens:
            self._say(
                "its tokens are not in the run folder (logger.trajectories=none, an older loss than those kept, or the run was killed)", "yellow"
            )

    def _tokens(self, t: Trajectory, records: Sequence[SegmentRecord | None]) -> None:
        if not self.text.known:
            self._say("the run's tokenizer was not found; token ids are shown", "yellow")
        for index, segment in enumerate(t.segments):
            if len(t.segments) > 1:
                self.console.print(Text(f"\n{segment_title(index, segment)}", style="bold"))
            pieces = self.text.pieces(segment.token_ids.tolist())
            made, record = makers(segment, pieces, t.info.get("messages", ())), records[index]
            reason = record.mask_reason if record is not None else np.where(segment.action_mask, DROPPED, NON_FINITE)
            whole = Text()
            for at, piece in enumerate(pieces):
                style = _STYLES.get(int(reason[at]), "") if made[at] == "policy" else _CONTEXT_STYLES.get(str(made[at]), "dim")
                whole.append(piece.replace("\n", "↵\n"), style)
            self.console.print(whole)
            self.console.print()
            self.console.print(_token_table(segment, record, pieces, made, self.masks))
        if t.info:
            self._say(f"info     {json.dumps(dict(t.info), ensure_ascii=False, default=str)}")
        if t.metrics:
            self._say(f"metrics  {json.dumps(dict(t.metrics))}")

    def _say(self, text: str, style: str = "dim") -> None:
        self.console.print(Text(text, style=style))


def _token_table(segment: Segment, record: SegmentRecord | None, pieces: list[str], made: Any, masks: Mapping[int, str]) -> Table:
    """A row per sampled token; runs of other tokens of one maker are one row. masks: how each reason to leave a token out is called."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for heading in ("position", "token", "id", "by", "version", "engine", "trainer", "ratio", "mask", "value", "return", "advantage"):
        table.add_column(heading, justify="left" if heading in ("token", "by", "mask") else "right", no_wrap=True)
    for maker, group in groupby(range(len(segment)), key=lambda at: str(made[at])):
        positions = list(group)
        if maker != "policy":
            words = repr("".join(pieces[at] for at in positions))[1:-1]
            shown = words if len(words) <= 30 else f"{words[:14]} … {words[-13:]}"
            span = f"{positions[0]}-{positions[-1]}" if len(positions) > 1 else str(positions[0])
            table.add_row(span, Text(shown), "", maker, style="dim")
            continue
        for at in positions:
            token = Text().append(repr(pieces[at])[1:-1] or "·", _token_style(record, at))
            cells: list[str | Text] = [str(at), token, str(segment.token_ids[at]), maker, str(segment.versions[at]), _number(segment.logprobs[at])]
            if record is None:
                mask = "no record" if segment.action_mask[at] else masks[NON_FINITE]
                table.add_row(*cells, "", "", mask)
                continue
            with np.errstate(over="ignore"):
                ratio = np.exp(record.trainer_logprobs[at] - segment.logprobs[at])
            reason = int(record.mask_reason[at])
            mask = masks.get(reason, MASK_REASONS[reason].replace("_", " "))
            table.add_row(
                *cells,
                _number(record.trainer_logprobs[at]),
                _number(ratio),
                mask,
                *(_number(column[at]) for column in (record.values, record.returns, record.advantages)),
            )
    return table


def _token_style(record: SegmentRecord | None, at: int) -> str:
    reason = int(record.mask_reason[at]) if record is not None else TRAINED
    return _STYLES[reason] if reason in (REJECTED_LOW, REJECTED_HIGH) else ""


def _number(value: float) -> str:
    return f"{value:.4f}" if math.isfinite(value) else ""
