"""reasoning-gym: a question of one of its data sets, an answer, its score (github.com/open-thought/reasoning-gym, Apache-2.0).

A task is a seed; the item is made from it where the episode runs. Seeds of training, of held-out tasks and of worked examples lie in ranges of their own.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sao.config import RewardConfig
from sao.environment import Action, Context, Message, StepResult, Task
from sao.envs.reasoning_gym.scoring import Generator, at_once, extract, generator
from sao.errors import ConfigError
from sao.rewards.runner import close_shared, shared_runner

SYSTEM = "Answer the question. Give the answer alone on the last line, or between <answer> and </answer>."
SEEDS = {
    "train": range(0, 2**30),
    "held_out": range(2**30, 2**31 - 2**20),
    "shots": range(2**31 - 2**20, 2**31 - 2**19),
    "majority": range(2**31 - 2**19, 2**31),
}
MAJORITY_OF, MAJORITY_S = 128, 2.0  # items in which the commonest answer is looked for, and the seconds that may take
FULL = 1.0 - 1e-9
GRADER = "sao.envs.reasoning_gym.grader:score"


class ReasoningGymEnvironment:
    """`task.payload` is {"seed"}.

    dataset, config: of reasoning-gym. partial: keep partial credit; false pays 1 for a full score and else nothing. shots: items with their answers that
    go before the question, the same ones in every episode. timeout_s: of one score; a scorer that takes longer fails the episode (reward_timeout).
    """

    def __init__(
        self,
        task: Task,
        *,
        dataset: str = "chain_sum",
        config: Mapping[str, Any] | None = None,
        partial: bool = True,
        shots: int = 0,
        system: str = SYSTEM,
        timeout_s: float = 10.0,
    ) -> None:
        self.seed = int(task.payload["seed"])
        self.dataset, self.config = dataset, dict(config or {})
        self.partial, self.shots, self.system, self.timeout_s = partial, shots, system, timeout_s
        self.entry: Mapping[str, Any] = {}
        self.majority = Majority("", 0.0)

    async def reset(self, context: Context) -> Sequence[Message]:
        return await asyncio.to_thread(self._open)  # some items take a second to make

    def _open(self) -> list[Message]:
        made = generator(self.dataset, self.config)
        self.entry = made.entry(self.seed)
        self.majority = majority(made)
        messages: list[Message] = [{"role": "system", "content": self.system}] if self.system else []
        for seed in SEEDS["shots"][: self.shots]:
            example = made.entry(seed)
            messages += [{"role": "user", "content": example["question"]}, {"role": "assistant", "content": str(example["answer"]).strip()}]
        return [*messages, {"role": "user", "content": self.entry["question"]}]

    async def step(self, action: Action) -> StepResult:
        oracle = self.entry["answer"]
        answer = extract(action.text, lines=oracle is None or "\n" in str(oracle).strip())
        score = at_once(self.dataset, answer, self.entry)
        if score is None:
            runner = shared_runner(RewardConfig(GRADER, mode="process", timeout_s=self.timeout_s))
            score = await runner.score(answer, {"dataset": self.dataset, "config": self.config, "entry": dict(self.entry)})
        reward = score if self.partial else float(score >= FULL)
        info = {
            "score": score,
            "right": float(score >= FULL),
            "majority_accuracy": self.majority.share,
            "said_majority": float(answer == self.majority.answer),
        }
        return StepResult(reward=reward, terminated=True, info=info)

    def tools(self) -> Sequence[Mapping[str, Any]]:
        return ()

    async def close(self) -> None:
        """Nothing belongs to the episode: generator and grader outlive it."""

    @classmethod
    async def shutdown(cls) -> None:
        await asyncio.to_thread(close_shared)

    @classmethod
    def generate_payload(
        cls,
        rng: random.Random,
        split: str,
        *,
        dataset: str = "chain_sum",
        config: Mapping[str, Any] | None = None,
        partial: bool = True,
        shots: int = 0,
        system: str = SYSTEM,
        timeout_s: float = 10.0,
    ) -> dict[str, Any]:
        """Draw one seed of `split` (train | held_out). Raises ConfigError for what the data set does not take."""
        if split not in ("train", "held_out"):
            raise ValueError(f"split {split!r} is not train or held_out")
        made = generator(dataset, config or {})
        if not 0 <= shots <= 64:
            raise ConfigError(f"env.args.shots={shots} must lie between 0 and 64")
        if shots and made.entry(SEEDS["shots"][0])["answer"] is None:
            raise ConfigError(f"env.args.shots={shots}, but {dataset} has no answers to show; set it to 0")
        return {"seed": rng.choice(SEEDS[split])}

    @classmethod
    def demonstration(
        cls,
        rng: random.Random,
        clean: bool,
        *,
        dataset: str = "chain_sum",
        config: Mapping[str, Any] | None = None,
        partial: bool = True,
        shots: int = 0,
        system: str = SYSTEM,
        timeout_s: float = 10.0,
    ) -> list[Message]:
        """A question and its answer; unless clean, half of the answers are another question's."""
        payload = cls.generate_payload(rng, "train", dataset=dataset, config=config, shots=shots)
        environment = cls(Task("demonstration", "reasoning_gym", payload), dataset=dataset, config=config, shots=shots, system=system)
        messages = environment._open()
        other = not clean and rng.random() < 0.5
        entry = generator(dataset, config or {}).entry(rng.choice(SEEDS["train"])) if other else environment.entry
        if entry["answer"] is None:
            raise ConfigError(f"env.args.dataset={dataset} has no answers to imitate; set model.warmstart=false and name a model in model.path")
        return [*messages, {"role": "assistant", "content": str(entry["answer"]).strip()}]


@dataclass(frozen=True)
class Majority:
    """The commonest answer of a data set, and how often it is right: what a policy earns that looks at no question."""

    answer: str
    share: float


_majorities: dict[Generator, Majority] = {}


def majority(made: Generator) -> Majority:
    """Over items of seeds that nothing else draws: MAJORITY_OF, or as many as are made in MAJORITY_S. Found once in a process."""
    if made not in _majorities:
        until, answers = time.monotonic() + MAJORITY_S, Counter[str]()
        for seed in SEEDS["majority"][:MAJORITY_OF]:
            answers[str(made.entry(seed)["answer"]).strip()] += 1
            if time.monotonic() > until:
                break
        answer, count = answers.most_common(1)[0]
        _majorities[made] = Majority(answer, count / answers.total())
    return _majorities[made]
