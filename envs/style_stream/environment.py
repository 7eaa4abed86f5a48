"""The style stream: a prompt asks for one line about a topic in ONE of several styles, and only one of them is rewarded.

Which one is not said. Reward = quality x style, each 0 or 1: by the rules of `styles.py`, or by a judge of the user's (`reward.function`), which
is awaited with a time limit and whose failures are typed and never a reward. As a stream (`sao online`) the rewarded style changes without notice.
"""

from __future__ import annotations

import random
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

from sao.environment import Action, Context, Message, StepResult, Task
from sao.envs.style_stream.styles import STYLES, check_candidates, check_style, is_good, style_of
from sao.rewards.preflight import reward_config
from sao.rewards.runner import close_shared, shared_runner

ADJECTIVES = ["quiet", "old", "little", "golden", "frozen", "hidden", "lonely", "brave", "silver", "gentle", "wild", "distant"]
NOUNS = ["river", "moon", "cat", "lantern", "winter", "garden", "tower", "sparrow", "kettle", "harbor", "mountain", "letter"]
CANDIDATES = ("academic", "cute", "chuunibyou")
HELD_OUT_SHARE = 5  # one topic in so many belongs to the held-out split
FAULTS = ("topic", "mixed", "end", "short")
FAULT_SHARE = 0.3  # of the mixture that a warm start ends with


def split_of(topic: str) -> str:
    """`train` or `held_out`: a property of the topic itself."""
    return "held_out" if zlib.crc32(topic.encode()) % HELD_OUT_SHARE == 0 else "train"


TOPICS = {split: [f"{a} {n}" for a in ADJECTIVES for n in NOUNS if split_of(f"{a} {n}") == split] for split in ("train", "held_out")}


class StyleStreamEnvironment:
    """`task.payload` is {"topic", "style", "candidates"}; `style` is what is rewarded and never shown. `flipped` (reward noise) turns the reward over.

    reward: the run's `reward` section where reward.function names a judge: `async def judge(completion, row)` with the payload as row.
    """

    def __init__(
        self,
        task: Task,
        *,
        style: str = "cute",
        candidates: Sequence[str] = CANDIDATES,
        noise: float = 0.0,
        reward: Mapping[str, Any] | None = None,
    ) -> None:
        self.payload = task.payload
        self.topic, self.style = str(task.payload["topic"]), check_style(task.payload["style"], "style")
        self.candidates = check_candidates(task.payload["candidates"], self.style)
        self.judge = shared_runner(reward_config(dict(reward))) if reward else None

    def opening(self) -> list[Message]:
        system = f"Write one line on the topic in ONE of these styles: {', '.join(self.candidates)}."
        return [{"role": "system", "content": system}, {"role": "user", "content": f"topic: {self.topic}"}]

    def tools(self) -> Sequence[Mapping[str, Any]]:
        return ()

    async def reset(self, context: Context) -> Sequence[Message]:
        return self.opening()

    async def step(self, action: Action) -> StepResult:
        if self.judge is not None:
            reward, info = await self.judge.score(action.text, self.payload, self.opening()), {}
        else:
            written, good = style_of(action.text), is_good(action.text, self.topic)
            reward = float(good and written == self.style)
            info = {f"style/{name}": float(good and written == name) for name in STYLES} | {"quality": float(good)}
        return StepResult(reward=1.0 - reward if self.payload.get("flipped") else reward, terminated=True, info=info)

    async def close(self) -> None:
        return None

    @classmethod
    async def shutdown(cls) -> None:
        """Called when a worker stops: ends the judge's processes."""
        close_shared()

    @classmethod
    def generate_payload(
        cls, rng: random.Random, split: str, *, style: str = "cute", candidates: Sequence[str] = CANDIDATES, noise: float = 0.0
    ) -> dict[str, Any]:
        """Draw one task of `split` (train | held_out). noise: share of training tasks whose reward is turned over."""
        style = check_style(style, "style")
        if not 0 <= noise <= 0.5:
            raise ValueError(f"noise={noise} must lie in [0, 0.5]")
        payload: dict[str, Any] = {"topic": rng.choice(TOPICS[split]), "style": style, "candidates": list(check_candidates(candidates, style))}
        if split == "train" and rng.random() < noise:
            payload["flipped"] = True
        return payload

    @classmethod
    def optimum(
        cls, *, style: str = "cute", candidates: Sequence[str] = CANDIDATES, noise: float = 0.0, reward: Mapping[str, Any] | None = None
    ) -> float | None:
        """Expected reward of a good line in the rewarded style; None with a judge, whose scale is its own."""
        return None if reward else 1.0 - noise

    @classmethod
    def demonstration(
        cls, rng: random.Random, clean: bool, *, style: str = "cute", candidates: Sequence[str] = CANDIDATES, noise: float = 0.0
    ) -> list[Message]:
        """One conversation for `sao warmstart`: any three styles on offer, one of them taken at random, so that no style is preferred.

        Every style is learned, whatever the arguments say: a stream may ask for it later. clean: a good line; otherwise three in ten have a fault.
        """
        offered = rng.sample(list(STYLES), 3)
        payload = cls.generate_payload(rng, "train", style=offered[0], candidates=offered)
        environment = cls(Task("demonstration", "style_stream", payload))
        line = write(rng.choice(offered), environment.topic, rng)
        if not clean and rng.random() < FAULT_SHARE:
            line = spoil(line, environment.topic, rng)
        return [*environment.opening(), {"role": "assistant", "content": line}]


def write(style: str, topic: str, rng: random.Random) -> str:
    """A good line of a style."""
    return rng.choice(STYLES[style].templates).format(topic=topic)


def spoil(line: str, topic: str, rng: random.Random) -> str:
    """The line with one fault that costs its reward: another topic, a second style, no end mark, too few words."""
    fault = rng.choice(FAULTS)
    if fault == "topic":
        return line.replace(topic, rng.choice([t for t in TOPICS["train"] if t != topic]))
    if fault == "mixed":
        return f"{line[:-1]} {rng.choice(['nya~', 'destiny!', 'alas.', 'therefore.'])}"
    if fault == "end":
        return line[:-1]
    return f"{topic}{line[-1]}"
