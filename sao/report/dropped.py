"""What a run lost and why: every dropped episode and every failed attempt, with its tokens where there are any.

    dropped.jsonl                    a line for each, appended as it happens
    dropped/000-000007.parquet       the tokens, as in trajectories/: sitting (how often the run had been resumed), then a running number

The lines survive a kill; tokens of the latest few losses may be missing after one. Both are bounded: beyond a size the oldest go. A resumed run
goes back to a checkpoint and appends; what it undid stays in the record under its own sitting.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from sao.errors import DataError
from sao.report.jsonl import open_for_append, read_jsonl, write_record
from sao.report.store import StoredEpisode, read_file, read_ordinals, write_file
from sao.rollout.episodes import Loss
from sao.trajectory import EpisodeId, Trajectory

log = logging.getLogger(__name__)

FILE, EARLIER, FOLDER = "dropped.jsonl", "dropped-earlier.jsonl", "dropped"
MOST_BYTES = 256 << 20  # of tokens on disk
MOST_LINE_BYTES = 64 << 20  # of lines in one of the two files
AT_ONCE = 32  # trajectories in one file of tokens
MESSAGE_CHARS = 2000


@dataclass(frozen=True)
class Dropped:
    """One line of the record. `sitting` counts resumes; the other fields are those of `sao.rollout.episodes.Loss`."""

    episode_id: EpisodeId
    task_id: str
    environment: str
    workload: str
    reason: str
    message: str
    tokens: int
    version: int
    step: int
    retried: bool
    sitting: int


_LINE = {field.name for field in fields(Dropped)} - {"episode_id"} | {"episode"}


class DroppedWriter:
    """Writes the record of one sitting; the driver is its only user.

    keep_tokens false (logger.trajectories=none): lines alone. fetch: from a loss's handle to its trajectory, or None where it cannot be had; it is
    called on a thread. `tokens_missed` counts the trajectories with tokens that could not be kept.
    """

    def __init__(self, run_dir: Path, *, sitting: int, keep_tokens: bool, fetch: Callable[[Any], Trajectory | None]) -> None:
        self.run_dir, self.sitting, self.keep_tokens, self.fetch = run_dir, sitting, keep_tokens, fetch
        self.tokens_missed = 0
        self._file = open_for_append(run_dir / FILE)
        self._pending: list[Loss] = []
        self._parts = 0
        self._thread = ThreadPoolExecutor(1)
        self._writing: list[Future[None]] = []

    def add(self, loss: Loss) -> None:
        """Append a line at once; the tokens follow with the next `flush`, or when there are enough."""
        if self._file.tell() > MOST_LINE_BYTES:
            self._file.close()
            os.replace(self.run_dir / FILE, self.run_dir / EARLIER)
            self._file = open_for_append(self.run_dir / FILE)
        line = {name: value for name, value in vars(loss).items() if name not in ("episode_id", "handle")}
        line |= {"episode": list(loss.episode_id), "message": loss.message[:MESSAGE_CHARS], "sitting": self.sitting}
        write_record(self._file, line)
        if self.keep_tokens and loss.handle is not None:
            self._pending.append(loss)
            if len(self._pending) >= AT_ONCE:
                self.flush()

    def flush(self) -> None:
        """Have what is pending written in the background. Raises OSError when an earlier write failed."""
        for done in [future for future in self._writing if future.done()]:
            self._writing.remove(done)
            done.result()
        if self._pending:
            losses, self._pending = self._pending, []
            self._writing.append(self._thread.submit(self._write, losses, self._parts))
            self._parts += 1

    def wait(self) -> None:
        """Return when every token is on the disk; called while the handles still lead somewhere."""
        self.flush()
        wait(self._writing)
        self.flush()

    def close(self) -> None:
        self._thread.shutdown(wait=True)
        self._file.close()

    def _write(self, losses: list[Loss], part: int) -> None:
        found = [self.fetch(loss.handle) for loss in losses]
        self.tokens_missed += sum(trajectory is None and loss.tokens > 0 for trajectory, loss in zip(found, losses, strict=True))
        there = [trajectory for trajectory in found if trajectory is not None and trajectory.segments]
        if not there:
            return
        folder = self.run_dir / FOLDER
        folder.mkdir(exist_ok=True)
        write_file(folder / f"{self.sitting:03d}-{part:06d}.parquet", -1, there)
        files = sorted(folder.glob("*.parquet"))
        excess = sum(path.stat().st_size for path in files) - MOST_BYTES
        for path in files[:-1]:
            if excess <= 0:
                break
            excess -= path.stat().st_size
            path.unlink()


def read_dropped(run_dir: Path) -> list[Dropped]:
    """The record of a run, oldest first; empty where there is none. Raises DataError for a broken line."""
    return list(_lines(run_dir))


def _lines(run_dir: Path) -> Iterator[Dropped]:
    for name in (EARLIER, FILE):
        for line in read_jsonl(run_dir / name):
            if strange := sorted(line.keys() ^ _LINE):
                raise DataError(
                    f"{run_dir / name} is not of this version of SAO (a line differs in {', '.join(strange)}); take it away, or use the version that wrote it"
                )
            yield Dropped(episode_id=EpisodeId(*line.pop("episode")), **line)


def read_tokens(run_dir: Path, dropped: Dropped) -> StoredEpisode | None:
    """What a lost attempt had written, as far as it was kept; no training record belongs to it. Raises DataError for a file that cannot be read."""
    for path in sorted((run_dir / FOLDER).glob(f"{dropped.sitting:03d}-*.parquet")):
        if dropped.episode_id.ordinal not in read_ordinals(path):
            continue
        for stored in read_file(path, dropped.episode_id.ordinal):
            if stored.trajectory.episode_id == dropped.episode_id:
                return stored
    return None
