"""A file of predictions, read line by line: every bad line is named, the rest is evaluated, and the counts add up."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sao.errors import DataError, UserError

KEYS = ("instance_id", "model_name_or_path", "model_patch")
KINDS = ("blank", "not_json", "not_an_object", "missing_field", "wrong_type", "unknown_id", "duplicate")


@dataclass(frozen=True)
class Prediction:
    """One attempt at one task, in the official form. A patch of None or "" is an empty one: an answer, and not a bad line."""

    instance_id: str
    model_name_or_path: str
    model_patch: str

    def line(self) -> str:
        return json.dumps({key: getattr(self, key) for key in KEYS}, ensure_ascii=False) + "\n"


@dataclass(frozen=True)
class BadLine:
    """A line that is not evaluated. line: from 1. kind: one of KINDS."""

    line: int
    kind: str
    text: str


@dataclass(frozen=True)
class Predictions:
    """What a file holds; `lines` = len(good) + len(bad)."""

    lines: int
    good: tuple[Prediction, ...]
    bad: tuple[BadLine, ...]
    unanswered: tuple[str, ...] = field(default=())  # known tasks without a prediction


def read_predictions(path: Path, known: Collection[str]) -> Predictions:
    """Read .jsonl, or .json as one list or one mapping by id. known: the tasks there are. Raises UserError when the file itself cannot be used."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise UserError(f"predictions={path} cannot be read ({error.strerror}); name a .jsonl of predictions") from None
    if path.suffix == ".json":
        return _validated(_of_document(path, data), known)
    lines = data.split(b"\n")
    if lines and not lines[-1]:
        lines.pop()
    return _validated(enumerate(lines, 1), known)


def _of_document(path: Path, data: bytes) -> Iterable[tuple[int, Any]]:
    try:
        document = json.loads(data)
    except ValueError as error:
        raise DataError(f"predictions={path} is not JSON ({error}); mend it, or give one prediction a line in a .jsonl") from None
    entries = list(document.values()) if isinstance(document, dict) else document
    if not isinstance(entries, list):
        raise DataError(f"predictions={path} holds neither a list nor a mapping of predictions")
    return ((number, json.dumps(entry).encode()) for number, entry in enumerate(entries, 1))


def _validated(lines: Iterable[tuple[int, bytes]], known: Collection[str]) -> Predictions:
    good: dict[str, Prediction] = {}
    bad: list[BadLine] = []
    first_at: dict[str, int] = {}
    count = 0
    for number, line in lines:
        count += 1
        found = _prediction(number, line)
        if isinstance(found, Prediction):
            if found.instance_id not in known:
                found = BadLine(number, "unknown_id", f"there is no task {found.instance_id!r}")
            elif found.instance_id in first_at:
                found = BadLine(number, "duplicate", f"{found.instance_id!r} was predicted in line {first_at[found.instance_id]}, which counts")
        if isinstance(found, BadLine):
            bad.append(found)
        else:
            first_at[found.instance_id] = number
            good[found.instance_id] = found
    return Predictions(count, tuple(good.values()), tuple(bad), tuple(sorted(set(known) - set(good))))


def _prediction(number: int, line: bytes) -> Prediction | BadLine:
    if not line.strip():
        return BadLine(number, "blank", "the line is blank")
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        return BadLine(number, "not_json", f"not JSON: {str(error)[:120]}")
    if not isinstance(row, dict):
        return BadLine(number, "not_an_object", f"a {type(row).__name__}, not an object")
    for key in ("instance_id", "model_patch"):
        if key not in row:
            return BadLine(number, "missing_field", f"{key} is missing")
    name, patch, model = row["instance_id"], row["model_patch"], row.get("model_name_or_path", "None")
    if not isinstance(name, str) or not isinstance(model, str) or not (patch is None or isinstance(patch, str)):
        return BadLine(number, "wrong_type", "instance_id and model_name_or_path must be texts, model_patch a text or null")
    return Prediction(name, model, patch or "")
