"""SAO's entry point in vLLM's `vllm.general_plugins` group: runs in every process vLLM starts, any number of times.

It registers the weight-transfer backend and repairs sampled speculative decoding where the installed vLLM gets it wrong.
"""

from __future__ import annotations

import inspect
from typing import Any

BACKEND = "sao_bundle"


def register() -> None:
    """Idempotent; call it before an engine is built."""
    _register_backend()
    _repair_speculative_sampling()


def _register_backend() -> None:
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    if BACKEND not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(BACKEND, "sao.inference.vllm_transfer", "BundleTransferEngine")


def expand_per_request(output: Any, input_val: Any, cu_num_tokens: Any, replace_from: Any, replace_to: Any, MAX_NUM_TOKENS: Any = None) -> None:
    """Write request i's value to output[cu[i-1]:cu[i]], with `replace_from` turned into `replace_to`.

    input_val [requests] any dtype, cu_num_tokens [requests] inclusive prefix sums, output [cu[-1]] of input_val's dtype, written in place.
    The parameter names are those of the kernel it stands in for: launches bind by name.
    """
    import torch

    ends = cu_num_tokens.to(torch.int64)
    counts = ends.diff(prepend=ends.new_zeros(1))
    values = input_val.masked_fill(input_val == replace_from, replace_to)
    output[: int(ends[-1])].copy_(values.repeat_interleave(counts))


def _repair_speculative_sampling() -> None:
    """Replace vLLM's CPU stand-in for the kernel that spreads temperature, top-k and top-p over a request's draft tokens.

    The stand-in of 0.32 converts its output argument to int64, fills the converted copy and drops it, so the caller reads uninitialised
    temperatures. Log-probs come from elsewhere and look right; only the sampled distribution is wrong. Ours is right under any version that
    keeps the signature; it must be in place before the platform registers its kernels, when the worker is made.
    """
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return
    from vllm.utils import cpu_triton_utils as kernels

    original = getattr(kernels, "_expand_kernel_impl", None)
    if original is not None and list(inspect.signature(original).parameters) == list(inspect.signature(expand_per_request).parameters):
        kernels._expand_kernel_impl = expand_per_request
