"""What runs in the reward process: reasoning-gym's own scorers. The process is killed when one overruns, and its memory is limited."""

from __future__ import annotations

import resource
from collections.abc import Mapping
from typing import Any

import reasoning_gym  # noqa: F401 - here, so that its second of importing is not the first answer's

from sao.envs.reasoning_gym.scoring import generator

MEMORY = 4 << 30  # bytes the process may map
UNREADABLE = (ArithmeticError, AttributeError, LookupError, MemoryError, RecursionError, TypeError, ValueError)


def score(completion: str, row: Mapping[str, Any]) -> float:
    """The package's score of an answer that was extracted. row: dataset, config and entry. An answer that makes the scorer raise is a wrong one."""
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    made = generator(row["dataset"], row["config"])
    try:
        return made.score(completion, row["entry"])
    except UNREADABLE:
        return 0.0
