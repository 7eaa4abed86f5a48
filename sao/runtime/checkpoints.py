"""Checkpoints of a run: complete or ignored.

    checkpoints/step-000040/
        policy/, critic/      Hugging Face directories
        learner.pt            both optimisers and the learner's counters
        buffer.parquet        finished trajectories that waited for a batch
        state.json            ledger, task cursors, versions (the driver's part)
        manifest.json         every file with its size and SHA-256; written last
    checkpoints/good/         what a run with a guard goes back to (sao/online/guard.py); its state.json has the version and the ledger's mark
    checkpoints/final/        the trained models of a run that has ended: policy/, critic/, state.json (two counters) and manifest.json

A checkpoint is made in a hidden folder beside its place, synced and renamed, so a crash leaves none half-visible. One whose files do not
match its manifest is skipped with a warning, and the one before it is used.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sao.durable import sync
from sao.errors import UserError
from sao.report.steps import numbered
from sao.runtime.run_folder import read_command, started_by

FOLDER = "checkpoints"
FINAL = "final"
FORMAT = 3  # raise when an older version could not go on from what is saved now, or this one from what was saved before
_MAKING = ".making-"  # before the name of one that is being written
MANIFEST, STATE, BUFFER = "manifest.json", "state.json", "buffer.parquet"


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint that passed its check. `step`: batches trained when it was made."""

    path: Path
    step: int

    def state(self) -> dict[str, Any]:
        return json.loads((self.path / STATE).read_text())


class Checkpoints:
    """The checkpoints of one run folder; keeps the newest `keep`."""

    def __init__(self, run_dir: Path, keep: int) -> None:
        self.folder = run_dir / FOLDER
        self.keep = keep

    def begin(self, name: str) -> Path:
        """An empty folder to write the checkpoint `name` into (`step_name(step)`, FINAL or another), the leftover of an interrupted one removed."""
        scratch = self.folder / f"{_MAKING}{name}"
        shutil.rmtree(scratch, ignore_errors=True)
        scratch.mkdir(parents=True)
        return scratch

    def commit(self, scratch: Path, state: dict[str, Any]) -> Path:
        """Add the driver's state and the manifest, make everything durable, and give the checkpoint its name. Raises OSError when the disk does.

        scratch: what `begin` gave. state: JSON-compatible.
        """
        (scratch / STATE).write_text(json.dumps(state))
        files = [path for path in sorted(scratch.rglob("*")) if path.is_file()]
        manifest = {str(path.relative_to(scratch)): {"bytes": path.stat().st_size, "sha256": _digest(path)} for path in files}
        facts = {"format": FORMAT, "sao": started_by(), "step": state.get("batches_done"), "files": manifest}
        (scratch / MANIFEST).write_text(json.dumps(facts, indent=1))
        for path in [*files, scratch / MANIFEST]:
            sync(path)
        target = self.folder / scratch.name.removeprefix(_MAKING)
        if target.exists():
            shutil.rmtree(target)
        os.replace(scratch, target)
        sync(self.folder)
        self._prune(target)
        return target

    def abandon(self, scratch: Path) -> None:
        shutil.rmtree(scratch, ignore_errors=True)

    def latest(self, warn: Callable[[str], None]) -> Checkpoint | None:
        """The newest checkpoint whose files are all there and unchanged; `warn` hears of each one skipped."""
        for step, path in reversed(numbered(self.folder).items()):
            fault = damage(path)
            if fault is None:
                return Checkpoint(path, step)
            warn(f"checkpoint {path.name} is skipped: {fault}")
        return None

    def _prune(self, newest: Path) -> None:
        for path in list(numbered(self.folder).values())[: -self.keep]:
            if path != newest:
                shutil.rmtree(path, ignore_errors=True)


def damage(path: Path) -> str | None:
    """What is wrong with a checkpoint, or None. Raises UserError when another version of the software made it."""
    try:
        manifest = json.loads((path / MANIFEST).read_text())
        files = manifest["files"]
    except FileNotFoundError:
        return "it has no manifest, so it was never completed"
    except (ValueError, KeyError, TypeError):
        return "its manifest cannot be read"
    if manifest.get("format") != FORMAT:
        by = manifest.get("sao") or read_command(path.parents[1]).get("sao", "of another version")
        raise UserError(
            f"{path} was made by SAO {by} in format {manifest.get('format')}, this is SAO {started_by()}, which reads format {FORMAT}; "
            "go on with the version that made it"
        )
    for name, facts in files.items():
        file = path / name
        if not file.is_file():
            return f"{name} is missing"
        try:
            if file.stat().st_size != facts["bytes"]:
                return f"{name} has {file.stat().st_size} bytes instead of {facts['bytes']}"
            if _digest(file) != facts["sha256"]:
                return f"{name} is not what was written"
        except OSError as error:  # a disk that has lost it, or a run that removes it meanwhile
            return f"{name} cannot be read ({error.strerror})"
    return None


def _digest(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
