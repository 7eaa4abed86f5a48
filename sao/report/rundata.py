"""A run folder read for the report: whatever is there, and a note for whatever is not."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sao.algorithms.catalogue import DIS, LOSSES
from sao.errors import DataError
from sao.learner.protocol import REJECTED_HIGH, REJECTED_LOW
from sao.report.arrow import list_views, numpy_column
from sao.report.jsonl import read_jsonl
from sao.report.metrics import Axis, read_metrics, surviving
from sao.report.store import read_columns, stored_steps

SCALARS = (
    "step",
    "segment",
    "segments",
    "episode_ordinal",
    "attempt",
    "reward",
    "staleness",
    "turns",
    "action_tokens",
    "tokens",
    "trained_at_version",
)
# Per-token statistics read at most this many steps' files, spread over the run.
TOKEN_STEPS = 300


@dataclass
class TokenStats:
    """Over the stored action tokens of the steps looked at: log-prob gaps |trainer - engine| by version gap, and the rejected share."""

    steps: list[int] = field(default_factory=list)
    gap_sum: dict[int, float] = field(default_factory=dict)
    gap_max: dict[int, float] = field(default_factory=dict)
    gap_count: dict[int, int] = field(default_factory=dict)
    rejected: int = 0

    @property
    def tokens(self) -> int:
        return sum(self.gap_count.values())


@dataclass
class RunData:
    """Everything the report shows. `episodes` has one entry per trained trajectory in each array; `notes` say what is missing.

    outcome: how the run stands, {"state": running | complete | stopped | failed, "message": ...}; empty where no outcome.json says so.
    """

    run_dir: Path
    config: dict[str, Any] = field(default_factory=dict)
    config_text: str = ""
    plan: str = ""
    command: dict[str, Any] = field(default_factory=dict)
    outcome: dict[str, Any] = field(default_factory=dict)
    metrics: list[dict[str, Any]] = field(default_factory=list)
    evals: list[dict[str, Any]] = field(default_factory=list)
    ledger: dict[str, Any] = field(default_factory=dict)
    episodes: dict[str, NDArray[Any]] = field(default_factory=dict)
    tokens: TokenStats = field(default_factory=TokenStats)
    notes: list[str] = field(default_factory=list)
    _axes: dict[str, list[dict[str, Any]]] = field(default_factory=dict, repr=False)

    def setting(self, path: str, default: Any = None) -> Any:
        """A value of the resolved configuration by dotted path."""
        node: Any = self.config
        for key in path.split("."):
            if not isinstance(node, dict) or key not in node:
                return default
            node = node[key]
        return node

    @property
    def loss(self) -> str:
        return str(self.setting("algo.loss", DIS))

    @property
    def rule(self) -> str:
        """By which the loss leaves tokens out: `band (0.7, 6)` under DIS, else `loss NAME (arguments)`; empty where the configuration does not say."""
        low, high = self.setting("algo.eps_low"), self.setting("algo.eps_high")
        if self.loss == DIS:
            return f"band ({1 - low:.4g}, {1 + high:.4g})" if isinstance(low, float | int) and isinstance(high, float | int) else ""
        shipped = LOSSES[self.loss].arguments if self.loss in LOSSES else {}
        given = ", ".join(f"{name}={value}" for name, value in {**shipped, **(self.setting("algo.loss_args") or {})}.items())
        return f"loss {self.loss}" + (f" ({given})" if given else "")

    def axis(self, axis: Axis) -> list[dict[str, Any]]:
        """Records of one axis without what a rollback undid; read once, when `metrics` is complete."""
        if axis not in self._axes:
            self._axes[axis] = surviving(self.metrics, axis)
        return self._axes[axis]

    def series(self, name: str, axis: Axis = "train") -> tuple[list[float], list[float]]:
        """x and y of one metric; steps without a value are left out."""
        points = [(float(r["step"]), float(r[name])) for r in self.axis(axis) if isinstance(r.get(name), int | float)]
        return [x for x, _ in points], [y for _, y in points]

    def names(self, pattern: str, axis: Axis = "train") -> list[str]:
        """Metric names that match a regular expression, in order of first appearance."""
        found: dict[str, None] = {}
        for record in self.axis(axis):
            found |= dict.fromkeys(name for name in record if re.fullmatch(pattern, name))
        return list(found)

    def seconds(self) -> float | None:
        """Length of the run by its own records."""
        times = [float(record["t"]) for record in self.metrics if isinstance(record.get("t"), int | float)]
        return max(times) if times else None


def load_run(run_dir: Path) -> RunData:
    """Read a run folder. Nothing raises for a missing or broken part; it is left empty and named in `notes`."""
    run = load_run_settings(run_dir)
    readers: dict[str, Callable[[], None]] = {
        "metrics.jsonl": lambda: setattr(run, "metrics", _records(read_metrics(run_dir), "metrics.jsonl")),
        "eval.jsonl": lambda: setattr(run, "evals", _records(read_jsonl(run_dir / "eval.jsonl"), "eval.jsonl")),
        "ledger.json": lambda: setattr(run, "ledger", _json_object(run_dir / "ledger.json")),
        "trajectories/": lambda: _episodes(run),
    }
    if (run_dir / "outcome.json").exists():  # runs of older versions have none, which is nothing to report
        readers["outcome.json"] = lambda: setattr(run, "outcome", _json_object(run_dir / "outcome.json"))
    _read_all(run, readers)
    return run


def load_run_settings(run_dir: Path) -> RunData:
    """Configuration, plan and command of a run alone."""
    run = RunData(run_dir)
    readers: dict[str, Callable[[], None]] = {
        "config.yaml": lambda: _config(run),
        "plan.txt": lambda: setattr(run, "plan", (run_dir / "plan.txt").read_text(encoding="utf-8")),
        "command.json": lambda: setattr(run, "command", _json_object(run_dir / "command.json")),
    }
    _read_all(run, readers)
    return run


def _read_all(run: RunData, readers: dict[str, Callable[[], None]]) -> None:
    for name, reader in readers.items():
        try:
            reader()
        except FileNotFoundError:
            run.notes.append(f"{name} is not there")
        except (DataError, OSError, ValueError, KeyError, TypeError) as error:
            run.notes.append(f"{name} could not be read: {error}")


def _config(run: RunData) -> None:
    import yaml

    run.config_text = (run.run_dir / "config.yaml").read_text(encoding="utf-8")
    try:
        loaded = yaml.safe_load(run.config_text)
    except yaml.YAMLError as error:
        raise ValueError(str(error).splitlines()[0]) from None
    run.config = loaded if isinstance(loaded, dict) else {}


def _json_object(path: Path) -> dict[str, Any]:
    value = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(value, dict):
        raise ValueError("not a JSON object")
    return value


def _records(records: list[dict[str, Any]], name: str) -> list[dict[str, Any]]:
    if not records:
        raise FileNotFoundError(name)
    return records


def _episodes(run: RunData) -> None:
    if not stored_steps(run.run_dir):
        raise FileNotFoundError("trajectories")
    table = read_columns(run.run_dir, columns=[*SCALARS, "finish", "finish_detail"])
    columns = {name: numpy_column(table[name]) for name in SCALARS}
    ends = zip(table["finish"].to_pylist(), table["finish_detail"].to_pylist(), strict=True)
    columns["finish"] = np.array([f"{kind}: {detail}" if detail else kind for kind, detail in ends], np.str_)
    key = columns["episode_ordinal"] * 64 + columns["attempt"]
    order = np.lexsort((columns["segment"], key, columns["step"]))
    columns = {name: values[order] for name, values in columns.items()}
    key = key[order]
    first = np.ones(len(key), bool)
    first[1:] = (key[1:] != key[:-1]) | (columns["step"][1:] != columns["step"][:-1])
    starts = np.flatnonzero(first)
    episodes = {name: values[starts] for name, values in columns.items()}
    for name in ("action_tokens", "tokens"):  # segments of one episode add up
        episodes[name] = np.add.reduceat(columns[name], starts) if len(starts) else columns[name]
    run.episodes = episodes
    run.tokens = token_stats(run.run_dir, stored_steps(run.run_dir))


def token_stats(run_dir: Path, steps: Iterable[int]) -> TokenStats:
    """Log-prob gaps between trainer and engine by version gap. Gap 0 is what the two disagree about; larger ones add staleness."""
    chosen = list(steps)
    chosen = chosen[:: max(1, -(-len(chosen) // TOKEN_STEPS))]
    stats = TokenStats(chosen)
    for step in chosen:
        table = read_columns(run_dir, [step], ["trained_at_version", "logprobs", "trainer_logprobs", "versions", "mask_reason"])
        at = table["trained_at_version"].to_pylist()
        lists = [list_views(table[name]) for name in ("logprobs", "trainer_logprobs", "versions", "mask_reason")]
        for version, behaviour, trainer, versions, reason in zip(at, *lists, strict=True):
            if trainer is None or behaviour is None:
                continue
            gap = np.abs(trainer - behaviour)
            known = np.isfinite(gap)
            stats.rejected += int(((reason == REJECTED_LOW) | (reason == REJECTED_HIGH)).sum())
            behind = version - versions[known]
            for value in np.unique(behind):
                chosen_gaps = gap[known][behind == value]
                name = int(value)
                stats.gap_sum[name] = stats.gap_sum.get(name, 0.0) + float(chosen_gaps.sum())
                stats.gap_max[name] = max(stats.gap_max.get(name, 0.0), float(chosen_gaps.max()))
                stats.gap_count[name] = stats.gap_count.get(name, 0) + len(chosen_gaps)
    return stats
