"""Append-only JSON Lines files that survive a kill: a torn last line is dropped, a broken line anywhere else is an error."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

from sao.errors import DataError


def read_jsonl(path: Path) -> list[dict[str, Any]]:
    """Every record of the file, in order; empty when the file does not exist.

    Raises DataError naming file and line when a line other than a torn last one is not a JSON object.
    """
    if not path.exists():
        return []
    lines = path.read_bytes().split(b"\n")
    records: list[dict[str, Any]] = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except ValueError:
            if number == len(lines):  # no newline after it: the writer was killed half-way
                break
            raise DataError(f"{path}, line {number} is not JSON; remove the line") from None
        if not isinstance(record, dict):
            raise DataError(f"{path}, line {number} is not a JSON object; remove the line")
        records.append(record)
    return records


def open_for_append(path: Path) -> IO[str]:
    """Open the file for appending, cutting a torn last line off first."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.exists():
        data = path.read_bytes()
        if data and not data.endswith(b"\n"):
            with path.open("r+b") as file:
                file.truncate(data.rfind(b"\n") + 1)
    return path.open("a", encoding="utf-8")


def write_record(file: IO[str], record: Mapping[str, Any]) -> None:
    """Append one record and flush, so that a reader of a live run sees whole lines."""
    file.write(json.dumps(record, allow_nan=False, separators=(",", ":")) + "\n")
    file.flush()


def append_record(path: Path, record: Mapping[str, Any]) -> None:
    """Append one record to a file that is written rarely (eval.jsonl)."""
    with open_for_append(path) as file:
        write_record(file, record)
