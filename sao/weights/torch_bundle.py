"""Between torch parameters and `WeightBundle`: the only place that knows both.

Unpacked tensors are views of the bundle's buffer. Ray hands that buffer over read-only, so a receiver copies out of the views and never
writes into them.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator

import numpy as np
import torch
from numpy.typing import NDArray

from sao.weights.bundle import TensorSpec, WeightBundle

# Offsets are multiples of this, so that a view of any dtype is aligned.
ALIGNMENT = 64


def _storage_key(tensor: torch.Tensor) -> tuple[object, ...]:
    return tensor.untyped_storage().data_ptr(), tensor.storage_offset(), tuple(tensor.shape), tensor.stride(), tensor.dtype


def pack(named_tensors: Iterable[tuple[str, torch.Tensor]], buffer: NDArray[np.uint8] | None = None) -> WeightBundle:
    """Copy tensors into one flat uint8 buffer (a device tensor is copied to the host here).

    Tensors that share memory (tied embeddings) are packed once, under the first name. `buffer`, when it has exactly the size needed, is
    written into instead of a new one: a publisher that packs every step allocates once. Raises ValueError when a name comes twice.
    """
    kept: list[tuple[str, torch.Tensor]] = []
    names: set[str] = set()
    seen: set[tuple[object, ...]] = set()
    specs: list[TensorSpec] = []
    offset = 0
    for name, given in named_tensors:
        if name in names:
            raise ValueError(f"tensor {name!r} is named twice")
        names.add(name)
        tensor = given.detach()
        if tensor.numel():
            key = _storage_key(tensor)
            if key in seen:
                continue
            seen.add(key)
        nbytes = tensor.numel() * tensor.element_size()
        specs.append(TensorSpec(name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), offset, nbytes))
        kept.append((name, tensor))
        offset += -(-nbytes // ALIGNMENT) * ALIGNMENT
    if buffer is None or buffer.nbytes != offset:
        buffer = np.zeros(offset, np.uint8)
    whole = torch.from_numpy(buffer)
    for spec, (_, tensor) in zip(specs, kept, strict=True):
        _view(whole, spec).copy_(tensor)
    return WeightBundle(tuple(specs), buffer)


def unpack(bundle: WeightBundle) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (name, tensor) without a copy: each tensor is a CPU view of the bundle's buffer, to be read only."""
    with warnings.catch_warnings():
        # Ray's buffers are read-only and torch warns that it cannot mark a tensor so; nobody here writes.
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        whole = torch.from_numpy(bundle.buffer)
    for spec in bundle.specs:
        yield spec.name, _view(whole, spec)


def _view(whole: torch.Tensor, spec: TensorSpec) -> torch.Tensor:
    dtype: torch.dtype = getattr(torch, spec.dtype)
    if spec.nbytes == 0:
        return torch.empty(spec.shape, dtype=dtype)
    return whole[spec.offset : spec.offset + spec.nbytes].view(dtype).view(spec.shape)
