"""The samples of an evaluation that may be interrupted: one line each in samples.jsonl, counted once, whoever asks again.

The first line says what was asked (`identity`); a file of another question is refused. A sample is written when it is finished and graded, so what an
interruption cuts off is drawn again, under the same seed.
"""

from __future__ import annotations

import asyncio
import fcntl
import zlib
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import IO, Any

from sao.errors import SystemFailure, UserError
from sao.report.jsonl import open_for_append, read_jsonl, write_record
from sao.rollout.episodes import EpisodeFailure, EpisodeRequest, EpisodeRunner
from sao.rollout.staleness import Finished
from sao.trajectory import FinishReason, Trajectory, TrajectoryMeta

FILE = "samples.jsonl"


@dataclass(frozen=True)
class Sample:
    """Sample number `sample` of a task. answer: what stands in the box, None where there is none; `fault` says why. A truncated sample has reward 0."""

    task: str
    sample: int
    reward: float
    truncated: bool
    tokens: int
    answer: str | None
    fault: str
    text: str


class Samples:
    """The samples of one job, on disk. A context: the file is locked while it is open."""

    def __init__(self, folder: Path, identity: Mapping[str, Any]) -> None:
        self.path = folder / FILE
        self.identity = dict(identity)
        self.found: dict[tuple[str, int], Sample] = {}
        self._file: IO[str] | None = None

    def __enter__(self) -> Samples:
        """Raises UserError when another process draws them, or the file holds samples of another job: what differs is named."""
        try:
            self._file = open_for_append(self.path)
        except OSError as error:
            raise UserError(f"{self.path} cannot be written ({error.strerror}); name another folder by out=") from None
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._file.close()
            raise UserError(f"{self.path} is being written by another evaluation; wait for it, or name another folder by out=") from None
        try:
            self._read()
        except UserError:
            self._file.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        if self._file is not None:
            self._file.close()

    def _read(self) -> None:
        head, *lines = read_jsonl(self.path) or [{}]
        if not head:
            self._write({"job": self.identity})
            return
        there = head.get("job", {})
        for name in sorted({*there, *self.identity}):
            if there.get(name) != self.identity.get(name):
                raise UserError(
                    f"{self.path.parent} holds samples of another job: {name} is {there.get(name)!r} there and {self.identity.get(name)!r} here; "
                    "name another folder by out=, or remove it"
                )
        for line in lines:
            sample = Sample(**line)
            self.found.setdefault((sample.task, sample.sample), sample)

    def add(self, sample: Sample) -> None:
        """Write one down, unless it is there. Raises SystemFailure when the disk takes no more: what cannot be kept must not be counted."""
        if (sample.task, sample.sample) not in self.found:
            self._write(asdict(sample))
            self.found[sample.task, sample.sample] = sample

    def _write(self, record: Mapping[str, Any]) -> None:
        assert self._file is not None
        try:
            write_record(self._file, record)
        except OSError as error:
            raise SystemFailure(
                f"{self.path} cannot be written ({error.strerror}); make room, the same command goes on from the samples it holds"
            ) from None


class Drawing:
    """The episode runner of such a job: samples that are there are not drawn again, others are drawn under their own seed and written down.

    read(text): the answer in a completion, or None and why there is none. fetch(handle): the trajectory behind what a runner returns; awaited in a thread.
    """

    def __init__(
        self,
        runner: EpisodeRunner,
        samples: Samples,
        *,
        per_task: int,
        seed: int | None,
        read: Callable[[str], tuple[str | None, str]],
        fetch: Callable[[Any], Any],
    ) -> None:
        self.runner, self.samples, self.per_task, self.seed = runner, samples, per_task, seed
        self.read, self.fetch = read, fetch

    async def run(self, request: EpisodeRequest) -> Finished[Any] | EpisodeFailure:
        number = request.episode_id.ordinal % self.per_task
        known = self.samples.found.get((request.task.task_id, number))
        if known is not None:
            return Finished(_meta(request, known), None)
        seed = None if self.seed is None else zlib.crc32(f"{self.seed}/{request.task.task_id}/{number}".encode()) & 0x7FFFFFFF
        outcome = await self.runner.run(replace(request, seed=seed))
        if isinstance(outcome, EpisodeFailure):
            return outcome
        trajectory = await asyncio.to_thread(self.fetch, outcome.handle)
        if trajectory is None:
            return EpisodeFailure(request.episode_id, "worker_lost", "its trajectory was lost with its worker", outcome.meta.sampled_tokens)
        sample = self._sample(request.task.task_id, number, trajectory)
        self.samples.add(sample)
        return Finished(_meta(request, sample), None)

    def _sample(self, task: str, number: int, trajectory: Trajectory) -> Sample:
        text = next((m["content"] for m in reversed(trajectory.info["messages"]) if m["role"] == "assistant"), "")
        answer, fault = self.read(text)
        truncated = trajectory.finish.kind == "truncated" or _cut(trajectory)
        reward = 0.0 if truncated else trajectory.reward
        return Sample(task, number, reward, truncated, trajectory.sampled_tokens, answer, fault, text)


def _cut(trajectory: Trajectory) -> bool:
    """Whether the last turn was ended by a limit on its length: its last token does not end a turn."""
    last = trajectory.segments[-1]
    actions = last.action_mask.nonzero()[0]
    return bool(len(actions)) and int(last.token_ids[actions[-1]]) not in last.sampling.stop


def _meta(request: EpisodeRequest, sample: Sample) -> TrajectoryMeta:
    """What `evaluate` needs to know of a sample."""
    task = request.task
    return TrajectoryMeta(
        episode_id=request.episode_id,
        task_id=task.task_id,
        environment=task.environment,
        workload=task.workload,
        finish=FinishReason.truncated("tokens") if sample.truncated else FinishReason.terminal(),
        reward=sample.reward,
        admitted_version=request.version,
        oldest_version=request.version,
        newest_version=request.version,
        sampled_tokens=sample.tokens,
        action_tokens=sample.tokens,
        total_tokens=sample.tokens,
        turns=1,
        segments=1,
        seconds=0.0,
        queue_s=0.0,
        generate_s=0.0,
        environment_s=0.0,
    )
