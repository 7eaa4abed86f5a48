"""One writer for all metrics of a run: metrics.jsonl first, W&B as a mirror that can never hurt the run.

A record is `{"t": seconds since the run began, "wall": ISO time, "axis": ..., "step": n, name: value, ...}`. An undefined value is absent.
A value that is not finite is refused and counted, because a NaN in a file or a chart hides what was wrong.

    axis      counts                               W&B step metric
    train     training steps (batches)             train/step
    publish   weight versions                      publish/version
    engine    seconds since the run began          engine/seconds
    eval      weight versions                      eval/version
"""

from __future__ import annotations

import logging
import math
import os
import time
from collections import Counter
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal, get_args

from sao.config import LoggerConfig
from sao.report.jsonl import open_for_append, read_jsonl, write_record
from sao.report.wandb_mirror import WandbMirror, check_wandb

log = logging.getLogger(__name__)

Axis = Literal["train", "publish", "engine", "eval"]
STEP_METRICS: Mapping[str, str] = {"train": "train/step", "publish": "publish/version", "engine": "engine/seconds", "eval": "eval/version"}
METRICS_FILE = "metrics.jsonl"
_RESERVED = ("t", "wall", "axis", "step")


class MetricsWriter:
    """Writes every metric of one run. Not thread-safe: the driver is its only user.

    A run that is continued in the same folder goes on appending, and `t` goes on from the last record. Raises UserError when
    `logger.wandb` cannot work (an unknown mode, or online without a key).

    non_finite counts refused values by metric name; wandb_failures counts what W&B did not take.
    """

    def __init__(self, run_dir: Path | str, logger: LoggerConfig, config: Mapping[str, Any]) -> None:
        self.run_dir = Path(run_dir)
        check_wandb(logger.wandb, os.environ)
        self.non_finite: Counter[str] = Counter()
        path = self.run_dir / METRICS_FILE
        previous = read_jsonl(path)
        self._began = time.monotonic() - (float(previous[-1].get("t", 0.0)) if previous else 0.0)
        self._file = open_for_append(path)
        self._wandb = WandbMirror(self.run_dir, logger, config) if logger.wandb != "disabled" else None

    def log(self, axis: Axis, step: float, metrics: Mapping[str, float | None]) -> None:
        """Append one record. `step` is the position on `axis`; None values are left out. Raises ValueError for an axis nobody defined."""
        if axis not in get_args(Axis):
            raise ValueError(f"axis {axis!r} is not one of {', '.join(get_args(Axis))}")
        values = {name: value for name in metrics if (value := self._finite(name, metrics[name])) is not None}
        if self.non_finite:
            values["metrics/non_finite"] = float(self.non_finite.total())
        seconds = time.monotonic() - self._began
        wall = datetime.now(UTC).isoformat(timespec="milliseconds")
        write_record(self._file, {"t": round(seconds, 3), "wall": wall, "axis": axis, "step": step, **values})
        if self._wandb is not None:
            self._wandb.log(STEP_METRICS[axis], step, values)

    def _finite(self, name: str, value: float | None) -> float | None:
        if name in _RESERVED:
            raise ValueError(f"{name!r} is a field of the record and cannot name a metric")
        if value is None:
            return None
        number = float(value)
        if math.isfinite(number):
            return number
        if name not in self.non_finite:
            log.warning("metric %s is %s; refused and counted as metrics/non_finite", name, number)
        self.non_finite[name] += 1
        return None

    @property
    def wandb_failures(self) -> int:
        return self._wandb.failures if self._wandb is not None else 0

    def close(self) -> None:
        """Close the file and finish W&B. Safe to call twice."""
        self._file.close()
        if self._wandb is not None:
            self._wandb.close()

    def __enter__(self) -> MetricsWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def read_metrics(run_dir: Path | str) -> list[dict[str, Any]]:
    """Every record of the run's metrics.jsonl in the order it was written; empty when there is none. A torn last line is left out."""
    return read_jsonl(Path(run_dir) / METRICS_FILE)


def surviving(records: list[dict[str, Any]], axis: Axis) -> list[dict[str, Any]]:
    """Records of one axis without those a rollback to a checkpoint undid: a record replaces all earlier ones at or after its step.

    Several records of one step that follow each other directly (two evaluations of one version) all stay.
    """
    kept: list[dict[str, Any]] = []
    for record in records:
        if record.get("axis") != axis:
            continue
        while kept and kept[-1]["step"] > record["step"]:
            kept.pop()
        if axis == "train" and kept and kept[-1]["step"] == record["step"]:
            kept.pop()
        kept.append(record)
    return kept
