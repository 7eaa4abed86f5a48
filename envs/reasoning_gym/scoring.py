"""Scoring by reasoning-gym, without what makes its scorers unsafe or unfair.

Some of them evaluate what the policy wrote (`eval`, sympy's `parse_expr`): a completion would run as code. Those data sets are scored by rules of ours or
refused. The others may take for ever or all memory on a crafted answer, so they run in a process of their own (`grader.py`).
"""

from __future__ import annotations

import difflib
import importlib.util
import json
import math
import random
import re
import threading
from collections.abc import Callable, Mapping
from typing import Any

from sao.envs.reasoning_gym.arithmetic import NotArithmetic, value
from sao.errors import ConfigError
from sao.tasks.target import one_line

Entry = Mapping[str, Any]

TAGS = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
MOST_CHARS = 10_000  # of an answer that a scorer is shown; a longer one is wrong

# Their scorers run the answer through sympy's parse_expr, which evaluates it, and nothing short of algebra could take its place.
REFUSED = {
    "polynomial_multiplication": "evaluates the answer as code",
    "simple_integration": "evaluates the answer as code",
    "intermediate_integration": "evaluates the answer as code",
    "composite": "scores by the data sets inside it; mix environments with data.mixture instead",
}
# These draw their items when they are built; the others by seed and index at every access.
DRAWN_WHEN_BUILT = ("acre", "gsm_symbolic", "list_functions", "survo")


def _same(answer: str, entry: Entry) -> bool:
    return _lines(answer) == _lines(str(entry["answer"]))


def _lines(text: str) -> list[str]:
    return [line.strip() for line in text.strip().splitlines()]


def _queens(answer: str, entry: Entry) -> bool:
    return any(_lines(answer) == _lines(board) for board in entry["metadata"]["valid_answers"])


def _makes(answer: str, numbers: list[int], target: int) -> bool:
    try:
        result, used = value(answer)
    except NotArithmetic:
        return False
    return result == target and sorted(used) == sorted(numbers)


# Right or wrong by our own rules: data sets whose scorers evaluate the answer, and one that takes anything for right.
OURS: dict[str, Callable[[str, Entry], bool]] = {
    "binary_matrix": _same,
    "spiral_matrix": _same,
    "string_insertion": _same,
    "n_queens": _queens,
    "countdown": lambda answer, entry: _makes(answer, entry["metadata"]["numbers"], entry["metadata"]["target"]),
    "puzzle24": lambda answer, entry: _makes(answer, entry["metadata"]["numbers"], 24),
    "game_of_life_halting": lambda answer, entry: answer.strip().lower() == str(entry["answer"]).strip().lower(),
}


def extract(completion: str, *, lines: bool) -> str:
    """The answer in a completion: between the last <answer> tags, or without them the last line, or where answers have several `lines` all of it."""
    tagged = TAGS.findall(completion)
    if tagged:
        return str(tagged[-1]).strip()
    text = completion.strip()
    return text if lines else (text.splitlines() or [""])[-1].strip()


class Generator:
    """One data set with one configuration. Safe from several threads: its seed is set for every item."""

    def __init__(self, dataset: str, config: Mapping[str, Any]) -> None:
        """Raises ConfigError: not installed, no such data set, refused, or a configuration that it does not take."""
        self.dataset, self.config = dataset, dict(config)
        self._lock = threading.Lock()
        if importlib.util.find_spec("reasoning_gym") is None:
            raise ConfigError("env=reasoning_gym needs the package reasoning-gym; run `pip install 'sao-rl[reasoning_gym]'`")
        if dataset in REFUSED:
            raise ConfigError(f"env.args.dataset={dataset} {REFUSED[dataset]}; choose another data set")
        if {"seed", "size"} & set(config):
            raise ConfigError("env.args.config sets seed or size, which decide between training and held-out items; leave them out")
        from reasoning_gym.factory import DATASETS

        if dataset not in DATASETS:
            near = difflib.get_close_matches(dataset, DATASETS, n=1)
            hint = f"did you mean {near[0]!r}?" if near else "for instance chain_sum"
            raise ConfigError(f"env.args.dataset={dataset} is no data set of reasoning-gym; {hint}")
        try:
            self._made = self._make(0)
        except (TypeError, ValueError, AssertionError) as error:
            raise ConfigError(f"env.args.config={dict(config)} does not suit {dataset} ({one_line(error)})") from None

    def _make(self, seed: int) -> Any:
        import reasoning_gym

        return reasoning_gym.create_dataset(self.dataset, seed=seed, size=1, **self.config)

    def entry(self, seed: int) -> Entry:
        """Item `seed`: question, answer and metadata."""
        with self._lock:
            if self.dataset in DRAWN_WHEN_BUILT:
                self._made = self._make(seed)
            self._made.seed = seed
            before = random.getstate()
            random.seed(seed)  # one family draws from here in place of its own generator
            try:
                entry: Entry = self._made[0]
            finally:
                random.setstate(before)
            return entry

    def score(self, answer: str, entry: Entry) -> float:
        """What the data set's own scorer gives, in 0..1. Anything may come out of it, or nothing: only for a process that can be killed."""
        score = float(self._made.score_answer(answer, dict(entry)))
        return min(1.0, max(0.0, score)) if math.isfinite(score) else 0.0


_made: dict[str, Generator] = {}
_making = threading.Lock()


def generator(dataset: str, config: Mapping[str, Any]) -> Generator:
    """The one of this process; building some takes seconds."""
    key = json.dumps([dataset, config], sort_keys=True, default=str)
    with _making:
        if key not in _made:
            _made[key] = Generator(dataset, config)
        return _made[key]


def at_once(dataset: str, answer: str, entry: Entry) -> float | None:
    """The score where it can be told without the package's scorer, else None."""
    if len(answer) > MOST_CHARS:
        return 0.0
    if dataset in OURS:
        return float(OURS[dataset](answer, entry))
    oracle = entry["answer"]
    return 1.0 if oracle is not None and answer == str(oracle).strip() else None
