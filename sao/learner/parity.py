"""The last few policies: does the trainer give the engine's log-probs, the same with and without shared prefixes, and what were a token's under the weights that sampled it?

For the first question only tokens of pure turns are compared: a turn during which weights changed under kept KV was sampled from a mixture no single version reproduces. A later
turn is a new request whose history was read under current weights (the cache salt sees to it), so each pure turn stands on its own.
"""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from sao.errors import ConfigError
from sao.learner.batching import Batch, Sample, make_batch, pack, plan
from sao.learner.scoring import score
from sao.trajectory import EpisodeId, FinishReason, SamplingSpec, Segment, Trajectory

# Largest difference of a log-prob with and without shared prefixes: rounding alone, by the precision the layers compute in.
SHARING_TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-3, torch.bfloat16: 0.5}


def gap_metrics(prefix: str, suffix: str, trainer: Tensor, behaviour: Tensor) -> dict[str, float]:
    """Mean and largest |trainer - behaviour|; {} when nothing was compared."""
    if not len(trainer):
        return {}
    gap = (trainer.double() - behaviour.double()).abs()
    return {f"{prefix}/{suffix}mean": float(gap.mean()), f"{prefix}/{suffix}max": float(gap.max())}


def probe_samples(sequences: Sequence[Sequence[int]]) -> tuple[Sample, ...]:
    """Samples of given token ids, all but the first of each an action, for a check that scores them."""
    episodes = []
    for number, tokens in enumerate(sequences):
        asked = np.arange(len(tokens)) > 0
        segment = Segment(np.array(tokens, np.int32), asked, np.where(asked, -1.0, np.nan), np.where(asked, 0, -1), SamplingSpec())
        episodes.append(Trajectory(EpisodeId(number), "probe", "probe", (segment,), 0.0, FinishReason.terminal(), 0))
    return make_batch(episodes).samples


@torch.no_grad()
def check_sharing(model: Any, *, autocast: bool = False) -> None:
    """Score two sequences that branch, with and without sharing.

    Raises ConfigError when the log-probs differ: some layer (a recurrent one, say) lets tokens see each other by another way than the attention function.
    """
    last = model.config.vocab_size - 1
    samples = probe_samples([[min(t, last) for t in (1, 2, 3, 4, fifth, 6, 7, 8)] for fifth in (5, 9)])
    device = next(model.parameters()).device
    plain, shared = (score(model, pack(samples, device, sharing=sharing), autocast=autocast).logprobs for sharing in (False, True))
    gap = float((plain - shared).abs().max())
    if not gap <= SHARING_TOLERANCE[torch.bfloat16 if autocast else next(model.parameters()).dtype]:
        raise ConfigError(
            f"learner.sharing=packed changes this model's log-probs by {gap:.2g}: its layers let branches of a prefix see each other; set learner.sharing=off"
        )


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
