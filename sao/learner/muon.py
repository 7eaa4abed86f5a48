"""Muon in fp32: momentum, then the nearest semi-orthogonal matrix (Jordan et al. 2024).

torch.optim.Muon iterates in bfloat16, which a CPU without bfloat16 units multiplies a hundred times slower; here the iteration keeps the weights'
type, and matrices of one shape go through it together.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

QUINTIC = (3.4445, -4.7750, 2.0315)  # coefficients of the Newton-Schulz iteration: steep at 0, stays in about [0.7, 1.2]


def orthogonalise(matrices_NRC: torch.Tensor, iterations: int = 5) -> torch.Tensor:
    """[N, rows, columns] -> the same shape, singular values pushed to about 1."""
    wide = matrices_NRC if matrices_NRC.shape[1] <= matrices_NRC.shape[2] else matrices_NRC.mT
    x = wide / (wide.norm(dim=(1, 2), keepdim=True) + 1e-7)
    a, b, c = QUINTIC
    for _ in range(iterations):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x if wide is matrices_NRC else x.mT


class Muon(torch.optim.Optimizer):
    """For two-dimensional parameters. The step is lr * sqrt(max(1, rows / columns)) in every direction, whatever the gradient's scale."""

    def __init__(self, params: Iterable[torch.nn.Parameter], lr: float = 0.02, momentum: float = 0.95) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            by_shape: dict[torch.Size, list[torch.Tensor]] = {}
            for parameter in group["params"]:
                if parameter.grad is not None:
                    by_shape.setdefault(parameter.shape, []).append(parameter)
            for shape, parameters in by_shape.items():
                updates = orthogonalise(torch.stack([self._nesterov(p, group["momentum"]) for p in parameters]))
                scale = max(1.0, shape[0] / shape[1]) ** 0.5
                torch._foreach_add_(parameters, list(updates.unbind()), alpha=-group["lr"] * scale)

    def _nesterov(self, parameter: torch.Tensor, momentum: float) -> torch.Tensor:
        assert parameter.grad is not None
        buffer = self.state[parameter].setdefault("momentum", torch.zeros_like(parameter))
        buffer.lerp_(parameter.grad, 1 - momentum)
        return parameter.grad.lerp(buffer, momentum)
