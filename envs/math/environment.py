r"""Mathematics with a final answer: problems of a generator, or rows of a file in GSM8K's form; the answer is boxed and graded exactly."""

from __future__ import annotations

import asyncio
import difflib
import random
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

from sao.environment import Action, Context, Message, StepResult, Task
from sao.envs.math.families import FAMILIES, LEVELS, draw
from sao.errors import ConfigError
from sao.evals.symbolic import close_shared, doubt, grade
from sao.tasks.row_source import MESSAGES_KEY

SYSTEM = r"Solve the problem. Put the final answer in \boxed{}."
MOST_DRAWS = 10_000
HELD_OUT_SHARE = 10  # one problem in so many belongs to the held-out split
GOLD_MARK = "####"  # GSM8K: the number stands after it, on the last line of the worked solution


def split_of(question: str) -> str:
    """`train` or `held_out`: a property of the problem itself."""
    return "held_out" if zlib.crc32(question.encode()) % HELD_OUT_SHARE == 0 else "train"


def gold_of(answer: object) -> str:
    """The gold answer of a row: what stands after the last ####, or all of it. Raises ValueError when it cannot be graded against."""
    if not isinstance(answer, str | int) or isinstance(answer, bool):
        raise ValueError(f"the answer is of type {type(answer).__name__}, not a text or an integer")
    gold = str(answer).rpartition(GOLD_MARK)[2].strip()
    if fault := doubt(gold):
        raise ValueError(f"the gold answer {gold[:80]!r} cannot be graded against: {fault}")
    return gold


class MathEnvironment:
    """`task.payload` is {"question", "answer"}: generated (with its family and level), or a row whose answer is `... #### 42` or the number alone.

    families: which of the generator's; all when none is named. level: 1 to 5; all when none is given. system: the system text, empty for none.
    """

    def __init__(self, task: Task, *, families: Sequence[str] = (), level: int | None = None, system: str = SYSTEM) -> None:
        self.gold = gold_of(task.payload["answer"])
        asked = task.payload.get(MESSAGES_KEY) or [{"role": "user", "content": str(task.payload["question"])}]
        opened = asked[0]["role"] in ("system", "developer") or not system
        self.messages: list[Message] = [*([] if opened else [{"role": "system", "content": system}]), *asked]

    async def reset(self, context: Context) -> Sequence[Message]:
        return self.messages

    async def step(self, action: Action) -> StepResult:
        verdict = await grade(action.text, self.gold)
        info = {kind: float(verdict.kind == kind) for kind in ("correct", "wrong", "unparseable")}
        return StepResult(reward=float(bool(verdict)), terminated=True, info=info)

    def tools(self) -> Sequence[Mapping[str, Any]]:
        return ()

    async def close(self) -> None:
        return None

    @classmethod
    async def shutdown(cls) -> None:
        """End the graders of this worker; called once, after its last episode."""
        await asyncio.to_thread(close_shared)

    @classmethod
    def check_row(cls, row: Mapping[str, Any]) -> None:
        """Raises ValueError with what is wrong about a row's gold answer."""
        if "answer" not in row:
            raise ValueError("it has no column 'answer'")
        gold_of(row["answer"])

    @classmethod
    def levels(cls, *, families: Sequence[str] = (), level: int | None = None, system: str = SYSTEM) -> Sequence[int]:
        """For a curriculum, easiest first; none to choose among where one is set."""
        return LEVELS if level is None else ()

    @classmethod
    def generate_payload(
        cls, rng: random.Random, split: str, *, families: Sequence[str] = (), level: int | None = None, system: str = SYSTEM
    ) -> dict[str, Any]:
        """Draw one problem of `split` (train | held_out)."""
        if split not in ("train", "held_out"):
            raise ValueError(f"split {split!r} is not train or held_out")
        named = [families] if isinstance(families, str) else list(families)
        for family in named:
            if family not in FAMILIES:
                near = difflib.get_close_matches(str(family), FAMILIES, n=1)
                hint = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(FAMILIES)}"
                raise ConfigError(f"env.args.families names {family!r}, which there is not; {hint}")
        if level is not None and level not in LEVELS:
            raise ConfigError(f"env.args.level={level} must lie between {LEVELS[0]} and {LEVELS[-1]}")
        for _ in range(MOST_DRAWS):
            family = rng.choice(named or list(FAMILIES))
            chosen = rng.choice(LEVELS) if level is None else level
            problem = draw(rng, family, chosen)
            if split_of(problem.question) == split:
                return {"question": problem.question, "answer": str(problem.answer), "family": family, "level": chosen}
        raise ConfigError(f"env.args.families={named} and level={level} leave no {split} problem; name more families")

    @classmethod
    def demonstration(
        cls, rng: random.Random, clean: bool, *, families: Sequence[str] = (), level: int | None = None, system: str = SYSTEM
    ) -> list[Message]:
        """A problem and its boxed answer, without a solution: the form alone. Unless clean, half of the answers are a number near it."""
        payload = cls.generate_payload(rng, "train", families=families, level=level)
        answer = int(payload["answer"])
        said = answer if clean or rng.random() < 0.5 else max(0, answer + rng.choice((-10, -1, 1, 10)))
        messages = cls(Task("demonstration", "math", payload), system=system).messages
        return [*messages, {"role": "assistant", "content": f"\\boxed{{{said}}}"}]
