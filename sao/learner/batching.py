"""From trajectories to micro-batches: samples, packing, and the flat arrays of one optimiser batch.

A sample is one segment. Samples are packed end to end, without padding, into micro-batches of a token budget; `cu_seq_lens` says where each begins,
and the attention function keeps them apart. Everything the losses need per action token lives in flat arrays over the whole batch, in canonical
order (samples by episode ordinal and segment, tokens by position); a micro-batch knows its tokens' places there, so no result depends on the packing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sao.errors import ConfigError, LearnerFailure
from sao.learner import trie
from sao.trajectory import Segment, Trajectory


@dataclass(frozen=True, eq=False)
class Sample:
    """One segment on its way through the learner.

    trajectory, segment: indices into the sorted batch. actions: positions of its action tokens, int64[n]. offset: where they start in the flat
    arrays. state_offset: where its T + 1 states start in flat state arrays (state t stands before token t; state T after the last token).
    """

    trajectory: int
    segment: int
    data: Segment
    actions: NDArray[np.int64]
    offset: int
    state_offset: int

    @property
    def length(self) -> int:
        return len(self.data)


@dataclass(frozen=True, eq=False)
class Batch:
    """One optimiser batch on the CPU, canonical order; flat arrays have one entry per action token, N in all.

    behaviour float32[N]; versions int64[N]; sample_of int64[N]; rewards float32[N], the episode's outcome on the last action token of EVERY segment
    (or the turn rewards); trained bool[N], false for tokens of dropped trajectories; pure bool[N], the token's whole turn came from one version.
    """

    trajectories: tuple[Trajectory, ...]
    samples: tuple[Sample, ...]
    behaviour: Tensor
    versions: Tensor
    sample_of: Tensor
    rewards: Tensor
    trained: Tensor
    pure: Tensor

    @property
    def action_tokens(self) -> int:
        return len(self.behaviour)

    @property
    def states(self) -> int:
        return sum(s.length + 1 for s in self.samples)

    @property
    def tokens(self) -> int:
        return sum(s.length for s in self.samples)

    @cached_property
    def state_of(self) -> Tensor:
        """int64[N]: the flat state each action token was sampled in."""
        return torch.from_numpy(np.concatenate([np.zeros(0, np.int64), *(s.state_offset + s.actions for s in self.samples)]))

    @cached_property
    def end_state(self) -> Tensor:
        """int64[S]: the flat state after each sample's last token."""
        return torch.tensor([s.state_offset + s.length for s in self.samples], dtype=torch.long)


def _pure_turns(segment: Segment) -> NDArray[np.bool_]:
    """Per position: the token belongs to a turn whose every sampled token carries one version.

    Turns are maximal runs of sampled tokens, also those without a log-prob: a version switch inside means KV of older weights was read.
    """
    sampled = segment.versions >= 0
    begins = np.flatnonzero(sampled & ~np.append(False, sampled[:-1]))
    ends = np.flatnonzero(sampled & ~np.append(sampled[1:], False)) + 1
    pure = np.zeros(len(segment), bool)
    for begin, end in zip(begins, ends, strict=True):
        versions = segment.versions[begin:end]
        pure[begin:end] = versions.min() == versions.max()
    return pure


def make_batch(trajectories: Sequence[Trajectory], *, drop_truncated: bool = False) -> Batch:
    """Sort by episode, make one sample per segment with an action token, lay out the flat arrays.

    Raises LearnerFailure for a failed episode (it is never trained) and ConfigError for a segment sampled from a truncated distribution.
    """
    ordered = tuple(sorted(trajectories, key=lambda t: t.episode_id))
    samples: list[Sample] = []
    rewards, trained = [], []
    offset = states = 0
    for index, trajectory in enumerate(ordered):
        if trajectory.finish.kind == "failed":
            raise LearnerFailure(
                f"episode {trajectory.episode_id} failed ({trajectory.finish.detail}) and must not reach the learner: drop it before"
            )
        placed = trajectory.token_rewards() if trajectory.turn_rewards is not None else None
        kept = not (drop_truncated and trajectory.finish.kind == "truncated")
        for number, segment in enumerate(trajectory.segments):
            actions = np.flatnonzero(segment.action_mask)
            if not len(actions):
                continue
            if not segment.sampling.is_raw:
                raise ConfigError(
                    f"episode {trajectory.episode_id} was sampled with {segment.sampling}: train on temperature > 0, top_p=1, top_k=0, min_p=0 only"
                )
            samples.append(Sample(index, number, segment, actions, offset, states))
            outcome = np.zeros(len(actions), np.float32)
            if placed is None:
                outcome[-1] = trajectory.reward
            else:
                outcome = placed[number][actions]
            rewards.append(outcome)
            trained.append(np.full(len(actions), kept))
            offset += len(actions)
            states += len(segment) + 1

    def flat(parts: list[NDArray], dtype: type) -> Tensor:
        return torch.from_numpy(np.concatenate([np.zeros(0, dtype), *parts]).astype(dtype))

    return Batch(
        trajectories=ordered,
        samples=tuple(samples),
        behaviour=flat([s.data.logprobs[s.actions] for s in samples], np.float32),
        versions=flat([s.data.versions[s.actions] for s in samples], np.int64),
        sample_of=flat([np.full(len(s.actions), i) for i, s in enumerate(samples)], np.int64),
        rewards=flat(rewards, np.float32),
        trained=flat(trained, np.bool_),
        pure=flat([_pure_turns(s.data)[s.actions] for s in samples], np.bool_),
    )


@dataclass(frozen=True, eq=False)
class Packed:
    """Samples packed end to end: one row of T tokens, B samples, N action tokens.

    input_ids, position_ids int64[1, T]; positions start again at 0 in each sample. cu_seq_lens int32[B + 1]; lengths its differences on the host.
    rows int64[N]: packed index whose hidden state predicts each action token; targets int64[N]: those tokens. temperature float32[N];
    unit_temperature: all are 1.
    slots int64[N]: their places in the batch's flat arrays. state_slots int64[T]: place in flat state arrays of the state AFTER each packed token.
    shared: the trie whose rows the model runs on instead of the T tokens, or None.
    """

    input_ids: Tensor
    position_ids: Tensor
    cu_seq_lens: Tensor
    lengths: tuple[int, ...]
    rows: Tensor
    targets: Tensor
    temperature: Tensor
    unit_temperature: bool
    slots: Tensor
    state_slots: Tensor
    shared: trie.Trie | None = None

    @property
    def tokens(self) -> int:
        return self.input_ids.shape[1]

    @property
    def computed_tokens(self) -> int:
        """Rows that the model runs on."""
        return self.tokens if self.shared is None else len(self.shared.token_ids)

    def model_inputs(self) -> dict[str, Any]:
        """Keyword arguments of a transformers model whose attention takes cu_seq_lens; `seq_lens` saves packed_sdpa a wait for the device."""
        if self.shared is not None:
            return {"input_ids": self.shared.token_ids[None], "position_ids": self.shared.position_ids[None], "trie": self.shared}
        longest = max(self.lengths, default=0)
        return {
            "input_ids": self.input_ids,
            "position_ids": self.position_ids,
            "cu_seq_lens_q": self.cu_seq_lens,
            "cu_seq_lens_k": self.cu_seq_lens,
            "max_length_q": longest,
            "max_length_k": longest,
            "seq_lens": self.lengths,
        }


def pack(samples: Sequence[Sample], device: torch.device | str = "cpu", *, sharing: bool = False) -> Packed:
    """Lay `samples` end to end in the order given. sharing: the model computes each prefix that several of them share once."""
    lengths = tuple(s.length for s in samples)
    starts = np.cumsum([0, *lengths])

    def join(parts: list[NDArray], dtype: type) -> Tensor:
        return torch.from_numpy(np.concatenate([np.zeros(0, dtype), *parts]).astype(dtype)).to(device)

    return Packed(
        input_ids=join([s.data.token_ids for s in samples], np.int64)[None],
        position_ids=join([np.arange(n) for n in lengths], np.int64)[None],
        cu_seq_lens=torch.tensor(starts, dtype=torch.int32, device=device),
        lengths=lengths,
        rows=join([start + s.actions - 1 for start, s in zip(starts[:-1], samples, strict=True)], np.int64),
        targets=join([s.data.token_ids[s.actions] for s in samples], np.int64),
        temperature=join([np.full(len(s.actions), s.data.sampling.temperature) for s in samples], np.float32),
        unit_temperature=all(s.data.sampling.temperature == 1.0 for s in samples),
        slots=join([s.offset + np.arange(len(s.actions)) for s in samples], np.int64),
        state_slots=join([s.state_offset + 1 + np.arange(s.length) for s in samples], np.int64),
        shared=trie.build([s.data.token_ids for s in samples], device) if sharing and samples else None,
    )


def plan(lengths: Sequence[int], budget: int, order: Sequence[int] | None = None) -> list[list[int]]:
    """Micro-batches as lists of sample indices, filled in `order` (canonical by default) up to `budget` tokens each.

    A sample longer than the budget gets a micro-batch of its own. Deterministic; every index occurs exactly once.
    """
    if budget < 1:
        raise ConfigError(f"learner.tokens_per_micro_batch is {budget}; give at least 1")
    groups: list[list[int]] = []
    room = 0
    for index in range(len(lengths)) if order is None else order:
        if not groups or lengths[index] > room:
            groups.append([])
            room = budget
        groups[-1].append(int(index))
        room -= lengths[index]
    return groups


def shuffled(count: int, *seed: int) -> list[int]:
    """A permutation of range(count) that depends on the seeds alone."""
    return [int(i) for i in np.random.default_rng(list(seed)).permutation(count)]
