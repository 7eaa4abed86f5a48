"""Every row is checked at the door, and a refusal is one sentence with file, line and reason."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from sao.errors import DataError
from sao.tasks.rows import RowFormat, open_rows

GOOD = {"prompt": "What is 2+2?", "answer": "4"}
VERL = {
    "data_source": "gsm8k",
    "prompt": [{"role": "user", "content": "What is 2+2?"}],
    "ability": "math",
    "reward_model": {"style": "rule", "ground_truth": "4"},
    "extra_info": {"index": 0},
}


def jsonl(directory: Path, *lines: Any, name: str = "tasks.jsonl") -> str:
    """A file of the given lines: bytes and strings as they are, anything else as JSON."""
    body = b"".join((line if isinstance(line, bytes) else (line if isinstance(line, str) else json.dumps(line)).encode()) + b"\n" for line in lines)
    path = directory / name
    path.write_bytes(body)
    return str(path)


def refusal(path: str, **kwargs: Any) -> str:
    with pytest.raises(DataError) as caught:
        open_rows(path, **kwargs)
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_lines_are_read_in_any_order_and_blank_ones_are_skipped(tmp_path: Path) -> None:
    rows = open_rows(jsonl(tmp_path, b"\xef\xbb\xbf" + json.dumps(GOOD).encode(), "", {"prompt": "ü", "n": 2}))
    assert len(rows) == 2
    assert rows[1] == {"prompt": "ü", "n": 2}
    assert rows[0] == GOOD
    assert (rows.label(0), rows.label(1)) == ("line 1", "line 3")


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ({"question": "2+2?"}, "no column 'prompt' (columns: question; set data.prompt_column=question)"),
        ({"answer": 4}, "no column 'prompt' (columns: answer)"),
        ({"prompt": ""}, "empty prompt"),
        ({"prompt": " \n"}, "empty prompt"),
        ({"prompt": None}, "empty prompt"),
        ({"prompt": []}, "empty prompt"),
        ({"prompt": [{"role": "user", "content": ""}]}, "empty prompt"),
        ({"prompt": "x" * 1_000_000}, "the prompt has 1000000 characters, more than data.max_prompt_chars=200000"),
        (b'{"prompt": "a\xff"}', "invalid UTF-8 at byte 14 of the line"),
        (r'{"prompt": "\ud800"}', "half of a surrogate pair"),
        ('{"prompt": "a"', "invalid JSON at column 15"),
        ("[" * 100_000, "invalid JSON"),
        ("[1]", "it is of type list, not an object"),
        ("null", "it is of type NoneType, not an object"),
        ({"prompt": 7}, "the prompt is of type int"),
        ({"prompt": ["hello"]}, "message 1 of the prompt is of type str"),
        ({"prompt": [{"role": "robot", "content": "hi"}]}, "has the role 'robot'"),
        ({"prompt": [{"role": "user", "content": ["hi"]}]}, "content of type list"),
        ({"prompt": [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"}]}, "ends with a message of the assistant"),
        ({**VERL, "reward_model": "4"}, "'reward_model' must be an object with a 'ground_truth'"),
        ({**VERL, "reward_model": {"style": "rule"}}, "'reward_model' must be an object with a 'ground_truth'"),
        ({**VERL, "data_source": 1}, "'data_source' is of type int"),
        ({**VERL, "extra_info": "x"}, "'extra_info' is of type str"),
    ],
)
def test_a_bad_line_is_named_with_its_reason(tmp_path: Path, line: Any, reason: str) -> None:
    path = jsonl(tmp_path, GOOD, VERL, line, GOOD)
    message = refusal(path, key="data.eval_path")
    assert message.startswith(f"data.eval_path={path}: 1 of 4 rows cannot be used, mend or remove them: line 3: ")
    assert reason in message


def test_five_bad_lines_are_named_and_all_are_counted(tmp_path: Path) -> None:
    message = refusal(jsonl(tmp_path, *[{"prompt": ""}] * 8, GOOD))
    assert "8 of 9 rows" in message
    assert "line 5" in message and "line 6" not in message
    assert message.endswith("; and 3 more")


def test_the_prompt_column_and_the_limit_are_settings(tmp_path: Path) -> None:
    path = jsonl(tmp_path, {"question": "x" * 11})
    assert len(open_rows(path, form=RowFormat("question"))) == 1
    assert "more than data.max_prompt_chars=10" in refusal(path, form=RowFormat("question", 10))


@pytest.mark.parametrize("name", ["missing.jsonl", "missing.parquet", "./missing", "no such file"])
def test_a_file_that_is_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.chdir(tmp_path)
    assert "there is no such file" in refusal(name)


def test_empty_files_and_unknown_extensions(tmp_path: Path) -> None:
    assert "holds no rows" in refusal(jsonl(tmp_path))
    assert "holds no rows" in refusal(jsonl(tmp_path, "", "  "))
    assert "unknown extension '.tsv'; use .jsonl" in refusal(jsonl(tmp_path, "a,b", name="tasks.tsv"))
    assert "`datasets` did not save" in refusal(str(tmp_path))


def test_a_file_that_changes_under_the_run_is_refused(tmp_path: Path) -> None:
    path = jsonl(tmp_path, GOOD, GOOD)
    rows = open_rows(path)
    Path(path).write_text("{}\n")
    with pytest.raises(DataError, match="changed after it was opened"):
        rows[1]


def test_parquet_plain_and_verl(tmp_path: Path) -> None:
    path = tmp_path / "tasks.parquet"
    conversation = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "2+2?"}]
    pq.write_table(pa.Table.from_pylist([VERL, {**VERL, "prompt": conversation}]), path)
    rows = open_rows(str(path))
    assert len(rows) == 2
    assert rows[0] == VERL
    assert rows[1]["prompt"] == conversation
    assert rows.label(1) == "row 2"


def test_parquet_refusals(tmp_path: Path) -> None:
    path = tmp_path / "tasks.parquet"
    texts = pa.array([b"good", b"bad \xff", b""], pa.binary()).view(pa.string())
    pq.write_table(pa.table({"prompt": texts}), path)
    message = refusal(str(path))
    assert "2 of 3 rows" in message and "row 2: invalid UTF-8 at byte 5 of a string; row 3: empty prompt" in message
    pq.write_table(pa.table({"question": ["a"]}), path)
    assert refusal(str(path)).endswith("no column 'prompt' (columns: question; set data.prompt_column=question)")
    pq.write_table(pa.table({"prompt": pa.array([], pa.string())}), path)
    assert "holds no rows" in refusal(str(path))
    path.write_bytes(b"PAR1 and then nothing of use")
    assert "is not a readable Parquet file" in refusal(str(path))


def test_a_directory_saved_by_datasets(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    saved = tmp_path / "saved"
    datasets.DatasetDict({"train": datasets.Dataset.from_list([GOOD, GOOD]), "test": datasets.Dataset.from_list([GOOD])}).save_to_disk(str(saved))
    assert len(open_rows(str(saved))) == 2
    assert open_rows(str(saved), split="test")[0] == GOOD
    assert "has no split 'dev'; set data.split to one of train, test" in refusal(str(saved), split="dev")
    single = tmp_path / "single"
    datasets.Dataset.from_list([GOOD, {"prompt": "", "answer": ""}]).save_to_disk(str(single))
    assert "1 of 2 rows cannot be used, mend or remove them: row 2: empty prompt" in refusal(str(single))


def test_a_hub_id_that_cannot_be_had_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    datasets = pytest.importorskip("datasets")
    asked: list[tuple[object, ...]] = []

    def refuse(*args: object, **kwargs: object) -> None:
        asked.append((*args, kwargs["split"]))
        raise ConnectionError("no route")

    monkeypatch.setattr(datasets, "load_dataset", refuse)
    assert "nor a data set the hub gives us (ConnectionError: no route)" in refusal("openai/gsm8k:main", split="test")
    assert asked == [("openai/gsm8k", "main", "test")]
