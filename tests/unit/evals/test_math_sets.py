"""Sets of problems from outside: columns found, golds taken out, and every row that cannot be evaluated named."""

from __future__ import annotations

import csv
import json

import pytest

from sao.errors import ConfigError, DataError
from sao.evals.math_sets import fingerprint, load

LONG = "How many positive integers n satisfy n < 10?"


def jsonl(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def test_aime_form(tmp_path):
    path = jsonl(tmp_path / "a.jsonl", [{"id": 60, "problem": LONG, "answer": "204"}, {"id": 61, "problem": LONG, "answer": "033"}])
    assert [(p.name, p.gold) for p in load(path, split="train")] == [("60", "204"), ("61", "033")]


def test_gsm8k_form_and_names_made_unique(tmp_path):
    path = jsonl(tmp_path / "a.jsonl", [{"question": LONG, "answer": "9 of them\n#### 1,009", "id": "x"}, {"question": LONG, "answer": 7, "id": "x"}])
    assert [(p.name, p.gold) for p in load(path, split="train")] == [("x", "1,009"), ("x-2", "7")]


def test_csv_and_parquet_give_the_same_set(tmp_path):
    import pyarrow as pa
    import pyarrow.parquet as pq

    rows = [{"Problem": LONG + ', "truly"', "Short Answer": "9"}, {"Problem": LONG, "Short Answer": "-3/4"}]
    with (tmp_path / "a.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, rows[0])
        writer.writeheader()
        writer.writerows(rows)
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet")
    sets = [load(str(tmp_path / name), split="train") for name in ("a.csv", "a.parquet")]
    assert sets[0] == sets[1] and fingerprint(sets[0]) == fingerprint(sets[1]) and sets[0][1].gold == "-3/4"


def test_columns_by_name(tmp_path):
    path = jsonl(tmp_path / "a.jsonl", [{"aufgabe": LONG, "loesung": "9"}])
    assert load(path, split="train", problem_column="aufgabe", answer_column="loesung")[0].gold == "9"
    with pytest.raises(DataError, match="name one of aufgabe, loesung by problem_column="):
        load(path, split="train")
    with pytest.raises(DataError, match="no column answer_column=antwort; there are aufgabe, loesung"):
        load(path, split="train", problem_column="aufgabe", answer_column="antwort")


@pytest.mark.parametrize(
    ("rows", "says"),
    [
        ([{"problem": LONG, "answer": "9"}, {"problem": LONG, "answer": None}], "1 of 2 rows .*line 2: it has no answer"),
        ([{"problem": LONG, "answer": "9"}, {"problem": LONG}], "line 2: it has no answer"),
        ([{"problem": "9", "answer": LONG}], "line 1: its problem is '9', which is none; are the columns shifted"),
        ([{"problem": LONG, "answer": LONG}], "reads like a text; are the columns shifted"),
        ([{"problem": LONG, "answer": "(1, 2"}], "line 1: .*brackets do not match"),
        ([{"problem": LONG, "answer": "2^{2^{2^{2}}}"}], "tower"),
        ([{"problem": LONG, "answer": "many"}], "no number and no formula"),
        ([{"problem": LONG, "answer": True}], "it has no answer"),
        ([{"problem": LONG, "answer": ""}] * 7, "7 of 7 rows.*and 2 more"),
        ([], "holds no rows"),
    ],
)
def test_rows_that_cannot_be_evaluated_are_named(tmp_path, rows, says):
    with pytest.raises(DataError, match=says):
        load(jsonl(tmp_path / "a.jsonl", rows), split="train")


@pytest.mark.parametrize(("line", "says"), [("one, two,9", "line 3: it has 1 values more"), ("only one", "line 3: it has fewer values")])
def test_a_shifted_csv_row(tmp_path, line, says):
    (tmp_path / "a.csv").write_text(f"problem,answer\n{LONG},9\n{line}\n")
    with pytest.raises(DataError, match=says):
        load(str(tmp_path / "a.csv"), split="train")


def test_without_math_verify_a_set_with_formulas_is_refused_and_one_with_numbers_is_not(tmp_path, monkeypatch):
    numbers = jsonl(tmp_path / "numbers.jsonl", [{"problem": LONG, "answer": "\\frac{3}{4}"}])
    formulas = jsonl(tmp_path / "formulas.jsonl", [{"problem": LONG, "answer": "2\\sqrt{2}"}])
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert load(numbers, split="train")[0].gold == "\\frac{3}{4}"
    with pytest.raises(ConfigError, match=r"pip install 'sao-rl\[math\]'"):
        load(formulas, split="train")


def test_no_such_file():
    with pytest.raises(DataError, match="there is no such file"):
        load("nowhere.jsonl", split="train")
