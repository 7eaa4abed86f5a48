"""The last few policies: does the trainer give the engine's log-probs, and what were a token's log-probs under the weights that sampled it?

For the first question only tokens of pure turns are compared: a turn during which weights changed under kept KV was sampled from a mixture no single version reproduces. A later
turn is a new request whose history was read under current weights (the cache salt sees to it), so each pure turn stands on its own.
"""

from __future__ import annotations

import copy
from collections import OrderedDict

import numpy as np
import torch
from torch import Tensor, nn

from sao.learner.batching import Batch, pack, plan
from sao.learner.scoring import score


def gap_metrics(prefix: str, suffix: str, trainer: Tensor, behaviour: Tensor) -> dict[str, float]:
    """Mean and largest |trainer - behaviour|; {} when nothing was compared."""
    if not len(trainer):
        return {}
    gap = (trainer.double() - behaviour.double()).abs()
    return {f"{prefix}/{suffix}mean": float(gap.mean()), f"{prefix}/{suffix}max": float(gap.max())}


class VersionRing:
    """The last few policies on the CPU, so that tokens can be scored again under exactly the version that sampled them."""

    def __init__(self, model: nn.Module, keep: int) -> None:
        self._scratch = copy.deepcopy(model).requires_grad_(False)
        self._keep = keep
        self._snapshots: OrderedDict[int, list[Tensor]] = OrderedDict()

    def __contains__(self, version: int) -> bool:
        return version in self._snapshots

    def push(self, version: int, model: nn.Module) -> None:
        """Keep a copy of `model` as `version`; the oldest beyond the ring's size is forgotten."""
        while len(self._snapshots) >= self._keep:  # before the new copy is made, so that the ring never holds one more
            self._snapshots.popitem(last=False)
        self._snapshots[version] = [p.detach().to("cpu", copy=True) for p in model.parameters()]

    def _load(self, version: int) -> None:
        for parameter, saved in zip(self._scratch.parameters(), self._snapshots[version], strict=True):
            parameter.data.copy_(saved)

    @torch.no_grad()
    def old_logprobs(self, batch: Batch, budget: int, *, autocast: bool = False) -> Tensor:
        """Every token's log-prob under the version that sampled it, float[N] in canonical order; NaN where the ring no longer has that version.

        budget: packed tokens of one forward pass. One pass over the samples of each version present.
        """
        device = next(self._scratch.parameters()).device
        old = torch.full((batch.action_tokens,), float("nan"))
        for version in torch.unique(batch.versions).tolist():
            if version not in self:
                continue
            chosen = batch.versions == version
            samples = [batch.samples[i] for i in torch.unique(batch.sample_of[chosen]).tolist()]
            self._load(version)
            for group in plan([s.length for s in samples], budget):
                packed = pack([samples[i] for i in group], device)
                slots = packed.slots.cpu()
                own = chosen[slots]
                logprobs = score(self._scratch, packed, autocast=autocast).logprobs.cpu()
                old = old.to(logprobs.dtype)
                old[slots[own]] = logprobs[own]
        return old

    def state_dict(self) -> dict[int, list[Tensor]]:
        """Every version kept, oldest first."""
        return dict(self._snapshots)

    def load_state_dict(self, state: dict[int, list[Tensor]]) -> None:
        self._snapshots = OrderedDict((version, [tensor.cpu() for tensor in tensors]) for version, tensors in state.items())

    @torch.no_grad()
    def check(self, batch: Batch, *, seed: tuple[int, ...], autocast: bool = False) -> dict[str, float]:
        """Score one seeded sample per version present, under that version: logprob_gap/same_version_{mean, max, tokens}."""
        device = next(self._scratch.parameters()).device
        trainer, behaviour = [], []
        for version in torch.unique(batch.versions).tolist():
            if version not in self:
                continue
            chosen = batch.pure & (batch.versions == version)
            candidates = torch.unique(batch.sample_of[chosen]).tolist()
            if not candidates:
                continue
            sample = batch.samples[candidates[int(np.random.default_rng([*seed, version]).integers(len(candidates)))]]
            self._load(version)
            packed = pack([sample], device)
            own = chosen[packed.slots.cpu()]
            trainer.append(score(self._scratch, packed, autocast=autocast).logprobs.cpu()[own])
            behaviour.append(batch.behaviour[packed.slots.cpu()][own])
        if not trainer:
            return {}
        metrics = gap_metrics("logprob_gap", "same_version_", torch.cat(trainer), torch.cat(behaviour))
        return metrics | {"logprob_gap/same_version_tokens": float(sum(len(t) for t in trainer))}
