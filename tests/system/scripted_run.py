"""`sao` with a scripted engine in the place of vLLM, everything else real: Ray, workers, reward processes, learner, run folder.

For fault tests only. A run starts in seconds, and its episodes are a pure function of their prompts, so that two runs at staleness bound 0 have the
same weights to the last bit. Use: python -m tests.system.scripted_run train ... (the arguments of `sao`).
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from sao.environment import Action, StepResult
from sao.envs.single_turn.environment import SingleTurnEnvironment
from sao.loop import TrainingLoop
from sao.runtime import checkpoints, cluster, sweeper
from sao.runtime.actors import EngineActor
from sao.runtime.remote import RemoteLearner

TOKEN_S = 0.004
WITHOUT = "SAO_TEST_WITHOUT"  # in the environment: the guard to leave out, a key of GUARDS


class ScriptedEngineActor(EngineActor):
    """The engine actor of a run, with `ScriptedEngine` inside."""

    def __init__(self, name: str, model_path: str, config: Any, run_dir: str, seed: int, incarnation: int) -> None:
        from sao.inference.scripted import ScriptedEngine
        from sao.runtime.actors import _set_up, thread_environment

        _set_up(name, run_dir, thread_environment(1))
        started = time.monotonic()
        vocabulary = json.loads((Path(model_path) / "config.json").read_text())["vocab_size"]
        self.engine = ScriptedEngine(name, incarnation=incarnation, vocabulary=vocabulary, token_s=lambda request: TOKEN_S, publish_s=0.02)
        self.start_s = time.monotonic() - started


class Poison(SingleTurnEnvironment):
    """One task in 61 takes its process with it."""

    async def step(self, action: Action) -> StepResult:
        if int(self.row["answer"]) % 61 == 7:
            os._exit(139)
        return await super().step(action)


class Walk(SingleTurnEnvironment):
    """Ten turns before the one that counts. One task holds the event loop for a moment, and another for ever."""

    turns = 0

    async def step(self, action: Action) -> StepResult:
        self.turns += 1
        number = int(self.row["answer"])
        while number == 20 or (number == 3 and self.turns == 2):
            time.sleep(0.8)  # noqa: ASYNC251 - the fault itself
            if number == 3:
                break
        if self.turns > 10:
            return await super().step(action)
        return StepResult([{"role": "user", "content": f"number {number + self.turns}"}])


def parity(completion: str, row: dict[str, Any]) -> float:
    """Something for a critic to learn from: a property of the text."""
    return float(sum(map(ord, completion)) % 2)


_strays: list[subprocess.Popen[bytes]] = []


def stray(completion: str, row: dict[str, Any]) -> float:
    """`parity`, by a function that leaves a process of its own session behind."""
    if not _strays:
        _strays.append(subprocess.Popen(["sleep", "600"], start_new_session=True))
    return parity(completion, row)


def options(folder: Path, *, steps: int, batch: int = 8, staleness: int = 0) -> list[str]:
    """Arguments of a run whose tasks are rows of a file in `folder`, made when it is not there."""
    data = folder / "tasks.jsonl"
    if not data.exists():
        data.write_text("".join(json.dumps({"prompt": f"number {i}", "answer": str(i)}) + "\n" for i in range(5000)))
    return [
        "model=demo", "model.warmstart=false", "model.factory_args.environment=sao.envs.calculator.environment:CalculatorEnvironment", "env=single_turn",
        f"data.path={data}", "reward=tests.system.scripted_run:parity", f"train.steps={steps}", f"train.batch_size={batch}",
        f"rollout.staleness={staleness}", "critic.critic_only_steps=1", "algo.eps_low=1.0", "algo.eps_high=1e9", "optim.policy.lr=1e-3",
        "optim.critic.lr=1e-3", "rollout.max_turn_tokens=12", "rollout.max_tokens=128", "engine.max_model_len=128", "run.progress=plain",
        "logger.wandb=disabled", "logger.report=false", "checkpoint.every=4", "launcher.silence_s=5", "launcher.restarts=1000",
    ]  # fmt: skip


async def _never(*_: Any) -> None:
    await asyncio.Event().wait()


async def _empty_learner(self: RemoteLearner, actor: Any) -> None:
    self._current = actor


def _forget_cursor(self: TrainingLoop, *args: Any) -> None:
    before = self.source.state_dict()
    _load(self, *args)
    self.source.load_state_dict(before)


_load = TrainingLoop.load_state_dict

# What a fault test relies on, by name: the object, its attribute, and what stands in its place when the guard is removed.
GUARDS: dict[str, tuple[Any, str, Any]] = {
    "signs of life": (cluster.Cluster, "_watch_one", _never),
    "a replaced learner is restored": (RemoteLearner, "_bring_up_to_date", _empty_learner),
    "a checkpoint is checked": (checkpoints, "damage", lambda path: None),
    "a checkpoint holds the task cursor": (TrainingLoop, "load_state_dict", _forget_cursor),
    "the sweeper": (sweeper, "start", lambda: None),
}


if __name__ == "__main__":
    from sao.cli import main
    from tests.system.scripted_run import ScriptedEngineActor as Actor  # by its importable name, so that Ray's workers find it

    cluster.EngineActor = Actor  # type: ignore[misc]
    if removed := os.environ.get(WITHOUT):
        setattr(*GUARDS[removed])
    os.environ["PYTHONPATH"] = os.pathsep.join([os.getcwd(), os.environ.get("PYTHONPATH", "")])
    sys.exit(main(sys.argv[1:]))
