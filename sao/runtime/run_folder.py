"""The run folder: created once, locked while a run lives in it."""

from __future__ import annotations

import fcntl
import importlib.metadata
import json
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

from sao.config import Config
from sao.durable import put_in_place
from sao.errors import UserError
from sao.report.jsonl import append_record


def choose(config: Config) -> Path:
    """The folder the configuration names, or a fresh one under runs/."""
    if config.run.dir:
        return Path(config.run.dir).expanduser().resolve()
    return (Path("runs") / f"{config.run.name}-{time.strftime('%Y%m%d-%H%M%S')}").resolve()


def refuse_used(path: Path) -> None:
    """Raise UserError when the folder already holds a run. Looks only."""
    left = ("ledger.json", "trajectories/*.parquet", "checkpoints/step-*", "checkpoints/final")
    if any(True for pattern in left for _ in path.glob(pattern)):
        raise UserError(f"run.dir={path} already holds a run; go on with it by resume={path}, or choose another folder")


class RunFolder:
    """Owns the folder's lock; a second run in the same folder is refused before it writes anything.

    resume: the folder holds a run that goes on. `incarnation` counts how often it has done so.
    """

    def __init__(self, path: Path, *, resume: bool = False) -> None:
        self.path = path
        self.resume = resume
        self.incarnation = 0
        self._lock: IO[str] | None = None

    def __enter__(self) -> RunFolder:
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            lock = open(self.path / "run.lock", "a+")
        except OSError as error:
            raise UserError(f"run.dir={self.path} cannot be written ({error.strerror}); choose another folder") from None
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            lock.seek(0)
            owner = lock.read().strip() or "unknown"
            lock.close()
            raise UserError(f"run.dir={self.path} is in use by process {owner}; wait for that run or choose another folder") from None
        try:
            if self.resume:
                self.incarnation = 1 + int(read_command(self.path).get("incarnation", 0))
            else:
                refuse_used(self.path)
        except UserError:
            lock.close()
            raise
        lock.truncate(0)
        lock.write(str(os.getpid()))
        lock.flush()
        self._lock = lock
        return self

    def __exit__(self, *_: object) -> None:
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def write_text(self, name: str, text: str) -> None:
        write_atomically(self.path / name, text)

    def write_json(self, name: str, value: Any) -> None:
        write_atomically(self.path / name, json.dumps(value, indent=2) + "\n")

    def append_json(self, name: str, value: Mapping[str, Any]) -> None:
        append_record(self.path / name, value)


def started_by() -> str:
    """The version of this software, as it goes into command.json."""
    return importlib.metadata.version("sao-rl")


def read_command(folder: Path) -> dict[str, Any]:
    """What command.json says of the run's last start; empty when the run was cut off before it was written. Raises UserError when it is damaged."""
    path = folder / "command.json"
    try:
        return dict(json.loads(path.read_text()))
    except FileNotFoundError:
        return {}
    except (ValueError, TypeError):
        raise UserError(f"{path} is damaged; remove it to go on, the run then counts its incarnations from the start") from None


def write_atomically(path: Path, text: str) -> None:
    """Readers see the old content or the new, never half, also after a power cut. Raises OSError when the disk does, and leaves nothing behind then."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        temporary.write_text(text)
        put_in_place(temporary, path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise
