"""Loading a `WeightBundle` into a live vLLM model, as a backend of vLLM's own weight-transfer API.

Order of events, on the thread that owns the engine and between two of its steps: `Manifest.check` (touches nothing), start, update, finish.
The manifest is what makes a refusal safe: a bundle that does not fit is refused before the first parameter changes.
"""

from __future__ import annotations

import json
import logging
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from vllm.distributed.weight_transfer.base import WeightTransferEngine, WeightTransferInitInfo, WeightTransferUpdateInfo
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.platforms import current_platform

from sao.errors import PublishFailure
from sao.weights.bundle import WeightBundle
from sao.weights.torch_bundle import unpack

# It warns "Failed to load weights" of every layer without weights of its own (a tied head, rotary tables) at each reload; coverage is checked
# below. A filter, not a level: vLLM configures its loggers again when an engine is made, which resets levels and keeps filters.
logging.getLogger("vllm.model_executor.model_loader.reload.layerwise").addFilter(lambda record: "Failed to load weights" not in record.msg)


def _shown(names: set[str]) -> str:
    listed = sorted(names)
    return ", ".join(listed[:5]) + (f" and {len(listed) - 5} more" if len(listed) > 5 else "")


@dataclass(frozen=True)
class Manifest:
    """Names and shapes of the checkpoint the engine was started from: what a bundle must hold, no more and no less."""

    shapes: Mapping[str, tuple[int, ...]]
    tied: frozenset[str]

    @classmethod
    def of_checkpoint(cls, directory: str, tied: bool) -> Manifest | None:
        """Read safetensors headers, never the tensors. None when the directory holds none (hub id, another format): then only loading can tell."""
        shapes: dict[str, tuple[int, ...]] = {}
        for file in sorted(Path(directory).glob("*.safetensors")):
            with file.open("rb") as stream:
                header = json.loads(stream.read(int.from_bytes(stream.read(8), "little")))
            shapes.update({name: tuple(entry["shape"]) for name, entry in header.items() if name != "__metadata__"})
        return cls(shapes, frozenset({"lm_head.weight"} if tied else ())) if shapes else None

    def check(self, bundle: WeightBundle) -> None:
        """Raise PublishFailure naming the tensors when the bundle and the checkpoint differ in a name or a shape."""
        given = {spec.name: tuple(spec.shape) for spec in bundle.specs}
        unknown = set(given) - set(self.shapes) - self.tied
        missing = set(self.shapes) - set(given) - self.tied
        if unknown or missing:
            parts = [f"no parameter of the engine for {_shown(unknown)}"] if unknown else []
            parts += [f"nothing for the engine's {_shown(missing)}"] if missing else []
            raise PublishFailure(f"the published weights do not fit the engine's model: {'; '.join(parts)}")
        for name, shape in given.items():
            expected = self.shapes.get(name, shape)
            if shape != expected:
                raise PublishFailure(f"tensor {name} has shape {list(shape)}, the engine's model has {list(expected)}")


@dataclass
class BundleInit(WeightTransferInitInfo):
    """Nothing to agree on beforehand."""


@dataclass
class BundleUpdate(WeightTransferUpdateInfo):
    bundle: WeightBundle


class BundleTransferEngine(WeightTransferEngine[BundleInit, BundleUpdate]):
    """Receives a bundle by reference (one process) or pickled (workers of a tensor-parallel engine) and reloads the model layer by layer."""

    init_info_cls = BundleInit
    update_info_cls = BundleUpdate

    def init_transfer_engine(self, init_info: BundleInit) -> None:
        self._expect_all_parameters()

    def _expect_all_parameters(self) -> None:
        self._expected = {name for name, _ in self.model.named_parameters()}

    def start_weight_update(self) -> None:
        if not hasattr(self, "_expected"):
            self._expect_all_parameters()
        # A plain load_weights fails on CPU, where linear weights were prepacked and freed; the layerwise reload rebuilds each layer.
        initialize_layerwise_reload(self.model)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        self.receive_weights(self.parse_update_info(update_info))
        if not current_platform.is_cpu():
            torch.accelerator.synchronize()

    def receive_weights(self, update_info: BundleUpdate) -> None:
        self._loaded = self.model.load_weights(unpack(update_info.bundle))

    def finish_weight_update(self) -> None:
        finalize_layerwise_reload(self.model, self.model_config)
        if current_platform.is_cpu():
            _repack_shared_linears(self.model)
        # Loaders that return nothing cannot be checked here; the manifest and the canary remain.
        uncovered = self._expected - set(self._loaded) if self._loaded else set()
        if uncovered:
            raise PublishFailure(f"the publication left parameters of the engine untouched: {_shown(uncovered)}")

    def shutdown(self) -> None:
        pass


def _repack_shared_linears(model: torch.nn.Module) -> None:
    """Prepack again every linear layer whose weight belongs to another module too (a tied lm_head).

    The layerwise reload processes the module that was loaded, the embedding; the head that shares its weight would keep multiplying by the
    packed copy of the old one.
    """
    from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm

    modules = {id(module): module for module in model.modules()}.values()
    owners = Counter(id(module.weight) for module in modules if isinstance(getattr(module, "weight", None), torch.Tensor))
    for module in modules:
        weight = getattr(module, "weight", None)
        if isinstance(weight, torch.Tensor) and weight.numel() and hasattr(module, "cpu_linear") and owners[id(weight)] > 1:
            dispatch_cpu_unquantized_gemm(module, remove_weight=False)
