"""Sets of problems with known answers for `sao eval aime`: a hub id or a local file, read, checked row by row, and refused where a gold is no answer.

Their columns have many names; those of AIME 24 to 26, BeyondAIME, HMMT, IMO-AnswerBench, MATH-500 and GSM8K are known. No set ships with us.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass

from sao.errors import DataError
from sao.evals.symbolic import check_available, exact, shared_grader
from sao.tasks.rows import RowFormat, columns, open_rows

PROBLEM_COLUMNS = ("problem", "Problem", "question", "prompt")
ANSWER_COLUMNS = ("answer", "Answer", "Short Answer", "final_answer", "expected_answer", "ground_truth")
ID_COLUMNS = ("id", "ID", "unique_id", "problem_idx", "Problem ID")
SHOWN = 5
SHORTEST_PROBLEM = 12  # characters
MOST_WORDS = 4  # in a gold; a text of more is a problem or a solution in the wrong column


@dataclass(frozen=True)
class MathProblem:
    """One problem: its name in the tables, its text, and the answer as it would stand in a box."""

    name: str
    text: str
    gold: str


def load(data: str, *, split: str, problem_column: str = "", answer_column: str = "") -> list[MathProblem]:
    """The problems of a set, in its order.

    data: a .jsonl, .parquet or .csv file, a directory of `datasets`, or a hub id. Empty columns are found by their usual names.
    Raises DataError naming the rows (up to 5, all counted) that have no problem, no answer, or an answer that does not verify against itself, and
    ConfigError where a symbolic gold needs math-verify and it is not installed.
    """
    there = columns(data, key="data", split=split)
    problem_column = _column(data, there, problem_column, PROBLEM_COLUMNS, "problem_column")
    answer_column = _column(data, there, answer_column, ANSWER_COLUMNS, "answer_column")
    rows = open_rows(data, key="data", split=split, form=RowFormat(problem_column))
    found: list[MathProblem] = []
    faults: list[str] = []
    names: set[str] = set()
    for index in range(len(rows)):
        row = rows[index]
        text, gold = _text(row.get(problem_column)), _gold(row.get(answer_column))
        name = next((str(row[column]) for column in ID_COLUMNS if row.get(column) not in (None, "")), str(index + 1))
        name = name if name not in names else f"{name}-{index + 1}"
        names.add(name)
        fault = _fault(text, gold)
        if fault:
            faults.append(f"{rows.label(index)}: {fault}")
        found.append(MathProblem(name, text, gold))
    if not faults:
        faults = [f"{rows.label(index)}: {fault}" for index, fault in enumerate(verify([p.gold for p in found])) if fault]
    if faults:
        rest = f"; and {len(faults) - SHOWN} more" if len(faults) > SHOWN else ""
        raise DataError(f"data={data}: {len(faults)} of {len(rows)} rows cannot be evaluated, mend or remove them: {'; '.join(faults[:SHOWN])}{rest}")
    return found


def fingerprint(problems: Sequence[MathProblem]) -> str:
    """What tells two sets apart, whatever file they come from."""
    return hashlib.sha256(json.dumps([(p.text, p.gold) for p in problems]).encode()).hexdigest()[:16]


def _column(data: str, there: Sequence[str], asked: str, usual: Sequence[str], key: str) -> str:
    if asked:
        if there and asked not in there:
            raise DataError(f"data={data} has no column {key}={asked}; there are {', '.join(there)}")
        return asked
    found = next((name for name in usual if name in there), "")
    if not found and there:
        raise DataError(f"data={data} has none of the columns {', '.join(usual)}; name one of {', '.join(there)} by {key}=")
    return found or usual[0]


def _text(value: object) -> str:
    """A problem given as a string, or as messages: the text of the last one."""
    if isinstance(value, list):
        value = value[-1].get("content")
    return value.strip() if isinstance(value, str) else ""


def _gold(value: object) -> str:
    """The answer alone: GSM8K keeps it behind `####`, solutions keep it in a box."""
    if isinstance(value, list) and len(value) == 1:
        value = value[0]
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        return ""
    text = str(int(value) if isinstance(value, float) and value.is_integer() else value).strip()
    return text.rpartition("####")[2].strip()


def _fault(text: str, gold: str) -> str:
    if not gold:
        return "it has no answer"
    if len(text) < SHORTEST_PROBLEM or not re.search(r"[A-Za-z]{2}", text):
        return f"its problem is {text[:40]!r}, which is none; are the columns shifted?"
    if len(re.findall(r"[A-Za-z]{2,}", re.sub(r"\\[A-Za-z]+", " ", gold))) > MOST_WORDS:
        return f"its answer {gold[:40]!r} reads like a text; are the columns shifted?"
    return ""


def verify(golds: Sequence[str]) -> list[str]:
    """For every gold, why it does not verify against itself; empty where it does. Exact ones need no process."""
    return ["" if fault is None else fault for fault in map(_unverified, golds)]


def _unverified(gold: str) -> str | None:
    if exact(gold, gold):
        return None
    check_available()
    return shared_grader().fault(gold)
