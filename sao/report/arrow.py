"""Arrow arrays built straight from buffers.

`pyarrow.array` and `pyarrow.parquet.read_table` import pandas on first use, two seconds that would fall into a run's first step.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

_NUMPY: dict[pa.DataType, type[np.generic]] = {
    pa.bool_(): np.bool_,
    pa.uint8(): np.uint8,
    pa.int32(): np.int32,
    pa.int64(): np.int64,
    pa.float32(): np.float32,
    pa.float64(): np.float64,
}


def column(values: Sequence[Any], kind: pa.DataType) -> pa.Array:
    """An array of the given type from Python values; None is null. Types: booleans, numbers, strings, binary, lists and structs of them."""
    validity, length = _validity(values), len(values)
    if pa.types.is_list(kind):
        items = [item for value in values if value is not None for item in value]
        offsets = _offsets([0 if value is None else len(value) for value in values])
        return pa.Array.from_buffers(kind, length, [validity, offsets], children=[column(items, kind.value_type)])
    if pa.types.is_struct(kind):
        children = [column([None if value is None else value[field.name] for value in values], field.type) for field in kind]
        return pa.Array.from_buffers(kind, length, [validity], children=children)
    if pa.types.is_string(kind) or pa.types.is_binary(kind):
        encode = str.encode if pa.types.is_string(kind) else bytes
        data = [b"" if value is None else encode(value) for value in values]
        return pa.Array.from_buffers(kind, length, [validity, _offsets([len(d) for d in data]), pa.py_buffer(b"".join(data))])
    filled = np.array([0 if value is None else value for value in values], _NUMPY[kind])
    return pa.Array.from_buffers(kind, length, [validity, _data(filled)])


def list_column(arrays: Sequence[NDArray[Any] | None], kind: pa.DataType) -> pa.Array:
    """A list column from one-dimensional numpy arrays, without a Python object per item; None becomes null."""
    present = [array for array in arrays if array is not None]
    values = np.concatenate(present) if present else np.zeros(0, bool)
    values = values.astype(_NUMPY[kind], copy=False)
    return pa.Array.from_buffers(
        pa.list_(kind),
        len(arrays),
        [_validity(arrays), _offsets([0 if array is None else len(array) for array in arrays])],
        children=[pa.Array.from_buffers(kind, len(values), [None, _data(values)])],
    )


def read(path: Path, columns: Sequence[str]) -> pa.Table:
    """The named columns of one Parquet file, in the order given."""
    with pq.ParquetFile(path) as file:
        return file.read(columns=list(columns), use_threads=False).select(list(columns))


def numpy_column(values: pa.ChunkedArray) -> NDArray[Any]:
    """A column of numbers or booleans without nulls as numpy."""
    return np.concatenate([_values(chunk) for chunk in values.chunks]) if values.num_chunks else np.zeros(0, _NUMPY[values.type])


def list_views(values: pa.ChunkedArray) -> list[Any]:
    """One numpy array per row of a list column, None where the row is null."""
    rows: list[Any] = []
    for chunk in values.chunks:
        items = _values(chunk.values)
        offsets = np.frombuffer(chunk.buffers()[1], np.int32)[chunk.offset : chunk.offset + len(chunk) + 1]
        rows += [items[a:b] if ok else None for a, b, ok in zip(offsets[:-1], offsets[1:], chunk.is_valid().to_pylist(), strict=True)]
    return rows


def _values(chunk: pa.Array) -> NDArray[Any]:
    dtype = _NUMPY[chunk.type]
    buffer = chunk.buffers()[1]
    if buffer is None:
        return np.zeros(0, dtype)
    if dtype is np.bool_:
        return np.unpackbits(np.frombuffer(buffer, np.uint8), bitorder="little")[chunk.offset : chunk.offset + len(chunk)].astype(bool)
    return np.frombuffer(buffer, dtype)[chunk.offset : chunk.offset + len(chunk)]


def _validity(values: Sequence[Any]) -> pa.Buffer | None:
    present = np.array([value is not None for value in values], bool)
    return None if present.all() else _data(present)


def _offsets(lengths: Sequence[int]) -> pa.Buffer:
    offsets = np.zeros(len(lengths) + 1, np.int32)
    np.cumsum(lengths, out=offsets[1:])
    return pa.py_buffer(offsets)


def _data(values: NDArray[Any]) -> pa.Buffer:
    """Arrow's data buffer of a numpy array: booleans are bits, everything else is the array's own memory."""
    return pa.py_buffer(np.packbits(values, bitorder="little") if values.dtype == np.bool_ else np.ascontiguousarray(values))
