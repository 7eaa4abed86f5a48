"""The plan: which actors a run will start, what each is expected to need, and whether this machine has it.

Memory figures are upper bounds from the model's size (sao.runtime.memory); they are meant to refuse what cannot work before anything starts,
not to account for the last megabyte.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from sao.algorithms.catalogue import needs_critic
from sao.config import Config
from sao.errors import ConfigError
from sao.runtime.container import memory_groups
from sao.runtime.memory import BYTES, MB, RAY_MB, Parts, engine_parts, learner_parts, object_store_mb, worker_parts
from sao.runtime.models import ModelFacts

# What to lower when a part of an actor's memory is what does not fit.
LOWER = {
    "object store": "launcher.object_store_mb",
    "KV": "engine.kv_cache_mb",
    "weights": "engine.replicas, or set engine.dtype=bfloat16, or choose a smaller model",
    "policy": "the model's size (model.path), or set model.dtype=bfloat16",
    "critic": "the model's size (model.path), or set model.dtype=bfloat16",
    "kept versions": "rollout.staleness",
    "activations": "learner.tokens_per_micro_batch",
    "engine": "engine.replicas",
    "worker": "rollout.workers",
    "programs": "env.args.at_once",
}


VALUE_HEAD = ("value_head.weight", "value_head.bias")  # of sao.learner.models.CriticModel, which this module must not import


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
    bf16: bool = True  # whether its CPU computes in bfloat16


@dataclass(frozen=True)
class PlannedActor:
    """`parts`: MB of main memory by what takes it; `what` is for the reader."""

    name: str
    threads: int
    what: str
    parts: Parts

    @property
    def memory_mb(self) -> int:
        return sum(self.parts.values())

    @property
    def kind(self) -> str:
        return self.name.split("-")[0]


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
        for a in self.actors:
            parts = ", ".join(f"{part} {size}" for part, size in a.parts.items())
            lines.append(f"{a.name:<12} {a.memory_mb:>7} MB  {a.threads:>7}  {a.what}: {parts}")
        machine = self.machine
        lines.append(
            f"{'together':<12} {self.memory_mb:>7} MB           of {machine.available_mb} MB available, {machine.cores} cores, {machine.gpus} GPUs"
        )
        return "\n".join(lines)


def machine() -> Machine:
    """Cores this process may use, memory as the kernel and the container's limits have it, GPUs by device files (torch is not imported for this)."""
    import psutil

    memory, groups = psutil.virtual_memory(), list(memory_groups())
    total = min([memory.total, *(group.limit for group in groups)])
    available = min([memory.available, *(group.room for group in groups)])
    gpus = [name for name in os.listdir("/dev") if name.startswith("nvidia") and name[6:].isdigit()]
    return Machine(len(os.sched_getaffinity(0)), total // MB, available // MB, len(gpus), _computes_bf16(Path("/proc/cpuinfo")))


def _computes_bf16(cpuinfo: Path) -> bool:
    """What torch's matrix library asks for: AVX-512 (which can emulate it), AMX, AVX-NE-CONVERT, or Arm's bf16. True where the kernel does not say."""
    try:
        lines = cpuinfo.read_text().splitlines()
    except OSError:
        return True
    flags = {flag for line in lines if line.startswith(("flags", "Features")) for flag in line.split()}
    return not flags or not flags.isdisjoint({"avx512bw", "amx_bf16", "avx_ne_convert", "bf16"})


def make_plan(config: Config, model: ModelFacts, here: Machine, *, training: bool = True) -> Plan:
    """training=False: an evaluation, which has no learner."""
    on_gpu = here.gpus > 0
    device = "GPU" if on_gpu else "CPU"
    actors = [PlannedActor("ray", 0, "control and shared objects", {"runtime": RAY_MB, "object store": object_store_mb(config, model)})]
    for index in range(config.engine.replicas):
        what = f"vLLM {config.engine.dtype} on {device}"
        actors.append(PlannedActor(f"engine-{index}", config.engine.threads, what, engine_parts(config, model, on_gpu=on_gpu)))
    if training:
        on_gpu = on_gpu and config.learner.device != "cpu"
        what = f"policy{' and critic' if needs_critic(config.algo) else ''} of {model.parameters / 1e6:.1f} M parameters"
        actors.append(PlannedActor("learner", config.learner.threads, what, learner_parts(config, model, on_gpu=on_gpu)))
    actors += [PlannedActor(f"worker-{i}", 1, "episodes", worker_parts(config, model)) for i in range(config.rollout.workers)]
    return Plan(actors, here)


def _check_memory(plan: Plan) -> None:
    """Refuse a plan that needs more than is available, with the key that lowers what takes most."""
    if plan.memory_mb <= plan.machine.available_mb:
        return
    kinds: dict[str, list[PlannedActor]] = {}
    for actor in plan.actors:
        kinds.setdefault(actor.kind, []).append(actor)
    kind, actors = max(kinds.items(), key=lambda item: sum(actor.memory_mb for actor in item[1]))
    parts = {part: size for part, size in actors[0].parts.items() if part in LOWER}
    part = max(parts, key=lambda name: parts[name], default="")
    if len(actors) > 1 and (not part or parts[part] < actors[0].memory_mb // 2):
        part = kind
    holds = f", {parts[part]} MB of them for {part}" if part in parts else ""
    several = (
        f"{len(actors)} {kind}s take {sum(actor.memory_mb for actor in actors)} MB"
        if len(actors) > 1
        else f"{actors[0].name} takes {actors[0].memory_mb} MB"
    )
    raise ConfigError(
        f"the plan needs {plan.memory_mb} MB and this machine has {plan.machine.available_mb} MB available: {several}{holds}; lower {LOWER.get(part, LOWER['policy'])}"
    )


def check_plan(config: Config, plan: Plan, model: ModelFacts) -> None:
    """Refuse what will not fit, naming the key to change."""
    here = plan.machine
    _check_memory(plan)
    training = any(actor.name == "learner" for actor in plan.actors)
    threads = config.engine.replicas * config.engine.threads + training * config.learner.threads
    if not here.gpus and threads > here.cores and not config.launcher.oversubscribe:
        raise ConfigError(
            f"engines and learner want {threads} threads and this machine has {here.cores} cores: each would slow the other down; "
            "lower engine.replicas, engine.threads or learner.threads, or set launcher.oversubscribe=true"
        )
    _check_gpus(config, here, training)
    if training:
        _check_bf16(config, here)
    if config.learner.sharing == "packed" and config.learner.attention != "packed_sdpa":
        raise ConfigError(
            f"learner.sharing=packed needs learner.attention=packed_sdpa, which alone follows shared prefixes (it is {config.learner.attention}); set it, or learner.sharing=off"
        )
    if training and needs_critic(config.algo):
        _check_freezing(config.critic.freeze, model)
    limit = config.engine.max_model_len or model.context
    if model.context and limit > model.context:
        raise ConfigError(f"engine.max_model_len={limit} exceeds the model's context of {model.context}; lower it")
    if limit and config.rollout.context_tokens > limit:
        raise ConfigError(f"rollout.context_tokens={config.rollout.context_tokens} exceeds the context of {limit}; lower it")
    if limit and config.rollout.max_tokens > limit and config.rollout.compaction == "off":
        raise ConfigError(f"rollout.max_tokens={config.rollout.max_tokens} exceeds the context of {limit}; lower it")
    kv_tokens = config.engine.kv_cache_mb * MB // max(1, model.kv_elements_per_token * BYTES[config.engine.dtype])
    if not here.gpus and kv_tokens < (limit or config.rollout.max_tokens):
        raise ConfigError(
            f"engine.kv_cache_mb={config.engine.kv_cache_mb} holds {kv_tokens} tokens, less than one sequence of the context of {limit or config.rollout.max_tokens}; "
            f"raise it, or set engine.max_model_len={config.rollout.max_tokens}"
        )


def _check_bf16(config: Config, here: Machine) -> None:
    """Without bfloat16 in the processor torch falls back to a loop: a step of a 135 M model took over nine minutes."""
    if here.bf16 or (here.gpus and config.learner.device != "cpu"):
        return
    for key, asked, mend in (
        ("model.autocast", config.model.autocast, "false"),
        ("model.dtype", config.model.dtype == "bfloat16", "float32"),
    ):
        if asked:
            raise ConfigError(
                f"{key} asks for bfloat16 and this machine's CPU does not compute in it, a step would take many times as long; set {key}={mend}"
            )


def _check_freezing(patterns: Sequence[str], model: ModelFacts) -> None:
    """critic.freeze against the names the critic will have: the policy's without its vocabulary head, and a value head."""
    backbone = [name for name in model.tensors if not name.startswith("lm_head")]
    if not backbone:
        return
    frozen: set[str] = set()
    for pattern in patterns:
        matched = {name for name in (*backbone, *VALUE_HEAD) if re.search(pattern, name)}
        if not matched:
            raise ConfigError(
                f"critic.freeze={pattern!r} matches no parameter of this model's critic (the first is {backbone[0]}); mend it or set critic.freeze=[]"
            )
        frozen |= matched
    if len(frozen) == len(backbone) + len(VALUE_HEAD):
        raise ConfigError(f"critic.freeze={list(patterns)} freezes every parameter of the critic; leave some to train")


def _check_gpus(config: Config, here: Machine, training: bool = True) -> None:
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
