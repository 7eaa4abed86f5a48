"""The plan: which actors a run will start, what each is expected to need, and whether this machine has it.

Figures are estimates from the model's size and from measurements of the parts (docs/concepts/architecture); they are meant to refuse what
cannot work before anything starts, not to account for the last megabyte.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from typing import NamedTuple

from sao.config import Config
from sao.errors import ConfigError
from sao.runtime.models import ModelFacts

MB = 1024 * 1024
RAY_MB = 550
ENGINE_BASE_MB = 750
LEARNER_BASE_MB = 550
WORKER_BASE_MB = 350
ACTIVATION_BYTES_PER_TOKEN_LAYER_WIDTH = 64
BYTES = {"float32": 4, "bfloat16": 2}


class GpuShares(NamedTuple):
    """Ray's num_gpus of one engine replica and of the learner."""

    engine: float
    learner: float


def gpu_shares(config: Config, *, has_gpus: bool) -> GpuShares:
    """A replica on one GPU may share it with the learner; a tensor-parallel replica takes whole ones."""
    if not has_gpus:
        return GpuShares(0, 0)
    whole = config.engine.tensor_parallel_size > 1
    engine = float(config.engine.tensor_parallel_size) if whole else config.engine.gpu_memory_utilization
    learner = 0.0 if config.learner.device == "cpu" else (1.0 if whole else 1.0 - config.engine.gpu_memory_utilization)
    return GpuShares(engine, learner)


@dataclass(frozen=True)
class Machine:
    cores: int
    total_mb: int
    available_mb: int
    gpus: int


@dataclass(frozen=True)
class PlannedActor:
    name: str
    memory_mb: int
    threads: int
    what: str


@dataclass(frozen=True)
class Plan:
    actors: list[PlannedActor]
    machine: Machine

    @property
    def memory_mb(self) -> int:
        return sum(actor.memory_mb for actor in self.actors)

    def text(self) -> str:
        """A table for the terminal and for plan.txt."""
        lines = [f"{'actor':<12} {'memory':>10}  threads  what"]
        lines += [f"{a.name:<12} {a.memory_mb:>7} MB  {a.threads:>7}  {a.what}" for a in self.actors]
        machine = self.machine
        lines.append(
            f"{'together':<12} {self.memory_mb:>7} MB           of {machine.available_mb} MB available, {machine.cores} cores, {machine.gpus} GPUs"
        )
        return "\n".join(lines)


def machine() -> Machine:
    """Cores this process may use, memory as the kernel reports it, GPUs by device files (torch is not imported for this)."""
    import psutil

    memory = psutil.virtual_memory()
    gpus = [name for name in os.listdir("/dev") if name.startswith("nvidia") and name[6:].isdigit()]
    return Machine(len(os.sched_getaffinity(0)), memory.total // MB, memory.available // MB, len(gpus))


def make_plan(config: Config, model: ModelFacts, here: Machine, *, training: bool = True) -> Plan:
    """training=False: an evaluation, which has no learner."""
    parameters = model.parameters
    engine_weights = parameters * BYTES[config.engine.dtype] // MB
    on_gpu = here.gpus > 0 and config.learner.device != "cpu"
    kv = 0 if on_gpu else config.engine.kv_cache_mb
    train_bytes = parameters * (BYTES[config.model.dtype] + 4 + 8)
    learner = LEARNER_BASE_MB + 2 * train_bytes // MB + parameters * 4 * (config.rollout.staleness + 1) // MB
    learner += config.learner.tokens_per_micro_batch * max(1, model.layers) * ACTIVATION_BYTES_PER_TOKEN_LAYER_WIDTH * 256 // MB // 4
    actors = [PlannedActor("ray", RAY_MB + config.launcher.object_store_mb, 0, f"object store {config.launcher.object_store_mb} MB")]
    for index in range(config.engine.replicas):
        what = f"vLLM {config.engine.dtype}, {kv or 'GPU'} MB KV" if kv else f"vLLM {config.engine.dtype} on GPU"
        actors.append(PlannedActor(f"engine-{index}", ENGINE_BASE_MB + 2 * engine_weights + kv, config.engine.threads, what))
    if training:
        actors.append(PlannedActor("learner", learner, config.learner.threads, f"policy and critic, {parameters / 1e6:.2f} M parameters each"))
    actors += [PlannedActor(f"worker-{i}", WORKER_BASE_MB, 1, "episodes") for i in range(config.rollout.workers)]
    return Plan(actors, here)


def check_plan(config: Config, plan: Plan, model: ModelFacts) -> None:
    """Refuse what will not fit, naming the key to change."""
    here = plan.machine
    if plan.memory_mb > here.available_mb:
        largest = max(plan.actors, key=lambda actor: actor.memory_mb)
        raise ConfigError(
            f"the plan needs {plan.memory_mb} MB and this machine has {here.available_mb} MB available: {largest.name} alone takes {largest.memory_mb} MB; "
            "lower engine.kv_cache_mb, engine.replicas or learner.tokens_per_micro_batch, or choose a smaller model"
        )
    training = any(actor.name == "learner" for actor in plan.actors)
    threads = config.engine.replicas * config.engine.threads + training * config.learner.threads
    if not here.gpus and threads > here.cores:
        raise ConfigError(
            f"engines and learner want {threads} threads and this machine has {here.cores} cores: spinning threads would starve each other; "
            "lower engine.replicas, engine.threads or learner.threads"
        )
    _check_gpus(config, here, training)
    for pattern in config.critic.freeze:
        frozen = [name for name in model.names if re.search(pattern, name)]
        if model.names and len(frozen) in (0, len(model.names)):
            what = "matches no parameter" if not frozen else "freezes every parameter"
            raise ConfigError(f"critic.freeze={pattern!r} {what} of this model (the first is {model.names[0]}); mend it or set critic.freeze=[]")
    limit = config.engine.max_model_len or model.context
    if model.context and limit > model.context:
        raise ConfigError(f"engine.max_model_len={limit} exceeds the model's context of {model.context}; lower it")
    if limit and config.rollout.max_tokens > limit:
        raise ConfigError(f"rollout.max_tokens={config.rollout.max_tokens} exceeds the context of {limit}; lower it")
    kv_tokens = config.engine.kv_cache_mb * MB // max(1, model.kv_bytes_per_token)
    if not here.gpus and kv_tokens < config.rollout.max_tokens:
        raise ConfigError(
            f"engine.kv_cache_mb={config.engine.kv_cache_mb} holds {kv_tokens} tokens, less than one episode of rollout.max_tokens={config.rollout.max_tokens}; raise it"
        )


def _check_gpus(config: Config, here: Machine, training: bool) -> None:
    """Engines and learner together must fit this machine's GPUs; a cluster's are Ray's to count."""
    if config.launcher.ray_address:
        return
    if config.learner.device == "cuda" and not here.gpus:
        raise ConfigError("learner.device=cuda and this machine has no GPU; use auto or cpu")
    if config.engine.tensor_parallel_size > 1 and not here.gpus:
        raise ConfigError(f"engine.tensor_parallel_size={config.engine.tensor_parallel_size} and this machine has no GPU; set 1")
    shares = gpu_shares(config, has_gpus=here.gpus > 0)
    wanted = config.engine.replicas * shares.engine + training * shares.learner
    if wanted > here.gpus + 1e-6:
        raise ConfigError(
            f"engines and learner want {wanted:.1f} GPUs and this machine has {here.gpus}; lower engine.replicas, engine.tensor_parallel_size or engine.gpu_memory_utilization"
        )
