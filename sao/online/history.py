"""A stream's run folder, measured: what `sao online` prints at its end, the report shows and the benchmark compares."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from sao.config import Config
from sao.config_yaml import from_yaml
from sao.errors import ConfigError
from sao.online import measures
from sao.online.measures import Recovery, Stream
from sao.online.optimum import optima
from sao.online.schedule import Schedule, Shift
from sao.report.arrow import list_views, numpy_column
from sao.report.jsonl import read_jsonl
from sao.report.metrics import read_metrics, surviving
from sao.report.store import read_columns, stored_steps

ANSWERS = 128  # last answers in which a collapse is looked for


@dataclass
class History:
    """What a run trained on, in training order, and what was measured beside it.

    tokens, seconds, explained: by step; tokens (sampled, trained) and seconds since the start are cumulative. accuracy: by phase, (step, held-out mean at
    the training temperature), in order. answers: the last ones, as token ids.
    """

    config: Config
    stream: Stream
    shifts: list[Shift]
    tokens: dict[int, float] = field(default_factory=dict)
    seconds: dict[int, float] = field(default_factory=dict)
    explained: dict[int, float] = field(default_factory=dict)
    accuracy: dict[str, list[tuple[int, float]]] = field(default_factory=dict)
    answers: list[bytes] = field(default_factory=list)
    counts: dict[str, int] = field(default_factory=dict)

    @property
    def end(self) -> int:
        """Prompts of the stream that were drawn and trained, by the furthest."""
        return int(self.stream.positions.max()) + 1 if len(self.stream.positions) else 0

    @cached_property
    def regret(self) -> measures.Floats | None:
        """Rewards missed so far after each prompt, float64[N]; None where the environment does not say what was possible (a class method `optimum`)."""
        try:
            best = optima(self.config)
        except ConfigError:  # a class of the user's own, and this is another machine
            return None
        if best is None:
            return None
        schedule = Schedule(self.config.online, self.config.seed)
        possible = [best[schedule.phase(position).name] for position in self.stream.positions.tolist()]
        return measures.dynamic_regret(self.stream.rewards, possible)

    def step_of(self, shift: Shift) -> int:
        """The first training step that holds a prompt from after the shift."""
        return int(self.stream.steps[self.stream.positions >= shift.position].min())


def read_history(run_dir: Path) -> History | None:
    """None when the run was no stream, or its trajectories were not kept."""
    config = from_yaml(run_dir / "config.yaml")
    steps = stored_steps(run_dir)
    if not config.online.phases or not steps:
        return None
    table = read_columns(run_dir, columns=("step", "episode_ordinal", "segment", "reward", "action_tokens"))
    columns = {name: numpy_column(table[name]) for name in table.column_names}
    first = columns["segment"] <= 0  # one row for each episode
    order = np.lexsort((columns["episode_ordinal"][first], columns["step"][first]))
    # The loop draws one prompt for each ordinal, so an episode's ordinal is its prompt's position in the stream.
    rewards, positions, at = (columns[name][first][order] for name in ("reward", "episode_ordinal", "step"))
    stream = Stream(rewards.astype(np.float64), positions.astype(np.int64), at.astype(np.int64))
    history = History(config, stream, [])
    history.shifts = Schedule(config.online, config.seed).shifts(history.end)
    per_step = np.bincount(columns["step"], weights=columns["action_tokens"])
    history.tokens = dict(enumerate(np.cumsum(per_step).tolist()))
    records = read_metrics(run_dir)
    _read_steps(history, surviving(records, "train"))
    _read_accuracy(history, read_jsonl(run_dir / "eval.jsonl"), records)
    history.answers = _last_answers(run_dir, steps)
    return history


def _read_steps(history: History, rows: list[dict[str, Any]]) -> None:
    for row in rows:
        step = int(row["step"])
        history.seconds[step] = float(row["t"])
        if "critic/vf_explained_var" in row:
            history.explained[step] = float(row["critic/vf_explained_var"])
    history.counts = {name: int(rows[-1].get(f"online/{name}", 0)) for name in ("refused", "rolled_back")} if rows else {}


def _read_accuracy(history: History, evals: list[dict[str, Any]], records: list[dict[str, Any]]) -> None:
    """Held-out means by phase, placed at the step whose weights they are of."""
    reached = {int(row["train/version"]): int(row["step"]) for row in surviving(records, "train") if "train/version" in row}
    wanted = history.config.rollout.sampling.temperature
    names = {phase.name for phase in history.config.online.phases}
    for record in evals:
        if record["temperature"] != wanted:
            continue
        split = record.get("by_workload") or ({next(iter(names)): record["mean"]} if len(names) == 1 else {})
        for name, mean in split.items():
            history.accuracy.setdefault(name, []).append((reached.get(int(record["version"]), -1), float(mean)))


def _last_answers(run_dir: Path, steps: list[int]) -> list[bytes]:
    answers: list[bytes] = []
    for step in reversed(steps):
        table = read_columns(run_dir, [step], ("token_ids", "action_mask"))
        for ids, mask in zip(list_views(table["token_ids"]), list_views(table["action_mask"]), strict=True):
            if ids is not None:
                answers.append(np.asarray(ids)[np.asarray(mask, bool)].tobytes())
        if len(answers) >= ANSWERS:
            break
    return answers[:ANSWERS]


def recoveries(history: History) -> list[tuple[Shift, Recovery | None]]:
    """Every shift with what it did, as far as the run went."""
    positions = [0, *(shift.position for shift in history.shifts), math.inf]
    return [
        (
            shift,
            measures.recovery(
                history.stream, shift.position, positions[i + 2], since=int(positions[i]), tokens=history.tokens, seconds=history.seconds
            ),
        )
        for i, shift in enumerate(history.shifts)
    ]


def returns(history: History) -> list[dict[str, Any]]:
    """Regimes that were learned and came back: the steps until SHARE of the level at the end of the first visit was reached, then and now."""
    shifts, stream = history.shifts, history.stream
    first_name = shifts[0].before if shifts else ""
    starts = [(first_name, 0), *((shift.after, shift.position) for shift in shifts)]
    ends = [start for _, start in starts[1:]] + [history.end]
    seen: dict[str, tuple[int, float]] = {}
    found = []
    for (name, start), end in zip(starts, ends, strict=True):
        part = stream.between(start, end)
        if len(part.rewards) < measures.WINDOW:
            continue
        if name not in seen:
            seen[name] = (start, float(part.rewards[-measures.WINDOW :].mean()))
            continue
        began, level = seen[name]
        if level < measures.LEARNED:
            continue  # chance alone regains what was never learned
        first_end = next(e for (n, s), e in zip(starts, ends, strict=True) if (n, s) == (name, began))
        then = measures.steps_to_level(stream, measures.SHARE * level, began, first_end)
        now = measures.steps_to_level(stream, measures.SHARE * level, start, end)
        found.append({"phase": name, "position": start, "first_steps": then, "steps": now, "savings": measures.savings(then, now)})
    return found


def forgotten(history: History) -> dict[str, float]:
    """`measures.forgetting` of every phase whose time has ended, by name; one that is rewarded again is left out."""
    ended = {shift.before: history.step_of(shift) for shift in history.shifts}
    if history.shifts:
        ended.pop(history.shifts[-1].after, None)
    found = {name: measures.forgetting(history.accuracy.get(name, ()), step) for name, step in ended.items()}
    return {name: value for name, value in found.items() if value is not None}


def summary(history: History) -> dict[str, Any]:
    """Everything measured, JSON-compatible; an undefined value is None."""
    shifts = []
    for shift, found in recoveries(history):
        before, after = measures.around(history.explained, history.step_of(shift))
        row = {**asdict(shift), "step": history.step_of(shift), "explained_before": _known(before), "explained_after": _known(after)}
        if found is not None:
            row |= {name: _known(value) for name, value in asdict(found).items()} | {"dip": found.dip}
        shifts.append(row)
    return {
        "prompts": len(history.stream.rewards),
        "reward": float(history.stream.rewards.mean()),
        "regret": None if history.regret is None else float(history.regret[-1]),
        "shifts": shifts,
        "returns": returns(history),
        "accuracy": {name: values[-1][1] for name, values in history.accuracy.items()},
        "forgetting": forgotten(history),
        "majority_answer": _known(measures.majority_share(history.answers)),
        "collapsed": measures.has_collapsed(history.answers),
        **history.counts,
    }


def _known(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value


def shift_line(row: dict[str, Any]) -> str:
    """A shift of `summary` as a sentence."""
    head = f"step {row['step']}: {row['before']} -> {row['after']}"
    if "level" not in row:
        return f"{head}: too few rewards on one side to measure"
    if not row["learned"]:
        return f"{head}: the level before it was {row['level']:.2f}, too low to speak of recovery"
    fell = f"{head}: reward {row['level']:.2f}, fell to {row['low']:.2f}"
    if row["censored"]:
        return f"{fell}, did not regain 80 % within {row['steps']} steps"
    return f"{fell}, regained 80 % after {row['steps']} steps"


def closing_lines(run_dir: Path) -> list[str]:
    """What a stream's run says when it ends."""
    history = read_history(run_dir)
    if history is None:
        return []
    facts = summary(history)
    lines = [shift_line(row) for row in facts["shifts"]]
    for row in facts["returns"]:
        if row["savings"] is not None:
            lines.append(f"{row['phase']} came back: {row['steps']} steps to its earlier level, {row['first_steps']} the first time")
    if facts["regret"] is not None:
        lines.append(f"regret {facts['regret']:.0f} over {facts['prompts']} prompts (0 is the best that was possible)")
    if facts["collapsed"]:
        lines.append(f"collapsed: {facts['majority_answer']:.0%} of the last {len(history.answers)} answers are the same one")
    if any(history.counts.values()):
        lines.append(f"{history.counts['refused']} versions refused by shadow evaluation, {history.counts['rolled_back']} roll-backs on reward")
    return lines
