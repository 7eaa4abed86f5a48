"""Gradient sums of one optimiser batch, joined over ranks, and the optimiser step that follows."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from sao.config import OptimizerConfig
from sao.errors import ConfigError, LearnerFailure


def world_group() -> dist.ProcessGroup | None:
    """All ranks when torch.distributed runs, else None."""
    return dist.group.WORLD if dist.is_available() and dist.is_initialized() else None


def learning_rate(config: OptimizerConfig, step: int, total_steps: int) -> float:
    """Rate of optimiser step `step` (0-based): linear warm-up to lr, then constant, linear or cosine down to lr * final_lr_ratio at the last step.

    Never 0 at the first step unless lr is. Beyond total_steps it stays at its end.
    """
    warmup = int(config.warmup_ratio * total_steps)
    if step < warmup:
        return config.lr * (step + 1) / warmup
    done = min(1.0, (step - warmup) / max(1, total_steps - 1 - warmup))
    if config.schedule == "constant":
        return config.lr
    remaining = 1.0 - done if config.schedule == "linear" else 0.5 * (1.0 + math.cos(math.pi * done))
    return config.lr * (config.final_lr_ratio + (1.0 - config.final_lr_ratio) * remaining)


def check_optimizer(config: OptimizerConfig, total_steps: int, key: str) -> None:
    """Refuse a schedule that cannot train. lr = 0 is allowed as a control; a rate that silently starts at 0 is not."""
    if total_steps < 1:
        raise ConfigError(f"{key} has {total_steps} optimiser steps to plan its schedule for; set train.steps to at least 1")
    if config.schedule not in ("constant", "linear", "cosine"):
        raise ConfigError(f"{key}.schedule is {config.schedule!r}; choose constant, linear or cosine")
    if not 0 <= config.warmup_ratio < 1:
        raise ConfigError(f"{key}.warmup_ratio is {config.warmup_ratio}; give a share of the steps, at least 0 and below 1")
    if not (math.isfinite(config.lr) and config.lr >= 0):
        raise ConfigError(f"{key}.lr is {config.lr}; give a number of at least 0")
    if not 0 <= config.final_lr_ratio <= 1:
        raise ConfigError(f"{key}.final_lr_ratio is {config.final_lr_ratio}; give a share between 0 and 1")
    if len(config.betas) != 2 or not all(0 <= b < 1 for b in config.betas):
        raise ConfigError(f"{key}.betas is {list(config.betas)}; give two numbers in [0, 1)")
    if config.grad_clip < 0:
        raise ConfigError(f"{key}.grad_clip is {config.grad_clip}; give a norm, or 0 for no clipping")
    if config.lr > 0 and learning_rate(config, 0, total_steps) <= 0:
        raise ConfigError(f"{key} gives a learning rate of 0 at the first step; raise final_lr_ratio or train.steps")


class GradientSums:
    """AdamW over parameters whose `.grad` holds the SUM of per-token gradients of one optimiser batch.

    `sums` are float64 counters that travel with the gradients; `names` says which is which. Between `apply` and the next backward all are zero.
    """

    def __init__(self, model: nn.Module, config: OptimizerConfig, *, total_steps: int, key: str, names: Sequence[str]) -> None:
        check_optimizer(config, total_steps, key)
        self.parameters = [p for p in model.parameters() if p.requires_grad]
        self.config, self.total_steps, self.key = config, total_steps, key
        self.names = tuple(names)
        self.sums = torch.zeros(len(names), dtype=torch.float64, device=self.parameters[0].device)
        self.steps = 0
        matrices = [p for p in self.parameters if p.ndim >= 2]
        vectors = [p for p in self.parameters if p.ndim < 2]
        groups = [{"params": matrices, "weight_decay": config.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
        self.optimizer = torch.optim.AdamW(
            [g for g in groups if g["params"]], lr=config.lr, betas=(config.betas[0], config.betas[1]), eps=config.eps, fused=True
        )

    def add(self, **counts: Tensor | float) -> None:
        for name, count in counts.items():
            self.sums[self.names.index(name)] += count.detach().double() if isinstance(count, Tensor) else count

    def totals(self) -> dict[str, float]:
        return dict(zip(self.names, self.sums.tolist(), strict=True))

    def reduce(self) -> None:
        """Add up gradients and counters over all ranks; a rank that saw no micro-batch takes part with zeros."""
        group = world_group()
        if group is None:
            return
        dist.all_reduce(self.sums, group=group)
        flat = torch.cat([(torch.zeros_like(p) if p.grad is None else p.grad).reshape(-1) for p in self.parameters])
        dist.all_reduce(flat, group=group)
        offset = 0
        for parameter in self.parameters:
            parameter.grad = flat[offset : offset + parameter.numel()].view_as(parameter).clone()
            offset += parameter.numel()

    def clear(self) -> None:
        self.optimizer.zero_grad(set_to_none=True)
        self.sums.zero_()

    def apply(self, denominator: float) -> dict[str, float]:
        """Divide by the global count, clip, step. Returns grad_norm (before clipping) and lr; weights stay as they were when it raises.

        Raises LearnerFailure when the gradient is not finite.
        """
        gradients = [p.grad for p in self.parameters if p.grad is not None]
        if not gradients:
            self.clear()
            return {}
        norm = torch.nn.utils.get_total_norm(gradients).double() / denominator
        value = float(norm)
        if not math.isfinite(value) or not math.isfinite(float(self.sums.sum())):
            self.clear()
            raise LearnerFailure(
                f"{self.key}: the gradient of optimiser step {self.steps + 1} is not finite (norm {value}); the weights were left untouched"
            )
        scale = 1.0 / denominator
        if self.config.grad_clip and value > self.config.grad_clip:
            scale *= self.config.grad_clip / value
        torch._foreach_mul_(gradients, scale)
        rate = learning_rate(self.config, self.steps, self.total_steps)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.step()
        self.steps += 1
        self.clear()
        return {"grad_norm": value, "lr": rate}

    def reset(self) -> None:
        """Forget the moments; the schedule goes on."""
        self.optimizer.state.clear()

    def state_dict(self) -> dict[str, Any]:
        return {"optimizer": self.optimizer.state_dict(), "steps": self.steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.optimizer.load_state_dict(state["optimizer"])
        self.steps = state["steps"]
