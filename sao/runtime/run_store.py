"""What a run has on disk to go on from: its newest checkpoint, and the batches trained since."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

from sao.errors import CheckpointFailure, DataError, LearnerFailure, UserError
from sao.report.steps import numbered, step_name
from sao.report.store import read_file, step_path, stored_steps
from sao.rollout.staleness import Finished
from sao.runtime.checkpoints import BUFFER, FINAL, Checkpoint, Checkpoints
from sao.runtime.models import ModelFacts, difference, facts
from sao.trajectory import Trajectory

log = logging.getLogger(__name__)


class RunStore:
    """`keep_all` false: the files of batches that every kept checkpoint contains are removed."""

    def __init__(self, run_dir: Path, keep: int, *, keep_all: bool) -> None:
        self.run_dir = run_dir
        self.checkpoints = Checkpoints(run_dir, keep)
        self.keep_all = keep_all

    def checkpoint(self) -> Checkpoint | None:
        return self.checkpoints.latest(log.warning)

    def checkpoint_of(self, model: ModelFacts) -> Checkpoint | None:
        """The checkpoint the run goes on from. Reads only; raises UserError when another version or another model made it."""
        found = self.checkpoint()
        unlike = difference(facts(str(found.path / "policy")), model) if found else None
        if found and unlike:
            raise UserError(
                f"{found.path} is of another model than {model.path}: {unlike}; put back the model the run was started with, "
                "or take this checkpoint away to use the one before it"
            )
        return found

    def batch(self, step: int) -> list[Trajectory]:
        """The trajectories of a trained batch, equal to those the learner was given. Raises DataError when there is no such file."""
        return [episode.trajectory for episode in read_file(step_path(self.run_dir, step))]

    def handles(self, step: int) -> list[Any]:
        """The same as references in Ray's object store."""
        return [item.handle for item in put(self.batch(step))]

    def buffered(self, checkpoint: Checkpoint) -> list[Finished[Any]]:
        return put([episode.trajectory for episode in read_file(checkpoint.path / BUFFER)])

    def later_batches(self, first: int) -> list[list[Finished[Any]]]:
        """The batches of the steps `first`, first + 1, ... as far as they follow each other and can be read; files beyond are removed."""
        found: list[list[Finished[Any]]] = []
        there = set(stored_steps(self.run_dir))
        step = first
        while step in there:
            try:
                found.append(put(self.batch(step)))
            except DataError as error:
                log.warning("the run goes on from step %d: %s", step, error)
                break
            step += 1
        for beyond in sorted(s for s in there if s >= step):
            step_path(self.run_dir, beyond).unlink()
        return found

    def prune(self) -> None:
        """Remove what no checkpoint needs, when the run does not keep its trajectories."""
        kept = numbered(self.checkpoints.folder)
        if self.keep_all or not kept:
            return
        for step in stored_steps(self.run_dir):
            if step < min(kept):
                step_path(self.run_dir, step).unlink(missing_ok=True)


def put(trajectories: Sequence[Trajectory]) -> list[Finished[Any]]:
    """Trajectories as the loop holds them: metadata, and a reference to the arrays in Ray's object store."""
    import ray

    return [Finished(trajectory.meta(), ray.put(trajectory)) for trajectory in trajectories]


class SavingLearner(Protocol):
    """What a checkpoint needs of the learner (`sao.runtime.remote.RemoteLearner`)."""

    async def save(self, directory: str, buffered: Sequence[Any]) -> None:
        """Write the learner's part, and the trajectories behind `buffered`, into `directory`. Raises CheckpointFailure when it cannot be written."""
        ...

    async def export(self, directory: str) -> None:
        """Write the models alone into `directory`. Raises LearnerFailure when they cannot be written."""
        ...


class RunCheckpointer:
    """The loop's Checkpointer. A checkpoint that cannot be written is reported and left out: the one before it stays, and the next is tried in its time."""

    def __init__(self, store: RunStore, learner: SavingLearner, warn: Callable[[str], None]) -> None:
        self.store = store
        self.learner = learner
        self.warn = warn
        self.written = 0
        self.failed = 0

    async def save(self, state: dict[str, Any], buffered: Sequence[Any], *, needed: bool = False) -> None:
        """needed: raises what kept it from being written, CheckpointFailure or OSError."""
        step = state["batches_done"]
        checkpoints = self.store.checkpoints
        scratch = checkpoints.folder
        try:
            scratch = await asyncio.to_thread(checkpoints.begin, step_name(step))
            await self.learner.save(str(scratch), buffered)
            await asyncio.to_thread(checkpoints.commit, scratch, state)
            await asyncio.to_thread(self.store.prune)
            self.written += 1
        except (CheckpointFailure, OSError) as error:
            self.failed += 1
            if scratch != checkpoints.folder:
                checkpoints.abandon(scratch)
            if needed:
                raise
            self.warn(f"checkpoint of step {step} failed, the run goes on with the one before it: {error}")

    async def final(self, state: dict[str, Any]) -> None:
        """The trained models under FINAL, whole or as it was before. Raises LearnerFailure or OSError: without them the run has not ended."""
        checkpoints = self.store.checkpoints
        scratch = await asyncio.to_thread(checkpoints.begin, FINAL)
        try:
            await self.learner.export(str(scratch))
            await asyncio.to_thread(checkpoints.commit, scratch, state)
        except (LearnerFailure, OSError):
            checkpoints.abandon(scratch)
            raise
