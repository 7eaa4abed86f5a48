"""What stands between new weights and the engines: shadow evaluation and roll-back.

The loop asks the guard about every version before it is published. The guard refuses one

    because its held-out mean, measured in borrowed engines while nobody is served by it, is `online.shadow_drop` or more below that of the weights
    that serve (on the same tasks: those weights are measured first where they have not been, at the beginning, in a new phase, after a refusal), or
    because the mean of the last `online.rollback_window` training rewards is `online.rollback_fall` or more below its best.

Either way the refused weights never serve, and the learner goes back to the last good ones: policy, critic and both optimisers, from `checkpoints/good`.
Version numbers do not go back: the restored weights take the number of the refused ones (under a new incarnation, because a borrowed engine has seen
it), so the staleness of what is in flight is what it would have been, and nothing is thrown away for it. The batches trained since are dropped in the
ledger as `rolled_back`, and the loop takes a checkpoint, so that no recovery trains them again.

What is kept is whole or not there, and a restart takes up a candidate only if it is the one the checkpoint speaks of: a later sitting may have kept
another since, or made it good.

A version is kept as a candidate when it passes, and becomes good when `rollback_window` rewards of episodes sampled entirely under it or later have a
mean that is no fall; without roll-back on reward, at once.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import time
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from sao.config import Config, OnlineConfig
from sao.environment import Task
from sao.errors import CheckpointFailure
from sao.evals.heldout import EvalResult
from sao.ledger import Ledger
from sao.runtime.checkpoints import STATE, Checkpoints, damage
from sao.tasks.source import TaskSource
from sao.trajectory import TrajectoryMeta

KEEP_EVERY = 5  # versions between states kept to go back to


class FallWatch:
    """Moving mean of the last `window` rewards against its best. Plain object, in the order rewards are trained."""

    def __init__(self, window: int, fall: float) -> None:
        self.window, self.fall = window, fall
        self.rewards: deque[float] = deque(maxlen=window)
        self.best: float | None = None

    @property
    def mean(self) -> float | None:
        """None until the window is full."""
        return sum(self.rewards) / len(self.rewards) if len(self.rewards) == self.window else None

    def see(self, rewards: Sequence[float]) -> None:
        self.rewards.extend(rewards)
        mean = self.mean
        if mean is not None and (self.best is None or mean > self.best):
            self.best = mean

    def is_fall(self, mean: float | None) -> bool:
        """Whether a mean is so far below the best that it counts; never when the watch is off or has no best yet."""
        return self.fall > 0 and mean is not None and self.best is not None and self.best - mean >= self.fall

    @property
    def fallen(self) -> bool:
        return self.is_fall(self.mean)

    def reset(self) -> None:
        """Begin anew: what was reached before is no measure any more."""
        self.rewards.clear()
        self.best = None


class Shadow(Protocol):
    """Evaluates in borrowed engines (`sao.evals.schedule.Evaluations`)."""

    async def shadow(self, tasks: Sequence[Task], version: int, weights: Any) -> EvalResult:
        """The weights of `version`, which do not serve yet."""
        ...

    async def serving(self, tasks: Sequence[Task]) -> EvalResult:
        """The weights that serve."""
        ...

    async def served(self) -> None: ...


class KeptLearner(Protocol):
    """What the guard needs of the learner (`sao.runtime.remote.RemoteLearner`)."""

    async def save(self, directory: str, buffered: Sequence[Any]) -> None: ...

    async def go_back(self, directory: str, version: int) -> None: ...


class Reporter(Protocol):
    def event(self, text: str) -> None: ...

    def shadow(self, result: EvalResult, against: float, passed: bool) -> None: ...


class Guard:
    """One per run. checkpoints: the run's. tasks: held-out tasks of every phase. `shadow` is set before the first version comes."""

    shadow: Shadow

    def __init__(
        self, online: OnlineConfig, learner: KeptLearner, ledger: Ledger, reporter: Reporter, tasks: Sequence[Task], checkpoints: Checkpoints
    ) -> None:
        self.online = online
        self.learner, self.ledger, self.reporter = learner, ledger, reporter
        self.ledger.undoable = []
        self.tasks = tasks
        self.checkpoints = checkpoints
        self.good, self.candidate = checkpoints.folder / "good", checkpoints.folder / "candidate"
        self.watch = FallWatch(online.rollback_window, online.rollback_fall)
        self.counts: Counter[str] = Counter({"refused": 0, "rolled_back": 0})
        self.serving: tuple[str, float] | None = None  # phase and held-out mean of the weights that serve
        self.phase = ""
        self.kept_version = 0
        self._proof: deque[float] = deque(maxlen=online.rollback_window)  # rewards under the candidate
        self._pending: int | None = None
        self._shadow_s = 0.0

    async def begin(self, version: int) -> None:
        """Keep what the run starts with, unless an earlier sitting has kept something."""
        good, candidate = await asyncio.to_thread(_version_in, self.good), await asyncio.to_thread(_version_in, self.candidate)
        if self._pending != candidate:
            self._pending = None
        if good is not None:
            return
        if candidate is not None:  # cut off while it took the place of the one before
            _replace(self.candidate, self.good)
            self._pending = None
        else:
            await self._keep(self.good, version)

    async def critic_ready(self, version: int) -> None:
        """The steps of the critic alone are done: what the run started with is kept again, or going back to it would undo them for good."""
        if await asyncio.to_thread(_version_in, self.good) == version:
            await self._keep(self.good, version)

    def saw(self, batch: Sequence[TrajectoryMeta]) -> None:
        """A batch was trained."""
        if self.online.phases:
            self.phase = Counter(meta.workload for meta in batch).most_common(1)[0][0]
        self.watch.see([meta.reward for meta in batch])
        if self._pending is not None:
            self._proof.extend(meta.reward for meta in batch if meta.oldest_version >= self._pending)

    async def passes(self, version: int, weights: Any) -> bool:
        """Whether these weights may serve. weights: the learner's handle on them."""
        if version == 0:
            return True  # a resume before the first actor step: nothing new
        if self.watch.fallen:
            self.counts["rolled_back"] += 1
            self.reporter.event(
                f"reward fell: {self.watch.mean:.3f} over the last {self.watch.window} rewards, best {self.watch.best:.3f}; "
                f"version {version} is undone (online.rollback_fall={self.online.rollback_fall:g})"
            )
            self.watch.reset()
            return False
        if self.online.shadow_drop > 0 and not await self._passes_shadow(version, weights):
            self.counts["refused"] += 1
            return False
        self._settle_candidate()
        if self._pending is None and version >= self.kept_version + KEEP_EVERY:
            self.kept_version = version
            self._proof.clear()
            try:
                await self._keep(self.candidate, version)
                self._pending = version
            except (CheckpointFailure, OSError) as error:
                self.reporter.event(f"version {version} could not be kept, a roll-back would go further back: {error}")
            self._settle_candidate()
        return True

    async def go_back(self, version: int) -> tuple[int, int]:
        """The learner holds the last good weights again, as `version`. Returns their own version, and how many episodes the ledger had trained then."""
        state = json.loads((self.good / STATE).read_text())
        await self.learner.go_back(str(self.good), version)
        self.reporter.event(f"went back to the weights of version {state['version']}, which serve as version {version}")
        self.kept_version, self._pending = version, None
        self.serving = None
        self._proof.clear()
        return int(state["version"]), int(state["trained"])

    async def published(self) -> None:
        """The engines have what was decided; borrowed ones serve again."""
        await self.shadow.served()

    def metrics(self) -> dict[str, float]:
        """Counted since the run began; the mean is left out until its window is full, and where nobody watches it."""
        values = {f"online/{name}": float(count) for name, count in self.counts.items()}
        if self.online.rollback_fall > 0 and self.watch.mean is not None:
            values["online/reward_mean"] = self.watch.mean
        if self.online.shadow_drop > 0:
            values["timing_s/shadow"] = self._shadow_s
        return values

    def state_dict(self) -> dict[str, Any]:
        return {
            "counts": dict(self.counts),
            "rewards": list(self.watch.rewards),
            "best": self.watch.best,
            "phase": self.phase,
            "serving": self.serving,
            "kept_version": self.kept_version,
            "pending": self._pending,
            "proof": list(self._proof),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.counts = Counter(state["counts"])
        self.watch.reset()
        self.watch.rewards.extend(state["rewards"])
        self.watch.best = state["best"]
        self.phase = state["phase"]
        self.serving = tuple(state["serving"]) if state["serving"] else None
        self.kept_version, self._pending = state["kept_version"], state["pending"]
        self._proof.clear()
        self._proof.extend(state["proof"])

    async def _passes_shadow(self, version: int, weights: Any) -> bool:
        """Measure `version` on the held-out tasks of the present phase, against the weights that serve."""
        started = time.monotonic()
        tasks = [task for task in self.tasks if task.workload == self.phase] if self.online.phases else self.tasks
        tasks = tasks[: self.online.shadow_tasks]
        if self.serving is None or self.serving[0] != self.phase:
            self.serving = (self.phase, (await self.shadow.serving(tasks)).mean)
        against = self.serving[1]
        result = await self.shadow.shadow(tasks, version, weights)
        self._shadow_s = time.monotonic() - started
        passed = against - result.mean < self.online.shadow_drop
        self.reporter.shadow(result, against, passed)
        if passed:
            self.serving = (self.phase, result.mean)
        return passed

    def _settle_candidate(self) -> None:
        """Make the candidate good once it has proved itself; let it go when it proved bad."""
        if self._pending is None:
            return
        if self.online.rollback_fall > 0:
            if len(self._proof) < self.watch.window:
                return
            if self.watch.is_fall(sum(self._proof) / len(self._proof)):
                self._pending = None
                return
        self._pending = None
        _replace(self.candidate, self.good)
        self.ledger.for_good(json.loads((self.good / STATE).read_text())["trained"])

    async def _keep(self, folder: Path, version: int) -> None:
        """The learner's state, and how many episodes are trained in it; whole or not at all."""
        state = {"version": version, "trained": self.ledger.trained}
        scratch = await asyncio.to_thread(self.checkpoints.begin, folder.name)
        await self.learner.save(str(scratch), [])
        await asyncio.to_thread(self.checkpoints.commit, scratch, state)


def make_guard(
    config: Config, learner: KeptLearner, ledger: Ledger, reporter: Reporter, source: TaskSource, checkpoints: Checkpoints
) -> Guard | None:
    """The guard that a configuration asks for, or None."""
    online = config.online
    if online.shadow_drop == 0 and online.rollback_fall == 0:
        return None
    regimes = len({phase.name for phase in online.phases}) or 1
    tasks = source.held_out(online.shadow_tasks * regimes) if online.shadow_drop > 0 else []
    return Guard(online, learner, ledger, reporter, tasks, checkpoints)


def _version_in(folder: Path) -> int | None:
    """The version that a kept state is of; None when there is none, or it is not whole. Reads every file."""
    if damage(folder) is not None:
        return None
    return int(json.loads((folder / STATE).read_text())["version"])


def _replace(source: Path, target: Path) -> None:
    """Move a folder over another, which is never there in part: a crash leaves both, or `source` alone, or the new target."""
    old = target.with_name(f".old-{target.name}")
    shutil.rmtree(old, ignore_errors=True)
    if target.exists():
        os.replace(target, old)
    os.replace(source, target)
    shutil.rmtree(old, ignore_errors=True)
