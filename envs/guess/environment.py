"""Guess a number in a few turns: every wrong guess is answered with "higher" or "lower".

The smallest game in which an agent has to carry what it heard through several turns. Optimal play is known exactly: halve what is left.
"""

from __future__ import annotations

import random
import re
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

from sao.environment import Action, Context, Message, StepResult, Task
from sao.errors import ConfigError

GUESS = re.compile(r"\s*(?:I guess|My guess is)?\s*(\d{1,6})\.?\s*", re.ASCII | re.IGNORECASE)
HIGHER, LOWER, SAY_A_NUMBER = "higher", "lower", "say one number"
HELD_OUT_SHARE = 10  # one range in so many belongs to the held-out split
LARGEST_LOW = 99  # where a range may begin
SPANS = (3, 7, 15, 31, 63)  # numbers in a range, for a curriculum: with k turns 2^k - 1 is the most that can always be found
FAULTS = {"good": 0.3, "blind": 0.5, "wrong_way": 0.2}  # what the demonstrators of a warm start's second part do


def split_of(low: int, span: int) -> str:
    """`train` or `held_out`: a property of the range, so that in both splits every number of a range is equally likely."""
    return "held_out" if zlib.crc32(f"{low}/{span}".encode()) % HELD_OUT_SHARE == 0 else "train"


def win_rate(span: int, turns: int) -> float:
    """The best chance of finding one of `span` equally likely numbers in `turns` guesses: halving finds 2^turns - 1 of them."""
    return min(1.0, (2**turns - 1) / span)


def mean_turns(span: int) -> float:
    """Guesses that halving takes on average when there is no limit: a binary tree of `span` nodes, filled level by level."""
    depth, left, total = 1, span, 0
    while left > 0:
        here = min(left, 2 ** (depth - 1))
        total, left, depth = total + depth * here, left - here, depth + 1
    return total / span


class GuessEnvironment:
    """`task.payload` is {"low", "high", "secret"}.

    span: numbers in a range. turns: guesses before the game is lost; a turn that is not one number counts as a guess. Both bind the generator too.
    """

    def __init__(self, task: Task, *, span: int = 7, turns: int = 3) -> None:
        self.low, self.high, self.secret = (int(task.payload[key]) for key in ("low", "high", "secret"))
        self.left = turns
        self.turns = turns
        self.unread = 0

    def opening(self) -> list[Message]:
        return [
            {"role": "system", "content": f"Guess my number in {self.turns} guesses."},
            {"role": "user", "content": f"It is from {self.low} to {self.high}."},
        ]

    def tools(self) -> Sequence[Mapping[str, Any]]:
        return ()

    async def reset(self, context: Context) -> Sequence[Message]:
        return self.opening()

    async def step(self, action: Action) -> StepResult:
        self.left -= 1
        said = self.hint(action.text)
        self.unread += said == SAY_A_NUMBER
        if said and self.left:
            return StepResult([{"role": "user", "content": said}])
        info = {"won": float(not said), "guesses": self.turns - self.left, "unread": self.unread}
        return StepResult(reward=float(not said), terminated=True, info=info)

    def hint(self, text: str) -> str:
        """What a guess is answered with; nothing when it is right."""
        guess = GUESS.fullmatch(text)
        if guess is None:
            return SAY_A_NUMBER
        number = int(guess[1])
        return "" if number == self.secret else HIGHER if number < self.secret else LOWER

    async def close(self) -> None:
        return None

    @classmethod
    def levels(cls, *, span: int = 7, turns: int = 3) -> Sequence[int]:
        """Spans for a curriculum, from the easiest."""
        return SPANS

    @classmethod
    def optimum(cls, *, span: int = 7, turns: int = 3) -> float:
        """Expected reward of the best play."""
        return win_rate(span, turns)

    @classmethod
    def generate_payload(cls, rng: random.Random, split: str, *, span: int = 7, turns: int = 3, level: int | None = None) -> dict[str, Any]:
        """Draw one game of `split` (train | held_out). level: a span that takes the place of `span`."""
        if split not in ("train", "held_out"):
            raise ValueError(f"split {split!r} is not train or held_out")
        span = span if level is None else level
        if not 2 <= span <= 10_000 or turns < 1:
            raise ConfigError(f"env.args.span={span} must lie between 2 and 10000, and turns={turns} be at least 1")
        while True:
            low = rng.randint(1, LARGEST_LOW)
            if split_of(low, span) == split:
                return {"low": low, "high": low + span - 1, "secret": rng.randint(low, low + span - 1)}

    @classmethod
    def demonstration(cls, rng: random.Random, clean: bool, *, span: int = 7, turns: int = 3) -> list[Message]:
        """One game for `sao warmstart`. clean: by halving. Otherwise by the mixture FAULTS: guesses within the range at random (blind), or against the hint."""
        kind = "good" if clean else rng.choices(list(FAULTS), list(FAULTS.values()))[0]
        payload = cls.generate_payload(rng, "train", span=span, turns=turns)
        game = cls(Task("demonstration", "guess", payload), span=span, turns=turns)
        messages, low, high = game.opening(), game.low, game.high
        for _ in range(turns):
            guess = (low + high) // 2 if kind != "blind" else rng.randint(game.low, game.high)
            said = game.hint(str(guess))
            messages.append({"role": "assistant", "content": str(guess)})
            if not said:
                break
            messages.append({"role": "user", "content": said})
            up = (said == HIGHER) != (kind == "wrong_way")
            low, high = (min(guess + 1, high), high) if up else (low, max(guess - 1, low))
        return messages if messages[-1]["role"] == "assistant" else messages[:-1]
