"""The rule stream: two numbers, a hidden rule, one answer. f_z(a, b) is right or wrong exactly, and z is never observed but through reward.

Each rule copies one of the two numbers, forwards or backwards; a and b are chosen so that no two rules ever agree. A policy that knows z earns 1
on every prompt, one that does not can only guess among the rules: the optimum is exact, and so is the regret. As a stream (`sao online`) z changes
without notice and returns, which shows whether a policy that has seen a regime before comes back to it sooner.
"""

from __future__ import annotations

import difflib
import random
import re
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from sao.environment import Action, Context, Message, StepResult, Task

SYSTEM = "Apply the hidden rule."
RULES: dict[str, Callable[[str, str], str]] = {
    "first": lambda a, b: a,
    "second": lambda a, b: b,
    "first_reversed": lambda a, b: a[::-1],
    "second_reversed": lambda a, b: b[::-1],
}
ANSWER = re.compile(r"\s*([1-9]{2})\s*", re.ASCII)
HELD_OUT_SHARE = 10  # one pair in so many belongs to the held-out split
FAULT_SHARE = 0.2  # of the mixture that a warm start ends with: an answer no rule gives


def split_of(a: str, b: str) -> str:
    """`train` or `held_out`: a property of the pair itself."""
    return "held_out" if zlib.crc32(f"{a} {b}".encode()) % HELD_OUT_SHARE == 0 else "train"


def answers(a: str, b: str) -> dict[str, str]:
    """f_z(a, b) of every rule z; a, b are two digits from 1 to 9 each."""
    return {name: rule(a, b) for name, rule in RULES.items()}


class RuleStreamEnvironment:
    """`task.payload` is {"a", "b", "rule"}: two-digit texts, and the rule that is rewarded. `flipped` (reward noise) turns the reward over."""

    def __init__(self, task: Task, *, rule: str = "first", noise: float = 0.0) -> None:
        self.a, self.b, self.rule = (str(task.payload[key]) for key in ("a", "b", "rule"))
        self.flipped = bool(task.payload.get("flipped"))

    def opening(self) -> list[Message]:
        return [{"role": "system", "content": SYSTEM}, {"role": "user", "content": f"{self.a} {self.b}"}]

    def tools(self) -> Sequence[Mapping[str, Any]]:
        return ()

    async def reset(self, context: Context) -> Sequence[Message]:
        return self.opening()

    async def step(self, action: Action) -> StepResult:
        said = ANSWER.fullmatch(action.text)
        given = answers(self.a, self.b)
        reward = float(said is not None and said[1] == given[self.rule])
        info = {f"rule/{name}": float(said is not None and said[1] == answer) for name, answer in given.items()}
        return StepResult(reward=1.0 - reward if self.flipped else reward, terminated=True, info=info)

    async def close(self) -> None:
        return None

    @classmethod
    def generate_payload(cls, rng: random.Random, split: str, *, rule: str = "first", noise: float = 0.0) -> dict[str, Any]:
        """Draw one task of `split` (train | held_out). noise: share of training tasks whose reward is turned over."""
        if rule not in RULES:
            near = difflib.get_close_matches(str(rule), RULES, n=1)
            raise ValueError(f"there is no rule {rule!r}, " + (f"did you mean {near[0]!r}?" if near else f"there are {', '.join(RULES)}"))
        if not 0 <= noise <= 0.5:
            raise ValueError(f"noise={noise} must lie in [0, 0.5]")
        while True:
            a, b = (f"{rng.randint(1, 9)}{rng.randint(1, 9)}" for _ in range(2))
            if len(set(answers(a, b).values())) == len(RULES) and split_of(a, b) == split:
                break
        payload: dict[str, Any] = {"a": a, "b": b, "rule": rule}
        if split == "train" and rng.random() < noise:
            payload["flipped"] = True
        return payload

    @classmethod
    def optimum(cls, *, rule: str = "first", noise: float = 0.0) -> float:
        """Expected reward of the right answer, to any prompt."""
        return 1.0 - noise

    @classmethod
    def demonstration(cls, rng: random.Random, clean: bool, *, rule: str = "first", noise: float = 0.0) -> list[Message]:
        """One conversation for `sao warmstart`: a rule taken at random, whatever the arguments say; unless clean, two in ten answers are no rule's."""
        payload = cls.generate_payload(rng, "train")
        environment = cls(Task("demonstration", "rule_stream", payload))
        text = rng.choice(list(answers(environment.a, environment.b).values()))
        if not clean and rng.random() < FAULT_SHARE:
            text = f"{rng.randint(1, 9)}{rng.randint(1, 9)}"
        return [*environment.opening(), {"role": "assistant", "content": text}]
