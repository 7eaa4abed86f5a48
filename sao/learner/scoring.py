"""The one way log-probs are computed: training, records, canaries and checks all come here.

Hidden states of a packed micro-batch -> vocabulary head at the action tokens only, in chunks -> float32 log-softmax at the segment's temperature.
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from sao.algorithms.policy_loss import at_least_fp32
from sao.learner.batching import Packed

# Logits alive at a time: 16 M floats. Above it the head runs in chunks, recomputed in the backward pass.
LOGIT_ELEMENTS = 1 << 24
# Entropy without gradient looks at every k-th row, k = vocabulary / this, so that its cost stays small.
ENTROPY_VOCABULARY = 8192

EntropyMode = Literal["none", "sampled", "graph"]


class Scores(NamedTuple):
    """logprobs [N], float32 (float64 for a float64 model). entropy, nats: [N] with graph, or detached at a regular subset of rows, or None."""

    logprobs: Tensor
    entropy: Tensor | None


def hidden_states(backbone: nn.Module, packed: Packed, *, autocast: bool = False) -> Tensor:
    """Last hidden states [T, d] of a packed micro-batch."""
    with torch.autocast(packed.input_ids.device.type, torch.bfloat16, enabled=autocast):
        hidden: Tensor = backbone(**packed.model_inputs(), use_cache=False).last_hidden_state[0]
    return hidden if packed.shared is None else hidden.index_select(0, packed.shared.paths)


def _head(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, temperature: Tensor | None, mode: EntropyMode
) -> tuple[Tensor, Tensor]:
    """Log-probs [n] of `targets` and an entropy tensor (empty for `none`)."""
    logits = at_least_fp32(F.linear(hidden, weight, bias))
    if temperature is not None:
        logits = logits / temperature[:, None].to(logits.dtype)
    normaliser = torch.logsumexp(logits, -1)
    logprobs = logits.gather(1, targets[:, None])[:, 0] - normaliser
    if mode == "none":
        return logprobs, logprobs.new_zeros(0)
    with torch.set_grad_enabled(mode == "graph" and torch.is_grad_enabled()):
        stride = 1 if mode == "graph" else -(-weight.shape[0] // ENTROPY_VOCABULARY)
        some, log_z = logits[::stride], normaliser[::stride]
        entropy = log_z - (torch.exp(some - log_z[:, None]) * some).sum(-1)
    return logprobs, entropy


def score(model: nn.Module, packed: Packed, *, entropy: EntropyMode = "none", autocast: bool = False, logit_elements: int = LOGIT_ELEMENTS) -> Scores:
    """Log-probs of the action tokens of a packed micro-batch under a causal language model.

    model: whose `base_model` gives hidden states and whose output embedding gives logits. With gradient when enabled. entropy: `sampled` is a
    metric without gradient, `graph` serves an entropy term. logit_elements bounds rows x vocabulary held at once.
    """
    causal: Any = model
    rows = hidden_states(causal.base_model, packed, autocast=autocast).index_select(0, packed.rows)
    head = causal.get_output_embeddings()
    weight, bias = head.weight, head.bias
    rows = rows.to(weight.dtype)
    temperature = None if packed.unit_temperature else packed.temperature
    step = max(1, logit_elements // weight.shape[0])
    if len(rows) <= step:
        logprobs, entropies = _head(rows, weight, bias, packed.targets, temperature, entropy)
        return Scores(logprobs, entropies if entropy != "none" else None)
    parts = []
    for begin in range(0, len(rows), step):
        chunk = slice(begin, begin + step)
        arguments = (rows[chunk], weight, bias, packed.targets[chunk], None if temperature is None else temperature[chunk], entropy)
        parts.append(checkpoint(_head, *arguments, use_reentrant=False) if torch.is_grad_enabled() else _head(*arguments))
    return Scores(torch.cat([p[0] for p in parts]), torch.cat([p[1] for p in parts]) if entropy != "none" else None)
