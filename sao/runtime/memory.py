"""What each process of a run needs of memory at its peak, in MB by part: arithmetic on the model's sizes, before anything is started.

Held against what was measured, as peak resident memory (which counts shared libraries once per process): in demo runs of two cores the engine took
1,397 MB, the learner 740, a worker 190, Ray and the driver 880. On SmolLM2-135M the engine alone took 2.7 GB in float32 and 2.25 in bfloat16 with
1 GB of KV, and a policy's training step 3.3 GB (512 tokens) and 5.9 (2,048, autocast). The sums here lie 3 to 26 % above all of these. Not yet
held against a measurement: a whole run on a model of that size. Memory of a GPU is not counted: with one, weights, optimiser and KV lie there.
"""

from __future__ import annotations

import re

from sao.algorithms.catalogue import needs_critic
from sao.config import Config
from sao.runtime.models import ModelFacts

MB = 1024 * 1024
BYTES = {"float32": 4, "bfloat16": 2}
Parts = dict[str, int]

# What to lower when an actor of this kind has run out of memory, and the words by which torch, CUDA, vLLM, Ray and Python say so.
KEYS = {
    "engine": "engine.kv_cache_mb, engine.max_num_seqs or engine.max_model_len",
    "learner": "learner.tokens_per_micro_batch or rollout.max_tokens",
    "worker": "rollout.max_running",
}
NO_MEMORY = re.compile(
    r"out of memory|OutOfMemory|allocate memory|not enough memory|MemoryError|bad_alloc|low on memory|memory for the cache blocks|KV cache is needed",
    re.IGNORECASE,
)

RAY_MB = 950  # the driver, the GCS, the raylet, and Ray's five helpers
ENGINE_RUNTIME_MB = 1350
LEARNER_RUNTIME_MB = 550
WORKER_RUNTIME_MB = 240
PROGRAM_MB, PROGRAMS_AT_ONCE = 85, 4  # a Python program with the openai client and its keeper; default of env.args.at_once
LEAST_OBJECT_STORE_MB = 256
# Mirror sao.learner.scoring.LOGIT_ELEMENTS (not imported: that module loads torch): logits of one chunk, and how often they exist at once.
LOGIT_ELEMENTS, LOGIT_COPIES = 1 << 24, 4
# Saved for the backward pass, per token and layer: the two norms, the projections' inputs, q, k, v (heads repeated) and attention's output, the
# residual; and the gate, the up projection, the activation and their product.
WIDTHS_PER_LAYER, FEED_FORWARDS_PER_LAYER = 12, 4


def with_advice(actor: str, reason: str, *, killed_by_kernel: bool = False) -> str:
    """The reason an actor failed, with the keys to lower when it was a want of memory."""
    if not killed_by_kernel and not NO_MEMORY.search(reason):
        return reason
    keys = KEYS.get(actor.partition("-")[0])
    if keys is None or keys in reason:
        return reason
    said = "the kernel killed a process for lack of memory" if killed_by_kernel else "it ran out of memory"
    return f"{reason}; {said}: lower {keys}"


def object_store_mb(config: Config, model: ModelFacts) -> int:
    """`launcher.object_store_mb`, or where it is 0 room for two copies of the published weights beside the trajectories."""
    if config.launcher.object_store_mb:
        return config.launcher.object_store_mb
    return LEAST_OBJECT_STORE_MB + 2 * _mb(model.parameters * BYTES[config.model.dtype])


def engine_parts(config: Config, model: ModelFacts, *, on_gpu: bool) -> Parts:
    """One replica. On CPU vLLM packs its weights and frees the originals, but for an embedding that serves as the head too, which it holds twice."""
    if on_gpu:
        return {"runtime": 2 * ENGINE_RUNTIME_MB}
    weights = _mb((model.parameters + model.vocabulary * model.width) * BYTES[config.engine.dtype])
    return {"runtime": ENGINE_RUNTIME_MB, "weights": weights, "KV": config.engine.kv_cache_mb}


def learner_parts(config: Config, model: ModelFacts, *, on_gpu: bool) -> Parts:
    """Policy and, where there is one, critic with gradients and two moments each, the kept versions, the bundle to publish, and one micro-batch on its way back."""
    element = BYTES[config.model.dtype]
    policy = model.parameters * element
    has_critic = needs_critic(config.algo)
    critic = sum(count for name, count in model.tensors.items() if not name.startswith("lm_head")) * element
    trained = sum(count for name, count in model.tensors.items() if _trained(config, name)) * element
    kept = _mb(policy * (config.rollout.staleness + 2))
    bundle = _mb(policy)
    if on_gpu:
        return {"runtime": 3 * LEARNER_RUNTIME_MB, "kept versions": kept, "bundle": bundle}
    reference = policy if config.algo.kl_coef else 0
    parts = {
        "runtime": LEARNER_RUNTIME_MB,
        "policy": _mb(4 * policy + reference),
        **({"critic": _mb(critic + 3 * trained)} if has_critic else {}),
        "kept versions": kept,
        "bundle": bundle,
        "activations": _mb(activation_bytes(config, model)),
    }
    if config.model.autocast:
        parts["bf16 copy"] = _mb(model.parameters * 2)
    return parts


def activation_bytes(config: Config, model: ModelFacts) -> int:
    """Of one micro-batch, forward and backward; a batch of short episodes may not fill it."""
    tokens = min(config.learner.tokens_per_micro_batch, config.train.batch_size * config.rollout.max_tokens)
    element = BYTES[config.model.dtype]
    saved = tokens * model.layers * (WIDTHS_PER_LAYER * model.width + FEED_FORWARDS_PER_LAYER * model.feed_forward) * element
    logits = min(tokens * model.vocabulary, LOGIT_ELEMENTS) * 4 * LOGIT_COPIES
    return saved + logits


def worker_parts(config: Config, model: ModelFacts) -> Parts:
    """`programs`: what agent programs that are processes take beside it (env=program alone; those of a mixture are not counted)."""
    programs = int(config.env.args.get("at_once", PROGRAMS_AT_ONCE)) if config.env.name == "program" and config.env.args.get("command") else 0
    return {"runtime": WORKER_RUNTIME_MB, **({"programs": PROGRAM_MB * programs} if programs else {})}


def _trained(config: Config, name: str) -> bool:
    """Whether the critic trains this tensor of the policy's checkpoint."""
    return not name.startswith("lm_head") and not any(re.search(pattern, name) for pattern in config.critic.freeze)


def _mb(size: int) -> int:
    return -(-size // MB)
