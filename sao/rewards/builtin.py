"""Reward functions that ship. Each takes the reference answer from `answer`, `ground_truth` or verl's `reward_model.ground_truth`."""

from __future__ import annotations

import re
from collections.abc import Mapping
from decimal import Decimal
from typing import Any

from sao.rewards.function import gold_of

# A minus sign counts only where nothing is subtracted from: `3-5` ends with 5, `= -5` with -5.
NUMBER = re.compile(r"(?:(?<![0-9A-Za-z)\].])-)?(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?")


def exact_match(completion: str, row: Mapping[str, Any]) -> float:
    """1 when the completion is the reference answer, apart from white space around it, else 0."""
    return float(completion.strip() == str(gold_of(row)).strip())


def last_number(completion: str, row: Mapping[str, Any]) -> float:
    """1 when the last number of the completion equals the last number of the reference answer, else 0.

    Decimal comparison: 1,200 = 1200 = 1200.0. Raises ValueError when the reference answer holds no number.
    """
    gold = _last(str(gold_of(row)))
    if gold is None:
        raise ValueError("the reference answer holds no number")
    return float(_last(completion) == gold)


def _last(text: str) -> Decimal | None:
    found = NUMBER.findall(text)
    return Decimal(found[-1].replace(",", "")) if found else None
