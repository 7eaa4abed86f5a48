"""The three Ray actors. Each is a thin shell: it sets up its process, builds the real object and forwards calls.

Heavy imports happen inside the constructors, so that the driver can name these classes without loading torch or vLLM.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sao.config import Config, EnvConfig
from sao.runtime.processes import identity

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from sao.errors import SystemFailure
    from sao.inference.protocol import EngineSnapshot, GenerateRequest, Generation, PublishReport
    from sao.learner.protocol import StepReport
    from sao.rollout.episodes import EpisodeFailure, EpisodeRequest
    from sao.rollout.staleness import Finished
    from sao.trajectory import Trajectory


def thread_environment(threads: int) -> dict[str, str]:
    """Environment variables of an actor's process. Spinning OpenMP threads collapse a machine whose cores are shared (docs/concepts/architecture)."""
    return {
        "OMP_NUM_THREADS": str(threads),
        "MKL_NUM_THREADS": str(threads),
        "OMP_WAIT_POLICY": "PASSIVE",
        "TOKENIZERS_PARALLELISM": "false",
        "PYTHONUNBUFFERED": "1",
    }


def engine_environment(threads: int) -> dict[str, str]:
    return thread_environment(threads) | {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": "INFO",
        "NUMBA_NUM_THREADS": "1",
        "HF_HUB_DISABLE_TELEMETRY": "1",
    }


def _set_up(name: str, run_dir: str, environment: Mapping[str, str]) -> None:
    """Before anything heavy is imported: the thread environment, and everything this process prints, C++ included, into logs/<name>.log."""
    os.environ.update(environment)
    path = Path(run_dir) / "logs" / f"{name}.log"
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    sys.stdout.flush()
    sys.stderr.flush()
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s", force=True)


class EngineActor:
    """One vLLM engine; an async actor, so that many requests are in flight at once."""

    def __init__(self, name: str, model_path: str, config: Config, run_dir: str, seed: int, incarnation: int) -> None:
        _set_up(name, run_dir, engine_environment(config.engine.threads))
        started = time.monotonic()
        from sao.inference.vllm_engine import VllmEngine

        self.engine = VllmEngine(model_path, config.engine, config.weights, name=name, incarnation=incarnation, seed=seed)
        self.start_s = time.monotonic() - started

    async def ready(self) -> dict[str, Any]:
        return identity() | {"start_s": self.start_s}

    async def ping(self) -> None:
        """Answers while the process lives and its event loop turns, whatever the engine thread is doing."""

    async def generate(self, request: GenerateRequest) -> Generation:
        from sao.inference.pool import complete

        return await complete(self.engine, request)

    async def publish(self, weights: Any, version: int) -> PublishReport:
        bundle, canary = weights
        return await self.engine.publish(bundle, version, canary)

    async def score(self, token_ids: Sequence[int]) -> NDArray[np.float32]:
        return await self.engine.score(token_ids)

    async def snapshot(self) -> EngineSnapshot:
        return await self.engine.snapshot()

    async def drain(self, export: bool = True) -> int:
        return await self.engine.drain(export)

    async def wake(self) -> None:
        await self.engine.wake()

    async def begin_incarnation(self, incarnation: int) -> None:
        await self.engine.begin_incarnation(incarnation)

    async def close(self) -> None:
        await self.engine.close()


class WorkerActor:
    """Runs many episodes at once on one event loop."""

    def __init__(
        self, name: str, model_path: str, config: Config, env_configs: Sequence[EnvConfig], engines: Mapping[str, tuple[Any, bool]], run_dir: str
    ) -> None:
        """engines: each with its actor and whether it is lent to an evaluation."""
        _set_up(name, run_dir, thread_environment(1))
        from sao.rollout.last_words import Recorder, Watch, path_of
        from sao.rollout.worker import EpisodeWorker
        from sao.runtime.remote import RemoteEngine

        self.handle = lambda engine, actor: RemoteEngine(engine, actor, config.engine.request_timeout_s)
        record = Recorder(path_of(Path(run_dir) / "logs", name))
        Watch(record).start()
        self.worker = EpisodeWorker(config, env_configs, model_path, [], record)
        gc.freeze()  # what is imported by now stays: a full collection that walks it holds every episode for some 10 ms
        for engine, (actor, lent) in engines.items():
            self.worker.pool.admit(self.handle(engine, actor), lent=lent)

    async def ready(self) -> dict[str, Any]:
        return identity()

    async def ping(self) -> None:
        """Answers while the process lives and its event loop turns."""

    async def admit(self, name: str, engine: Any, lent: bool) -> None:
        """An engine was replaced: send requests to the new actor."""
        self.worker.pool.admit(self.handle(name, engine), lent=lent)

    async def run(self, request: EpisodeRequest) -> tuple[Finished[None] | EpisodeFailure, Trajectory | None]:
        return await self.worker.run(request)

    async def lend(self, engine: str) -> None:
        await self.worker.pool.lend(engine)

    async def restore(self, engine: str) -> None:
        await self.worker.pool.restore(engine)

    async def close(self) -> None:
        await self.worker.close()


class LearnerActor:
    """Trains policy and critic; one call at a time, `ping` apart (concurrency group `control`)."""

    def __init__(self, name: str, model_path: str, config: Config, run_dir: str) -> None:
        _set_up(name, run_dir, thread_environment(config.learner.threads))
        from concurrent.futures import ThreadPoolExecutor

        from sao.learner.learner import TorchLearner
        from sao.report.store import TrajectoryWriter

        self.config, self.model_path, self.run_dir = config, model_path, Path(run_dir)
        self.learner = TorchLearner(config, model_path, total_steps=config.train.steps, check_logprobs=True)
        self.writer = TrajectoryWriter(self.run_dir)
        self.took_over = False
        self.background = ThreadPoolExecutor(1)
        self.pending: Any = None

    def ready(self) -> dict[str, Any]:
        return identity()

    def ping(self) -> None:
        """Answers while the process lives, a step in progress or not."""

    def step(self, step: int, *trajectories: Trajectory) -> StepReport:
        """Train one batch. Its file in the run store is written while the next step computes, and is complete when that one returns."""
        from sao.learner.protocol import StepReport

        if not self.took_over:
            self._take_over(step)
        version = self.learner.version
        report = self.learner.step(trajectories, step)
        self._written()
        self.pending = self.background.submit(self.writer.write, step, trajectories, report.records, version)
        return StepReport(report.step, report.version, report.metrics)

    def gather(self) -> tuple[Any, None]:
        """The weights, and beside them an answer small enough for the driver to look at."""
        return self.learner.gather(), None

    def export(self, directory: str) -> None:
        from sao.errors import LearnerFailure

        self._written()
        with _disk_faults(LearnerFailure, directory, "take another disk, and go on with `sao train resume=RUN`"):
            self.learner.export(directory)

    def save(self, directory: str, *buffered: Trajectory) -> None:
        """The learner's part of a checkpoint, and the trajectories that wait for a batch."""
        from sao.errors import CheckpointFailure
        from sao.report.store import write_file
        from sao.runtime.checkpoints import BUFFER

        self._written()
        with _disk_faults(CheckpointFailure, directory, "set checkpoint.every=0"):
            self.learner.save(directory)
            write_file(Path(directory) / BUFFER, -1, buffered)

    def restore(self, directory: str) -> None:
        self.learner.restore(directory)

    def go_back(self, directory: str, version: int, steps_done: int) -> None:
        """Take up the weights in `directory` as `version`: a roll-back, from which another stretch of the lineage begins."""
        self.learner.restore(directory)
        self._take_over(steps_done, back_to=self.learner.version)
        self.learner.renumber(version)

    def _take_over(self, step: int, *, back_to: int | None = None) -> None:
        from sao.errors import LearnerFailure
        from sao.runtime.lineage import took_over

        with _disk_faults(LearnerFailure, str(self.run_dir), "take another disk, and go on with `sao train resume=RUN`"):
            took_over(self.run_dir, step, self.config, self.model_path, back_to=back_to)
        self.took_over = True

    def _written(self) -> None:
        """Surface an error of the last background write instead of losing it."""
        from sao.errors import LearnerFailure

        pending, self.pending = self.pending, None
        try:
            if pending is not None:
                pending.result()
        except OSError as error:
            raise LearnerFailure(f"the run store cannot be written ({error}); free space and go on with `sao train resume=RUN`") from error


@contextlib.contextmanager
def _disk_faults(failure: type[SystemFailure], directory: str, otherwise: str) -> Iterator[None]:
    """A disk that takes no more, by whatever name: torch calls it a RuntimeError, safetensors an error of its own."""
    from safetensors import SafetensorError

    try:
        yield
    except (OSError, RuntimeError, SafetensorError) as error:
        raise failure(f"{directory} cannot be written ({error}); free space or {otherwise}") from error
