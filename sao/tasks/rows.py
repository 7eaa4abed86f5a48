"""Rows of a task file, every one checked before anything starts.

A row is a dict of the file's columns. Its prompt is a string or a list of messages; the verl convention (data_source, prompt, ability,
reward_model{style, ground_truth}, extra_info) is recognised by its `reward_model` column. Files are read once as a stream to be checked;
afterwards JSON lines are read from the file by offset, Parquet stays one Arrow table, and a `datasets` directory stays memory-mapped.
"""

from __future__ import annotations

import csv
import json
import os
import re
from array import array
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from sao.environment import Message
from sao.errors import ConfigError, DataError
from sao.tasks.target import one_line

Row = dict[str, Any]

SHOWN_BAD_ROWS = 5
LINE_SUFFIXES = (".jsonl", ".ndjson")
FORMS = "use .jsonl, .parquet, .csv, a directory saved by `datasets`, or a hub id such as org/name"
# A path with one of these endings is a file that the user expects here, never the id of a hub data set.
FILE_SUFFIXES = (*LINE_SUFFIXES, ".parquet", ".json", ".csv", ".tsv", ".txt", ".arrow", ".gz", ".zst", ".zip", ".yaml", ".yml", ".pkl", ".xlsx")
# What data sets call the prompt when they do not call it `prompt`.
COMMON_PROMPTS = ("question", "problem", "messages", "instruction", "query", "input", "text")
ROLES = ("system", "developer", "user", "assistant", "tool")


class BadRow(ValueError):
    """One row cannot be used; the message is the reason."""


@dataclass(frozen=True)
class RowFormat:
    """What a usable row looks like."""

    prompt_column: str = "prompt"
    max_prompt_chars: int = 200_000
    check: Callable[[Mapping[str, Any]], None] | None = (
        None  # what the environment wants of a row (`check_row` of its class): ValueError with the reason
    )


class Rows(Protocol):
    """Random access to the checked rows of one file."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Row: ...

    def label(self, index: int) -> str:
        """Where row `index` stands in its file, counted from 1: `line 12` or `row 12`."""
        ...


def messages_of(value: Any) -> list[Message]:
    """The opening messages of a prompt: a string becomes one user message, a list is checked and copied.

    Raises BadRow when the value is neither, a message has an unknown role or non-text content, nothing is in it, or it ends with the answer.
    """
    if value is None:
        raise BadRow("empty prompt")
    if isinstance(value, str):
        if not value.strip():
            raise BadRow("empty prompt")
        return [{"role": "user", "content": value}]
    if not isinstance(value, list):
        raise BadRow(f"the prompt is of type {type(value).__name__}, not a string or a list of messages")
    messages: list[Message] = []
    for number, message in enumerate(value, start=1):
        if not isinstance(message, Mapping):
            raise BadRow(f"message {number} of the prompt is of type {type(message).__name__}, not an object with role and content")
        if message.get("role") not in ROLES:
            raise BadRow(f"message {number} of the prompt has the role {message.get('role')!r}, not one of {', '.join(ROLES)}")
        content = message.get("content")
        if not isinstance(content, str) and not (content is None and message.get("tool_calls")):
            raise BadRow(f"message {number} of the prompt has content of type {type(content).__name__}, not a string")
        # Arrow gives every struct the union of all keys; the absent ones come back as None.
        messages.append({key: item for key, item in message.items() if item is not None})
    if not messages or not (messages[-1].get("content") or "").strip():
        raise BadRow("empty prompt")
    if messages[-1]["role"] not in ("user", "tool"):
        raise BadRow(f"the prompt ends with a message of the {messages[-1]['role']}; it must end where the model answers")
    return messages


def check_row(row: Any, form: RowFormat) -> None:
    """Raise BadRow with the reason when a row cannot be used."""
    if not isinstance(row, Mapping):
        raise BadRow(f"it is of type {type(row).__name__}, not an object with columns")
    if form.prompt_column not in row:
        raise BadRow(f"no column {form.prompt_column!r}{_mend_column(row)}")
    messages = messages_of(row[form.prompt_column])
    texts = [message.get("content") or "" for message in messages]
    length = sum(map(len, texts))
    if length > form.max_prompt_chars:
        raise BadRow(f"the prompt has {length} characters, more than data.max_prompt_chars={form.max_prompt_chars}")
    for text in texts:
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise BadRow("the prompt holds half of a surrogate pair, which is not valid Unicode") from error
    if "reward_model" in row:
        _check_verl(row)
    if form.check is not None:
        try:
            form.check(row)
        except ValueError as error:
            raise BadRow(str(error)) from None


def _mend_column(row: Mapping[str, Any]) -> str:
    columns = [str(name) for name in row][:8]
    known = [name for name in COMMON_PROMPTS if name in row]
    mend = f"; set data.prompt_column={known[0]}" if known else ""
    return f" (columns: {', '.join(columns) or 'none'}{mend})"


def _check_verl(row: Mapping[str, Any]) -> None:
    reward_model = row["reward_model"]
    if not isinstance(reward_model, Mapping) or reward_model.get("ground_truth") is None:
        raise BadRow("the column 'reward_model' must be an object with a 'ground_truth'")
    if not isinstance(row.get("data_source", ""), str):
        raise BadRow(f"the column 'data_source' is of type {type(row['data_source']).__name__}, not a string")
    if not isinstance(row.get("extra_info") or {}, Mapping):
        raise BadRow(f"the column 'extra_info' is of type {type(row['extra_info']).__name__}, not an object")


class _Findings:
    """Collects the bad rows of one file into one sentence."""

    def __init__(self, source: str) -> None:
        self.source = source
        self.total = 0
        self.bad = 0
        self.shown: list[str] = []

    def add(self, label: str, reason: str) -> None:
        self.bad += 1
        if len(self.shown) < SHOWN_BAD_ROWS:
            self.shown.append(f"{label}: {reason}")

    def finish(self) -> None:
        if self.bad:
            rest = f"; and {self.bad - len(self.shown)} more" if self.bad > len(self.shown) else ""
            raise DataError(f"{self.source}: {self.bad} of {self.total} rows cannot be used, mend or remove them: {'; '.join(self.shown)}{rest}")
        if not self.total:
            raise DataError(f"{self.source} holds no rows; give a file with at least one task")


def open_rows(path: str, *, key: str = "data.path", split: str = "train", form: RowFormat | None = None) -> Rows:
    """Open a task file and check every row.

    path: a .jsonl, .ndjson, .parquet or .csv file, a directory of `datasets`, or a hub id (`org/name` or `org/name:configuration`).
    key: the configuration key that holds the path, for messages. split: of a `datasets` source.

    Raises DataError: no such file, unknown kind, no rows, or bad rows (up to 5 are named by line or row with the reason, all are counted).
    """
    form = form or RowFormat()
    source = f"{key}={path}"
    file = Path(path).expanduser()
    suffix = file.suffix.lower()
    if file.is_file():
        if suffix in LINE_SUFFIXES:
            return _JsonLines(file, source, form)
        if suffix == ".parquet":
            return _ArrowRows(file, source, form)
        if suffix == ".csv":
            return _CsvRows(file, source, form)
        raise DataError(f"{source} has the unknown extension {suffix or '(none)'!r}; {FORMS}")
    if file.is_dir():
        return _DatasetRows(_load_directory(file, source, split), source, form)
    if suffix in FILE_SUFFIXES or not re.fullmatch(r"[\w.-]+(/[\w.-]+)?(:[\w.-]+)?", path) or path.startswith("."):
        raise DataError(f"{source}: there is no such file; check the path ({os.getcwd()} is the working directory)")
    return _DatasetRows(_load_hub(path, source, split), source, form)


class _JsonLines:
    """One JSON object a line; holds offsets only and reads rows on demand. Blank lines are skipped."""

    def __init__(self, file: Path, source: str, form: RowFormat) -> None:
        self._source = source
        self._offsets = array("q")
        self._sizes = array("q")
        self._lines = array("q")
        self._file = file.open("rb")
        findings = _Findings(source)
        offset = 0
        for number, line in enumerate(self._file, start=1):
            if line.strip():
                findings.total += 1
                try:
                    check_row(_parse_line(line), form)
                except BadRow as error:
                    findings.add(f"line {number}", str(error))
                self._offsets.append(offset)
                self._sizes.append(len(line))
                self._lines.append(number)
            offset += len(line)
        findings.finish()

    def __len__(self) -> int:
        return len(self._offsets)

    def __getitem__(self, index: int) -> Row:
        line = os.pread(self._file.fileno(), self._sizes[index], self._offsets[index])
        try:
            return dict(_parse_line(line))
        except (BadRow, TypeError, ValueError) as error:
            where = f"{self.label(index)}: {error}"
            raise DataError(f"{self._source} changed after it was opened ({where}); leave task files alone during a run") from error

    def label(self, index: int) -> str:
        return f"line {self._lines[index]}"


def _parse_line(line: bytes) -> Any:
    try:
        text = line.decode("utf-8-sig").rstrip()
    except UnicodeDecodeError as error:
        raise BadRow(f"invalid UTF-8 at byte {error.start + 1} of the line") from error
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise BadRow(f"invalid JSON at column {error.colno} ({error.msg})") from error
    except (ValueError, RecursionError) as error:
        raise BadRow(f"invalid JSON ({one_line(error, 120)})") from error


class _ArrowRows:
    """A Parquet file as one Arrow table."""

    def __init__(self, file: Path, source: str, form: RowFormat) -> None:
        try:
            import pyarrow as pa
            import pyarrow.parquet as pq
        except ModuleNotFoundError as error:
            raise ConfigError(f"{source}: reading Parquet needs pyarrow; run `pip install pyarrow`") from error
        try:
            self._table = pq.read_table(file)
        except (pa.ArrowException, OSError) as error:
            raise DataError(f"{source} is not a readable Parquet file ({one_line(error, 120)})") from error
        if self._table.num_rows and form.prompt_column not in self._table.column_names:
            raise DataError(f"{source}: no column {form.prompt_column!r}{_mend_column(dict.fromkeys(self._table.column_names))}")
        findings = _Findings(source)
        for batch in self._table.to_batches(max_chunksize=256):
            for row in _rows_of_batch(batch):
                findings.total += 1
                try:
                    if isinstance(row, BadRow):
                        raise row
                    check_row(row, form)
                except BadRow as error:
                    findings.add(f"row {findings.total}", str(error))
        findings.finish()

    def __len__(self) -> int:
        return int(self._table.num_rows)

    def __getitem__(self, index: int) -> Row:
        row: Row = self._table.slice(index, 1).to_pylist()[0]
        return row

    def label(self, index: int) -> str:
        return f"row {index + 1}"


class _CsvRows:
    """A CSV file with a header, in memory; every value is a string."""

    def __init__(self, file: Path, source: str, form: RowFormat) -> None:
        findings = _Findings(source)
        self._rows: list[Row] = []
        self._lines: list[int] = []
        try:
            with file.open(encoding="utf-8-sig", newline="") as stream:
                reader = csv.DictReader(stream, strict=True)
                for row in reader:
                    findings.total += 1
                    self._rows.append(row)
                    self._lines.append(reader.line_num)
                    try:
                        _check_width(row)
                        check_row(row, form)
                    except BadRow as error:
                        findings.add(f"line {reader.line_num}", str(error))
        except (csv.Error, UnicodeDecodeError) as error:
            raise DataError(f"{source} is not readable CSV ({one_line(error, 120)})") from error
        findings.finish()

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> Row:
        return dict(self._rows[index])

    def label(self, index: int) -> str:
        return f"line {self._lines[index]}"


def _check_width(row: Mapping[Any, Any]) -> None:
    """A row of another width than the header is shifted: a comma was not quoted, or a column is missing."""
    if None in row:
        raise BadRow(f"it has {len(row[None])} values more than the header has columns; quote what holds a comma")
    if None in row.values():
        raise BadRow("it has fewer values than the header has columns")


def columns(path: str, *, key: str = "data.path", split: str = "train") -> list[str]:
    """The columns of a task file, of its first row where rows may differ. Raises DataError as `open_rows` does, for what it can see without reading on."""
    source = f"{key}={path}"
    file = Path(path).expanduser()
    suffix = file.suffix.lower()
    try:
        if file.is_file() and suffix in LINE_SUFFIXES:
            with file.open("rb") as stream:
                first = next((line for line in stream if line.strip()), b"{}")
            row = _parse_line(first)
            return [str(name) for name in row] if isinstance(row, Mapping) else []
        if file.is_file() and suffix == ".csv":
            with file.open(encoding="utf-8-sig", newline="") as stream:
                return next(csv.reader(stream), [])
        if file.is_file() and suffix == ".parquet":
            import pyarrow.parquet as pq

            return list(pq.read_schema(file).names)
    except (BadRow, OSError, ValueError, csv.Error):
        return []  # opening the file says what is wrong
    if file.is_dir():
        return list(_load_directory(file, source, split).column_names)
    if file.is_file() or suffix in FILE_SUFFIXES:
        return []
    return list(_load_hub(path, source, split).column_names)


def _rows_of_batch(batch: Any) -> Iterator[Row | BadRow]:
    try:
        yield from batch.to_pylist()
        return
    except UnicodeDecodeError:
        pass  # one string of the batch is broken: go row by row to find which
    for index in range(batch.num_rows):
        try:
            yield batch.slice(index, 1).to_pylist()[0]
        except UnicodeDecodeError as error:
            yield BadRow(f"invalid UTF-8 at byte {error.start + 1} of a string")


class _DatasetRows:
    """A split of a Hugging Face data set, memory-mapped by that library."""

    def __init__(self, dataset: Any, source: str, form: RowFormat) -> None:
        self._dataset = dataset
        if len(dataset) and form.prompt_column not in dataset.column_names:
            raise DataError(f"{source}: no column {form.prompt_column!r}{_mend_column(dict.fromkeys(dataset.column_names))}")
        findings = _Findings(source)
        for row in dataset:
            findings.total += 1
            try:
                check_row(row, form)
            except BadRow as error:
                findings.add(f"row {findings.total}", str(error))
        findings.finish()

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, index: int) -> Row:
        return dict(self._dataset[index])

    def label(self, index: int) -> str:
        return f"row {index + 1}"


def _import_datasets(source: str) -> Any:
    try:
        import datasets
    except ModuleNotFoundError as error:
        raise ConfigError(f"{source}: reading it needs the package datasets; run `pip install datasets`") from error
    return datasets


def _load_directory(directory: Path, source: str, split: str) -> Any:
    if not any((directory / name).exists() for name in ("dataset_dict.json", "dataset_info.json", "state.json")):
        raise DataError(f"{source} is a directory that `datasets` did not save; {FORMS}")
    datasets = _import_datasets(source)
    try:
        loaded = datasets.load_from_disk(str(directory))
    except Exception as error:
        raise DataError(f"{source} cannot be loaded by `datasets` ({one_line(error, 160)})") from error
    if isinstance(loaded, datasets.DatasetDict):
        if split not in loaded:
            raise DataError(f"{source} has no split {split!r}; set data.split to one of {', '.join(loaded)}")
        return loaded[split]
    return loaded


def _load_hub(name: str, source: str, split: str) -> Any:
    datasets = _import_datasets(source)
    repository, _, configuration = name.partition(":")
    try:
        return datasets.load_dataset(repository, configuration or None, split=split)
    except Exception as error:
        raise DataError(f"{source} is neither a file or directory here nor a data set the hub gives us ({one_line(error, 160)})") from error
