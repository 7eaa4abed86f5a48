"""Starts the Ray actors of a run, watches them, stops them."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import signal
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from sao.config import Config, EnvConfig
from sao.errors import SystemFailure, UserError, WorkerFailure
from sao.inference.pool import EnginePool, PoolEvent
from sao.inference.protocol import EngineSnapshot
from sao.rollout.last_words import last_words, path_of
from sao.runtime.actors import EngineActor, LearnerActor, WorkerActor, thread_environment
from sao.runtime.memory import MB, object_store_mb, with_advice
from sao.runtime.models import facts
from sao.runtime.plan import gpu_shares
from sao.runtime.processes import is_alive, kernel_oom_kills
from sao.runtime.remote import RemoteEngine, RemoteLearner, RemoteWorkers, call
from sao.runtime.run_folder import write_atomically
from sao.runtime.run_store import RunStore

WATCH_EVERY_S = 1.0
SHORT_LIFE_S = 20.0  # an engine that lives longer has served; of a worker and the learner it is known when they have
EPISODE_GRACE_S = 30.0
# What makes losses ones in a row.
IN_A_ROW = {
    "engine": f"each within {SHORT_LIFE_S:.0f} s of its start",
    "learner": "with no training step done between",
    "worker": "with no episode done between",
}
CONCURRENCY = 4096  # calls an async actor holds at once


class Cluster:
    """The actors of one run. Use as `async with Cluster(...) as cluster`; leaving it ends every actor it started.

    learner: an evaluation needs none. incarnation: how often this run has been resumed. on_event: hears in one line of every actor that is lost and of every one that is back.
    on_start: hears how the start goes.
    """

    def __init__(
        self,
        config: Config,
        env_configs: Sequence[EnvConfig],
        model_path: str,
        run_dir: Path,
        *,
        learner: bool = True,
        incarnation: int = 0,
        on_event: Callable[[str], None] = print,
        on_start: Callable[[str], None] = print,
    ) -> None:
        self.config = config
        self.env_configs = list(env_configs)
        self.model_path = model_path
        self.run_dir = run_dir
        self.with_learner = learner
        self.actors: dict[str, Any] = {}
        self.identities: dict[str, Any] = {}
        self.replaced: Counter[str] = Counter()
        self.pool: EnginePool | None = None
        self.incarnation = incarnation
        self.on_event = on_event
        self.on_start = on_start
        self._locks: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)
        self._departed: asyncio.Queue[tuple[str, Any, str]] = asyncio.Queue()
        self._born: dict[str, float] = {}
        self._losses: Counter[str] = Counter()  # in a row
        self._began = time.monotonic()
        self._oom_kills = kernel_oom_kills()
        self._owns_ray = False

    async def __aenter__(self) -> Cluster:
        try:
            with _own_signals():
                self._start_ray()
            self.on_start("Ray is up, actors are starting")
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
        # Tensors come from huge pages in every actor (read when a process starts, so set here): with small ones the kernel clears pages for a sixth of a
        # learner's step, and a step of SmolLM2 on two cores took 21 s instead of 17.
        os.environ.setdefault("GLIBC_TUNABLES", "glibc.malloc.hugetlb=1")
        logging.getLogger("ray").setLevel(logging.ERROR)  # it reports each start's authentication mode as a warning
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

        config = self.config
        self._gpus = gpu_shares(config, has_gpus=ray.cluster_resources().get("GPU", 0) > 0)
        names = [f"engine-{index}" for index in range(config.engine.replicas)] + ["learner"] * self.with_learner
        for name in [*names, *(f"worker-{index}" for index in range(config.rollout.workers))]:
            self.actors[name] = self._start(name)

    def _start(self, name: str) -> Any:
        """A new actor of this name; engines first, because workers are told of them."""
        import ray

        config, run_dir = self.config, str(self.run_dir)
        options: dict[str, Any] = {"num_cpus": 0, "max_restarts": 0}
        kind, _, index = name.partition("-")
        if kind == "engine":
            engine = ray.remote(EngineActor).options(**options, num_gpus=self._gpus.engine, max_concurrency=CONCURRENCY)
            return engine.remote(name, self.model_path, config, run_dir, config.seed + int(index) + 1000 * self.replaced[name], self.incarnation)
        if kind == "learner":
            learner = ray.remote(concurrency_groups={"control": 1})(LearnerActor).options(**options, num_gpus=self._gpus.learner)
            return learner.remote(name, self.model_path, config, run_dir)
        engines = {engine: (actor, self._is_lent(engine)) for engine, actor in self.actors.items() if engine.startswith("engine-")}
        worker = ray.remote(WorkerActor).options(**options, max_concurrency=CONCURRENCY)
        return worker.remote(name, self.model_path, config, self.env_configs, engines, run_dir)

    async def _await_ready(self) -> None:
        self.identities = await self._ready(dict(self.actors))
        self._write_actors()

    async def _ready(self, actors: Mapping[str, Any]) -> dict[str, Any]:
        """Await that every actor is up; the name of one that fails or hangs travels with the error."""
        limit = self.config.engine.start_timeout_s

        async def one(name: str, actor: Any) -> dict[str, Any]:
            try:
                identity: dict[str, Any] = await call(actor.ready.remote(), name, SystemFailure, limit, "engine.start_timeout_s")
            except SystemFailure as failure:
                failure.args = (self._with_advice(name, str(failure)),)
                raise
            if name not in self.identities:
                self.on_start(f"{name} is ready")
            return identity

        return dict(zip(actors, await asyncio.gather(*(one(name, actor) for name, actor in actors.items())), strict=True))

    def _write_actors(self) -> None:
        text = json.dumps({"driver": {"pid": os.getpid()}} | self.identities, indent=2)
        write_atomically(self.run_dir / "actors.json", text + "\n")

    # ------------------------------------------------------------------ handles for the loop

    def learner(self, store: RunStore) -> RemoteLearner:
        return RemoteLearner(self, store, self.config.learner.timeout_s, self._next_incarnation)

    def workers(self) -> RemoteWorkers:
        names = [name for name in self.actors if name.startswith("worker-")]
        return RemoteWorkers(self, names, EPISODE_GRACE_S + self.config.rollout.time_limit_s, self.run_dir / "logs", self._outage_s)

    def engines(self) -> EnginePool:
        """The driver's view of the engines: publication and snapshots. Requests go from the workers straight to the engines."""
        handles = [self._engine(name) for name in self.actors if name.startswith("engine-")]
        self.pool = EnginePool(handles, wait_s=self.config.engine.start_timeout_s, on_event=self._left)
        return self.pool

    def _outage_s(self) -> float:
        """Seconds in which no engine was there for training: the driver sees an outage as the workers do, within its grace."""
        return 0.0 if self.pool is None else self.pool.outage_s()

    def _left(self, event: PoolEvent) -> None:
        if event.kind == "left":
            self._departed.put_nowait((event.engine, self.actors[event.engine], event.reason))

    def _engine(self, name: str) -> RemoteEngine:
        return RemoteEngine(name, self.actors[name], self.config.engine.request_timeout_s)

    async def _next_incarnation(self) -> None:
        self.incarnation += 1
        if self.pool is not None:
            await self.pool.begin_incarnation(self.incarnation)

    # ------------------------------------------------------------------ supervision

    async def watch(self, seen: Callable[[Sequence[EngineSnapshot]], None]) -> None:
        """Ask every actor for a sign of life once a second, for ever; one that is dead or silent is replaced. Raises SystemFailure when that is hopeless."""
        assert self.pool is not None
        async with asyncio.TaskGroup() as group:
            for name in self.actors:
                group.create_task(self._watch_one(name), name=f"watch {name}")
            group.create_task(self._replace_departed(group))
            while True:
                seen(await self.pool.snapshots())
                await asyncio.sleep(WATCH_EVERY_S)

    async def _watch_one(self, name: str) -> None:
        while True:
            await asyncio.sleep(WATCH_EVERY_S)
            actor = self.actors[name]
            ping = actor.ping.options(concurrency_group="control") if name == "learner" else actor.ping
            try:
                await call(ping.remote(), name, SystemFailure, self.config.launcher.silence_s)
            except SystemFailure as failure:
                if not failure.lost:
                    raise
                await self.replace(name, actor, str(failure))

    async def _replace_departed(self, group: asyncio.TaskGroup) -> None:
        """An engine that left the pool may be alive and well, but holds other weights than it should."""
        while True:
            group.create_task(self.replace(*await self._departed.get()))

    async def replace(self, name: str, dead: Any, reason: str) -> None:
        """Return when `name` is another actor than `dead`; whoever comes first starts it. A learner comes back empty: `RemoteLearner` restores it."""
        async with self._locks[name]:
            if self.actors[name] is not dead:
                return
            if name.startswith("engine-") and self.pool is not None:
                self.pool.remove(name, reason)
            started = time.monotonic()
            if name.startswith("worker-") and (said := str(last_words(path_of(self.run_dir / "logs", name)))):
                reason = f"{reason}; {said}"
            reason = self._with_advice(name, reason)
            while True:
                self._give_up_if_hopeless(name, reason)
                self.on_event(f"{name} is replaced: {reason}")
                try:
                    await self._start_again(name)
                    break
                except SystemFailure as failure:
                    if not failure.lost:
                        raise
                    reason = str(failure)
                    self._born[name] = time.monotonic()  # a start that fails is the shortest of lives
            self.on_event(f"{name} is back after {time.monotonic() - started:.0f} s")

    async def _start_again(self, name: str) -> None:
        """End what is left of an actor, start it anew, and make it known to those who use it."""
        self._end(name)
        self.replaced[name] += 1
        actor = self._start(name)
        self.identities |= await self._ready({name: actor})
        self._born[name] = time.monotonic()
        self._write_actors()
        engines = [engine for engine in self.actors if engine.startswith("engine-")]
        self.actors[name] = actor
        if name in engines and self.pool is not None:
            await self.pool.join(self._engine(name))
            await asyncio.gather(*(self._tell(worker, name) for worker in self.actors if worker.startswith("worker-")))
        if name.startswith("worker-"):  # an engine may have been replaced while this worker started
            await asyncio.gather(*(self._tell(name, engine) for engine in engines))

    async def _tell(self, worker: str, engine: str) -> None:
        """A worker that cannot hear it is dead or about to be found silent; its replacement is told of every engine when it starts."""
        with contextlib.suppress(WorkerFailure):
            admitted = self.actors[worker].admit.remote(engine, self.actors[engine], self._is_lent(engine))
            await call(admitted, worker, WorkerFailure, self.config.launcher.silence_s)

    def _is_lent(self, engine: str) -> bool:
        return self.pool is not None and engine in self.pool.lent

    def _give_up_if_hopeless(self, name: str, reason: str) -> None:
        kind = name.partition("-")[0]
        if kind == "engine" and time.monotonic() - self._born.get(name, self._began) >= SHORT_LIFE_S:
            self.forgive(name)
        self._losses[name] += 1
        if self._losses[name] > self.config.launcher.restarts:
            raise SystemFailure(f"{name} was lost {self._losses[name]} times, {IN_A_ROW[kind]}; the last time: {reason}")

    def forgive(self, name: str) -> None:
        self._losses[name] = 0

    def _end(self, name: str) -> None:
        """Make sure the old process is gone: Ray asks a process to end itself, which a stopped one cannot hear."""
        import ray

        with contextlib.suppress(ray.exceptions.RayError):
            ray.kill(self.actors[name])
        identity = self.identities.get(name, {})
        if is_alive(identity):
            with contextlib.suppress(ProcessLookupError):
                os.kill(identity["pid"], signal.SIGKILL)

    def _with_advice(self, name: str, reason: str) -> str:
        kills, self._oom_kills = self._oom_kills, kernel_oom_kills()
        return with_advice(name, reason, killed_by_kernel=self._oom_kills > kills)


@contextlib.contextmanager
def _own_signals() -> Iterator[None]:
    """Ray takes SIGTERM for itself; it stays with the command, which knows how to stop."""
    mine = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in mine.items():
            if signal.getsignal(number) is not handler:
                signal.signal(number, handler)
