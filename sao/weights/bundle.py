"""A model's parameters as one flat buffer and a manifest: what a publisher gathers and a receiver loads.

One contiguous uint8 array travels through Ray's object store and is read there without a copy. bfloat16 survives because the manifest, not
numpy, knows the dtype.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray


class TensorSpec(NamedTuple):
    """Name, torch dtype name (`float32`), shape, and the byte offset in the buffer."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int


@dataclass(frozen=True, eq=False)
class WeightBundle:
    """Parameters under their Hugging Face names; tied tensors appear once."""

    specs: tuple[TensorSpec, ...]
    buffer: NDArray[np.uint8]

    def __iter__(self) -> Iterator[tuple[TensorSpec, NDArray[np.uint8]]]:
        for spec in self.specs:
            yield spec, self.buffer[spec.offset : spec.offset + spec.nbytes]

    @property
    def nbytes(self) -> int:
        return int(self.buffer.nbytes)
