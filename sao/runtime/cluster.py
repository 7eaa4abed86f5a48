"""Starts the Ray actors of a run, watches them, stops them."""

from __future__ import annotations

import asyncio
import contextlib
import os
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from sao.config import Config, EnvConfig
from sao.errors import EngineFailure, SystemFailure, UserError
from sao.inference.pool import EnginePool, PoolEvent
from sao.inference.protocol import EngineSnapshot
from sao.runtime.actors import EngineActor, LearnerActor, WorkerActor, gather_ready, thread_environment
from sao.runtime.memory import MB, object_store_mb
from sao.runtime.models import facts
from sao.runtime.plan import gpu_shares
from sao.runtime.remote import RemoteEngine, RemoteLearner, RemoteWorkers
from sao.runtime.run_folder import write_atomically

SNAPSHOT_EVERY_S = 1.0
EPISODE_GRACE_S = 30.0
CONCURRENCY = 4096  # calls an async actor holds at once


class Cluster:
    """The actors of one run. Use as `async with Cluster(...) as cluster`; leaving it ends every actor it started."""

    def __init__(self, config: Config, env_configs: Sequence[EnvConfig], model_path: str, run_dir: Path) -> None:
        self.config = config
        self.env_configs = list(env_configs)
        self.model_path = model_path
        self.run_dir = run_dir
        self.actors: dict[str, Any] = {}
        self.latest: dict[str, EngineSnapshot] = {}
        self._owns_ray = False

    async def __aenter__(self) -> Cluster:
        try:
            self._start_ray()  # Ray installs its signal handlers only from the main thread
            self._create()
            await self._await_ready()
        except BaseException:
            await self.__aexit__()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        import ray

        for actor in self.actors.values():
            with contextlib.suppress(ray.exceptions.RayError):
                ray.kill(actor)
        self.actors.clear()
        if self._owns_ray:
            await asyncio.to_thread(ray.shutdown)
            self._owns_ray = False

    # ------------------------------------------------------------------ start

    def _start_ray(self) -> None:
        import ray

        os.environ.update(thread_environment(1))
        os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        launcher = self.config.launcher
        if ray.is_initialized():
            return
        if launcher.ray_address:
            try:
                ray.init(address=launcher.ray_address, log_to_driver=False, logging_level="error")
            except (ConnectionError, RuntimeError, ValueError) as error:
                raise UserError(
                    f"launcher.ray_address={launcher.ray_address} cannot be joined ({error}); start a cluster with `ray start --head`"
                ) from None
            self._owns_ray = True
            return
        for last in (False, False, True):
            try:
                self._init_local()
                break
            except Exception as error:
                ray.shutdown()
                if last:
                    raise SystemFailure(f"Ray did not start on this machine ({error}); it may be overloaded, try again") from error
        self._owns_ray = True

    def _init_local(self) -> None:
        import ray

        ray.init(
            num_cpus=self.config.launcher.num_cpus or None,
            include_dashboard=False,
            object_store_memory=object_store_mb(self.config, facts(self.model_path)) * MB,
            log_to_driver=False,
            logging_level="error",
            configure_logging=False,
            _temp_dir=os.path.join(tempfile.gettempdir(), "sao-ray"),
        )

    def _create(self) -> None:
        """All constructors run at once; Ray's own restarts are off, supervision is ours."""
        import ray

        config, run_dir = self.config, str(self.run_dir)
        gpus = gpu_shares(config, has_gpus=ray.cluster_resources().get("GPU", 0) > 0)
        engine_class, learner_class, worker_class = ray.remote(EngineActor), ray.remote(LearnerActor), ray.remote(WorkerActor)
        for index in range(config.engine.replicas):
            name = f"engine-{index}"
            options = {"num_cpus": 0, "num_gpus": gpus.engine, "max_restarts": 0, "max_concurrency": CONCURRENCY}
            self.actors[name] = engine_class.options(**options).remote(name, self.model_path, config, run_dir, config.seed + index)
        engines = dict(self.actors)
        self.actors["learner"] = learner_class.options(num_cpus=0, num_gpus=gpus.learner, max_restarts=0).remote(
            "learner", self.model_path, config, run_dir
        )
        for index in range(config.rollout.workers):
            name = f"worker-{index}"
            worker = worker_class.options(num_cpus=0, max_restarts=0, max_concurrency=CONCURRENCY)
            self.actors[name] = worker.remote(name, self.model_path, config, self.env_configs, engines, run_dir)

    async def _await_ready(self) -> None:
        import ray.exceptions as rx

        try:
            answers = await gather_ready({name: actor.ready.remote() for name, actor in self.actors.items()}, self.config.engine.start_timeout_s)
        except rx.RayTaskError as error:
            cause = error.cause
            if isinstance(cause, UserError | SystemFailure):
                raise cause from None
            raise SystemFailure(f"an actor failed to start with {type(cause).__name__}: {cause}; see logs/ in {self.run_dir}") from error
        except rx.RayActorError as error:
            raise SystemFailure(f"an actor died while starting ({_reason(error)}); see logs/ in {self.run_dir}") from None
        import json

        write_atomically(self.run_dir / "actors.json", json.dumps({"driver": {"pid": os.getpid()}} | answers, indent=2) + "\n")

    # ------------------------------------------------------------------ handles for the loop

    def learner(self) -> RemoteLearner:
        return RemoteLearner(self.actors["learner"], self.config.learner.timeout_s)

    def workers(self) -> RemoteWorkers:
        actors = {name: actor for name, actor in self.actors.items() if name.startswith("worker-")}
        return RemoteWorkers(actors, EPISODE_GRACE_S, self.config.rollout.time_limit_s)

    def engines(self) -> EnginePool:
        """The driver's view of the engines: publication and snapshots. Requests go from the workers straight to the engines."""
        timeout = self.config.engine.request_timeout_s
        handles = [RemoteEngine(name, actor, timeout) for name, actor in self.actors.items() if name.startswith("engine-")]
        return EnginePool(handles, on_event=_give_up)

    async def watch(self, pool: EnginePool, seen: Callable[[Sequence[EngineSnapshot]], None]) -> None:
        """Poll the engines for ever; raises EngineFailure as soon as one is gone."""
        while True:
            seen(await pool.snapshots())
            await asyncio.sleep(SNAPSHOT_EVERY_S)


def _give_up(event: PoolEvent) -> None:
    """An engine that leaves the pool ends the run: nothing replaces it yet."""
    if event.kind == "left":
        raise EngineFailure(f"{event.engine} left the pool: {event.reason}")


def _reason(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1] if lines else type(error).__name__
