"""What each process of a run needs of memory at its peak, in MB by part: arithmetic on the model's sizes, before anything is started.

Constants of the runtimes (interpreter, torch, vLLM, Ray) were measured on the demo and on SmolLM2-135M; the sums lie above what was measured
there, by at most a third. Memory of a GPU is not counted here: with one, weights, optimiser and KV lie there.
"""

from __future__ import annotations

import re

from sao.config import Config
from sao.runtime.models import ModelFacts

MB = 1024 * 1024
BYTES = {"float32": 4, "bfloat16": 2}
Parts = dict[str, int]

RAY_MB = 550  # GCS, raylet, log monitor and the driver
ENGINE_RUNTIME_MB = 750
LEARNER_RUNTIME_MB = 550
WORKER_RUNTIME_MB = 350
LEAST_OBJECT_STORE_MB = 256
# Mirror sao.learner.scoring.LOGIT_ELEMENTS (not imported: that module loads torch): logits of one chunk, and how often they exist at once.
LOGIT_ELEMENTS, LOGIT_COPIES = 1 << 24, 4
# Saved for the backward pass, per token and layer: the two norms, the projections' inputs, q, k, v (heads repeated) and attention's output, the
# residual; and the gate, the up projection, the activation and their product.
WIDTHS_PER_LAYER, FEED_FORWARDS_PER_LAYER = 12, 4


def object_store_mb(config: Config, model: ModelFacts) -> int:
    """`launcher.object_store_mb`, or where it is 0 room for two copies of the published weights beside the trajectories."""
    if config.launcher.object_store_mb:
        return config.launcher.object_store_mb
    return LEAST_OBJECT_STORE_MB + 2 * _mb(model.parameters * BYTES[config.model.dtype])


def engine_parts(config: Config, model: ModelFacts, *, on_gpu: bool) -> Parts:
    """One replica. On CPU vLLM keeps a packed copy of its weights; a publication holds the layer it reloads and no more."""
    if on_gpu:
        return {"runtime": 2 * ENGINE_RUNTIME_MB}
    weights = _mb(model.parameters * BYTES[config.engine.dtype])
    return {"runtime": ENGINE_RUNTIME_MB, "weights": 2 * weights, "KV": config.engine.kv_cache_mb}


def learner_parts(config: Config, model: ModelFacts, *, on_gpu: bool) -> Parts:
    """Policy and critic with gradients and two moments each, the kept versions, the bundle to publish, and one micro-batch on its way back."""
    element = BYTES[config.model.dtype]
    policy = model.parameters * element
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
        "critic": _mb(critic + 3 * trained),
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


def worker_parts(model: ModelFacts) -> Parts:
    return {"runtime": WORKER_RUNTIME_MB}


def _trained(config: Config, name: str) -> bool:
    """Whether the critic trains this tensor of the policy's checkpoint."""
    return not name.startswith("lm_head") and not any(re.search(pattern, name) for pattern in config.critic.freeze)


def _mb(size: int) -> int:
    return -(-size // MB)
