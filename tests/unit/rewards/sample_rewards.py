"""Reward functions that behave and misbehave, imported by the runner's tests and by its worker processes."""

from __future__ import annotations

import asyncio
import os
import re
import subprocess
import time
from typing import Any


def length(completion: str, row: dict[str, Any]) -> float:
    return float(len(completion))


async def length_async(completion: str, row: dict[str, Any]) -> float:
    await asyncio.sleep(0)
    return float(len(completion))


def behave(completion: str, row: dict[str, Any]) -> Any:
    """Does what the completion says."""
    match completion:
        case "hang":
            while True:
                pass
        case "hang in c":
            return float(bool(re.match(r"(a+)+$", "a" * 60 + "b")))
        case "sleep":
            time.sleep(60)
        case "child":
            subprocess.run(["sleep", "61"], check=True)
        case "raise":
            raise ValueError("no such\nthing " + "x" * 1000)
        case "exit":
            raise SystemExit(3)
        case "os._exit":
            os._exit(7)
        case "fork":
            return 1.0 if os.fork() else 2.0
        case "pid":
            return os.getpid()
        case _:
            return row["value"]


async def behave_async(completion: str, row: dict[str, Any]) -> Any:
    match completion:
        case "hang":
            await asyncio.sleep(60)
        case "stubborn":
            for _ in range(5):
                try:
                    await asyncio.sleep(0.2)
                except asyncio.CancelledError:
                    continue
        case "raise":
            raise TimeoutError("the judge did not answer")
        case "exit":
            raise SystemExit(3)
        case "cancel":
            raise asyncio.CancelledError
        case _:
            return row["value"]


def values(completion: str, row: dict[str, Any]) -> Any:
    import numpy as np  # here, because every worker process of these tests imports this file

    return {"int": 2, "bool": True, "float32": np.float32(0.5), "array": np.array(0.25), "bool_": np.bool_(True)}[completion]


def with_messages(completion: str, row: dict[str, Any], *, messages: list[dict[str, Any]]) -> float:
    return float(len(messages))


def compute_score(data_source: str, solution_str: str, ground_truth: str, extra_info: dict[str, Any] | None = None) -> dict[str, Any]:
    return {"score": float(solution_str == ground_truth) + float((extra_info or {}).get("bonus", 0)), "source": data_source}


def compute_score_short(solution_str: str, ground_truth: str) -> bool:
    return solution_str == ground_truth


def one_argument(completion: str) -> float:
    return 0.0


def lists(completions: list[str], rows: list[Any]) -> list[float]:
    return [0.0]


class Scorer:
    def __call__(self, completion: str, row: dict[str, Any]) -> float:
        return 1.0


class AsyncScorer:
    async def __call__(self, completion: str, row: dict[str, Any]) -> float:
        return 2.0


scorer = Scorer()
async_scorer = AsyncScorer()
number = 3
