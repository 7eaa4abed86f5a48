"""The run store: every trained trajectory with its per-token training record, one Parquet file per step, one row per segment.

    trajectories/step-000001.parquet

Columns of the whole episode (task_id, reward, finish, metrics, ...) repeat on each of its segments' rows, so that any row can be read alone
with any Parquet tool. A file appears whole or not at all. Reading gives back equal `Trajectory` objects, which is what a learner that lost
its state trains on again.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from sao.durable import put_in_place
from sao.errors import DataError
from sao.learner.protocol import SegmentRecord
from sao.report.arrow import column, list_column, list_views, numpy_column, read
from sao.report.steps import numbered, step_name
from sao.trajectory import EpisodeId, FinishReason, SamplingSpec, Segment, Trajectory, TurnTiming

FOLDER = "trajectories"
TOKEN_COLUMNS = {"token_ids": pa.int32(), "action_mask": pa.bool_(), "logprobs": pa.float32(), "versions": pa.int32()}
RECORD_COLUMNS = {
    "trainer_logprobs": pa.float32(),
    "values": pa.float32(),
    "advantages": pa.float32(),
    "returns": pa.float32(),
    "mask_reason": pa.uint8(),
}
_TIMING = pa.struct(
    [("queue_s", pa.float64()), ("generate_s", pa.float64()), ("environment_s", pa.float64())]
    + [(name, pa.int64()) for name in ("prompt_tokens", "cached_tokens", "output_tokens")]
)
_SIDE = pa.struct([("name", pa.string()), ("dtype", pa.string()), ("shape", pa.list_(pa.int64())), ("data", pa.binary())])
_SCALARS: dict[str, pa.DataType] = {
    "step": pa.int32(),
    "episode_ordinal": pa.int64(),
    "attempt": pa.int32(),
    "segment": pa.int32(),  # -1: an episode without any
    "segments": pa.int32(),
    "task_id": pa.string(),
    "environment": pa.string(),
    "workload": pa.string(),
    "finish": pa.string(),
    "finish_detail": pa.string(),
    "reward": pa.float64(),
    "turns": pa.int32(),
    "tokens": pa.int32(),
    "action_tokens": pa.int32(),
    "admitted_version": pa.int32(),
    "oldest_version": pa.int32(),
    "newest_version": pa.int32(),
    "trained_at_version": pa.int32(),
    "staleness": pa.int32(),
    "temperature": pa.float64(),
    "top_p": pa.float64(),
    "top_k": pa.int32(),
    "min_p": pa.float64(),
    "seed": pa.int64(),
    "max_tokens": pa.int32(),
    "parent_segment": pa.int32(),
    "parent_position": pa.int32(),
    "metrics": pa.string(),
    "info": pa.string(),
}
_LISTS: dict[str, pa.DataType] = {
    "stop": pa.list_(pa.int32()),
    "turn_rewards": pa.list_(pa.float32()),
    "timings": pa.list_(_TIMING),
    "side": pa.list_(_SIDE),
}
SCHEMA = pa.schema(
    [pa.field(name, kind) for name, kind in {**_SCALARS, **_LISTS}.items()]
    + [pa.field(name, pa.list_(kind)) for name, kind in {**TOKEN_COLUMNS, **RECORD_COLUMNS}.items()]
)


@dataclass(frozen=True, eq=False)
class StoredEpisode:
    """A trained trajectory as read back: records[i] belongs to segments[i], None where the learner kept none.

    staleness = trained_at_version (actor steps when the step started) - the oldest version among the action tokens.
    """

    step: int
    trajectory: Trajectory
    records: tuple[SegmentRecord | None, ...]
    trained_at_version: int
    staleness: int


class TrajectoryWriter:
    """Writes <run>/trajectories."""

    def __init__(self, run_dir: Path | str) -> None:
        self.folder = Path(run_dir) / FOLDER
        self.folder.mkdir(parents=True, exist_ok=True)

    def write(self, step: int, trajectories: Sequence[Trajectory], records: Sequence[SegmentRecord], step_version: int) -> Path:
        """Write one step's file. `step_version` is the learner's version when the step started."""
        return write_file(step_path(self.folder.parent, step), step, trajectories, records, step_version)


def write_file(path: Path, step: int, trajectories: Sequence[Trajectory], records: Sequence[SegmentRecord] = (), step_version: int = 0) -> Path:
    """Write trajectories as one file, which appears whole or not at all.

    A record is found by its episode id and segment index. Raises ValueError for a record of an episode that is not among the trajectories, or of
    another length than its segment; OSError when the disk does.
    """
    by_segment = {(record.episode_id, record.segment): record for record in records}
    rows: list[dict[str, Any]] = []
    segments: list[Segment | None] = []
    matched: list[SegmentRecord | None] = []
    for trajectory in trajectories:
        episode = _episode_columns(trajectory, step, step_version)
        parts: list[tuple[int, Segment | None]] = list(enumerate(trajectory.segments)) or [(-1, None)]
        for index, segment in parts:
            record = by_segment.pop((trajectory.episode_id, index), None)
            if record is not None and segment is not None and len(record.mask_reason) != len(segment):
                raise ValueError(f"record of episode {trajectory.episode_id} has {len(record.mask_reason)} tokens, its segment {len(segment)}")
            rows.append({**episode, **_segment_columns(index, segment)})
            segments.append(segment)
            matched.append(record)
    if by_segment:
        raise ValueError(f"a record belongs to episode {next(iter(by_segment))[0]}, which is not in the batch of step {step}")

    columns = [column([row[name] for row in rows], kind) for name, kind in {**_SCALARS, **_LISTS}.items()]
    columns += [list_column([None if s is None else getattr(s, name) for s in segments], kind) for name, kind in TOKEN_COLUMNS.items()]
    columns += [list_column([None if r is None else getattr(r, name) for r in matched], kind) for name, kind in RECORD_COLUMNS.items()]
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    pq.write_table(pa.Table.from_arrays(columns, schema=SCHEMA), partial, compression="zstd")
    put_in_place(partial, path)
    return path


def step_path(run_dir: Path | str, step: int) -> Path:
    return Path(run_dir) / FOLDER / f"{step_name(step)}.parquet"


def stored_steps(run_dir: Path | str) -> list[int]:
    """Steps that have a file, ascending; empty when there is no folder."""
    return list(numbered(Path(run_dir) / FOLDER, ".parquet"))


def read_columns(run_dir: Path | str, steps: Iterable[int] | None = None, columns: Sequence[str] = tuple(_SCALARS)) -> pa.Table:
    """The named columns of the given steps (all by default) as one Arrow table, a row per segment; without the lists it is cheap."""
    chosen = stored_steps(run_dir) if steps is None else list(steps)
    tables = [_read(step_path(run_dir, step), columns) for step in chosen]
    if tables:
        return pa.concat_tables(tables)
    fields = [SCHEMA.field(name) for name in columns]
    return pa.Table.from_arrays([column([], field.type) for field in fields], schema=pa.schema(fields))


def read_trajectories(run_dir: Path | str, steps: Iterable[int] | None = None, episode: int | None = None) -> list[StoredEpisode]:
    """Stored episodes of the given steps (all by default), in the order they were written; `episode` picks one ordinal.

    Raises DataError when a file is missing or cannot be read.
    """
    found: list[StoredEpisode] = []
    for step in stored_steps(run_dir) if steps is None else steps:
        found += read_file(step_path(run_dir, step), episode)
    return found


def read_file(path: Path, episode: int | None = None) -> list[StoredEpisode]:
    """The episodes of one file in the order they were written. Raises DataError when it is missing or cannot be read."""
    found: list[StoredEpisode] = []
    table = _read(path, SCHEMA.names)
    ordinals = numpy_column(table["episode_ordinal"])
    attempts = numpy_column(table["attempt"])
    new = np.ones(len(ordinals), bool)
    new[1:] = (ordinals[1:] != ordinals[:-1]) | (attempts[1:] != attempts[:-1])
    bounds = [*np.flatnonzero(new).tolist(), len(ordinals)]
    lists = {name: list_views(table[name]) for name in (*TOKEN_COLUMNS, *RECORD_COLUMNS)}
    scalars = {name: table[name].to_pylist() for name in (*_SCALARS, *_LISTS)}
    for start, end in pairwise(bounds):
        if episode is None or ordinals[start] == episode:
            found.append(_episode(scalars, lists, range(start, end)))
    return found


def read_ordinals(path: Path) -> set[int]:
    """Ordinals of the episodes of one file, without their tokens. Raises DataError as `read_file` does."""
    return set(numpy_column(_read(path, ["episode_ordinal"])["episode_ordinal"]).tolist())


def _episode_columns(trajectory: Trajectory, step: int, step_version: int) -> dict[str, Any]:
    oldest = trajectory.oldest_version
    return {
        "step": step,
        "episode_ordinal": trajectory.episode_id.ordinal,
        "attempt": trajectory.episode_id.attempt,
        "segments": len(trajectory.segments),
        "task_id": trajectory.task_id,
        "environment": trajectory.environment,
        "workload": trajectory.workload,
        "finish": trajectory.finish.kind,
        "finish_detail": trajectory.finish.detail,
        "reward": trajectory.reward,
        "turns": len(trajectory.timings) or sum(len(s.turn_ends()) for s in trajectory.segments),
        "admitted_version": trajectory.admitted_version,
        "oldest_version": oldest,
        "newest_version": trajectory.newest_version,
        "trained_at_version": step_version,
        "staleness": step_version - oldest,
        "metrics": _json(trajectory.metrics),
        "info": _json(trajectory.info),
        "turn_rewards": None if trajectory.turn_rewards is None else trajectory.turn_rewards.tolist(),
        "timings": [vars(timing) for timing in trajectory.timings],
    }


def _segment_columns(index: int, segment: Segment | None) -> dict[str, Any]:
    sampling = segment.sampling if segment is not None else SamplingSpec()
    parent = (segment.parent if segment is not None else None) or (None, None)
    side = segment.side if segment is not None else {}
    return {
        "segment": index,
        "tokens": len(segment) if segment is not None else 0,
        "action_tokens": segment.action_tokens if segment is not None else 0,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "min_p": sampling.min_p,
        "seed": sampling.seed,
        "max_tokens": sampling.max_tokens,
        "stop": list(sampling.stop),
        "parent_segment": parent[0],
        "parent_position": parent[1],
        "side": [
            {"name": name, "dtype": str(array.dtype), "shape": array.shape, "data": np.ascontiguousarray(array).tobytes()}
            for name, array in side.items()
        ],
    }


def _episode(scalars: Mapping[str, list[Any]], lists: Mapping[str, list[Any]], rows: range) -> StoredEpisode:
    first = {name: column[rows[0]] for name, column in scalars.items()}
    episode_id = EpisodeId(first["episode_ordinal"], first["attempt"])
    segments: list[Segment] = []
    records: list[SegmentRecord | None] = []
    for row in rows:
        if scalars["segment"][row] < 0:
            continue
        parent = scalars["parent_segment"][row], scalars["parent_position"][row]
        segments.append(
            Segment(
                **{name: lists[name][row] for name in TOKEN_COLUMNS},
                sampling=SamplingSpec(
                    **{name: scalars[name][row] for name in ("temperature", "top_p", "top_k", "min_p", "seed", "max_tokens")},
                    stop=tuple(scalars["stop"][row]),
                ),
                side={s["name"]: np.frombuffer(s["data"], s["dtype"]).reshape(s["shape"]) for s in scalars["side"][row]},
                parent=None if parent[0] is None else parent,
            )
        )
        if lists["mask_reason"][row] is None:
            records.append(None)
        else:
            record = {name: lists[name][row] for name in RECORD_COLUMNS}
            records.append(SegmentRecord(episode_id=episode_id, segment=scalars["segment"][row], **record))
    trajectory = Trajectory(
        episode_id=episode_id,
        task_id=first["task_id"],
        environment=first["environment"],
        segments=tuple(segments),
        reward=first["reward"],
        finish=FinishReason(first["finish"], first["finish_detail"]),
        admitted_version=first["admitted_version"],
        workload=first["workload"],
        turn_rewards=None if first["turn_rewards"] is None else np.asarray(first["turn_rewards"], np.float32),
        timings=tuple(TurnTiming(**timing) for timing in first["timings"]),
        metrics=json.loads(first["metrics"]),
        info=json.loads(first["info"]),
    )
    return StoredEpisode(first["step"], trajectory, tuple(records), first["trained_at_version"], first["staleness"])


def _json(value: Mapping[str, Any]) -> str:
    """JSON of metrics or info; what JSON has no form for is kept as its text."""
    return json.dumps(dict(value), default=str)


def _read(path: Path, columns: Sequence[str]) -> pa.Table:
    try:
        return read(path, columns)
    except FileNotFoundError:
        raise DataError(f"{path} does not exist; the run stored no such step (see logger.trajectories)") from None
    except KeyError as error:
        raise DataError(f"{path} is not of this version of SAO ({error.args[0]}); take it away, or use the version that wrote it") from None
    except (pa.ArrowInvalid, OSError) as error:
        if isinstance(error, OSError) and error.strerror:  # the disk's or a permission's; the library's own have none
            raise DataError(f"{path} cannot be read ({error.strerror}); mend that") from None
        raise DataError(f"{path} cannot be read as Parquet ({' '.join(str(error).split())}); remove it") from None
