"""A checkpoint's weights and optimiser state against those of a learner that was rolled forward to it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from sao.learner.learner import STATE_FILE
from sao.replay.compare import Comparison, Departure, Tally

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def compare_weights(found: Comparison, step: int, recorded: Path, replayed: Path) -> None:
    """Two folders as `TorchLearner.save` writes them (`export`'s has no optimiser state). step: the last one trained before they were written."""
    for part in ("policy", "critic"):
        before, after = dict(_tensors(recorded / part)), dict(_tensors(replayed / part))
        _compare(found, step, f"{part} weights", before, after)
    if (recorded / STATE_FILE).exists():
        states = [torch.load(folder / STATE_FILE, map_location="cpu", weights_only=True) for folder in (recorded, replayed)]
        _compare(found, step, "optimiser state", *(dict(_flat(state)) for state in states))


def _tensors(folder: Path) -> Iterator[tuple[str, Tensor]]:
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 - the reader is no mapping
                yield name, file.get_tensor(name)


def _flat(state: Any, prefix: str = "") -> Iterator[tuple[str, Tensor]]:
    """The numbers and tensors of a nested state under dotted names."""
    if isinstance(state, Tensor):
        yield prefix, state
    elif isinstance(state, bool | int | float):
        yield prefix, torch.tensor(state, dtype=torch.float64)
    elif isinstance(state, dict):
        for key, value in state.items():
            yield from _flat(value, f"{prefix}.{key}" if prefix else str(key))
    elif isinstance(state, list | tuple):
        for index, value in enumerate(state):
            yield from _flat(value, f"{prefix}.{index}")


def _compare(found: Comparison, step: int, what: str, before: dict[str, Tensor], after: dict[str, Tensor]) -> None:
    for name in [*before, *(name for name in after if name not in before)]:
        a, b = before.get(name), after.get(name)
        if a is None or b is None or a.shape != b.shape or a.dtype != b.dtype:
            tally = found.tallies.setdefault(what, Tally())
            tally.differ += 1
            found.departs(tally, Departure(step, what, name, _form(a), _form(b), float("nan")))
            continue
        # numpy knows no bfloat16: equal bits are compared as integers, and only what differs is looked at as numbers
        bits = _BITS[a.element_size()]
        if torch.equal(a.contiguous().view(bits), b.contiguous().view(bits)):
            found.tallies.setdefault(what, Tally()).compared += a.numel()
        else:
            found.arrays(step, what, f"{name}, element", a.double().numpy(), b.double().numpy())


def _form(tensor: Tensor | None) -> str:
    return "absent" if tensor is None else f"{list(tensor.shape)} {tensor.dtype}"
