"""Advantages without a critic, from a batch to its tokens: the outcomes of all ranks in, one advantage per action token out."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from sao.algorithms import catalogue
from sao.algorithms.outcome import Outcomes
from sao.config import Config
from sao.errors import LearnerFailure
from sao.learner.batching import Batch
from sao.learner.optimizer import world_group


class Baseline:
    """The configured advantage and its state, which belongs into the checkpoint. Every rank holds the same state."""

    def __init__(self, config: Config) -> None:
        self.function = catalogue.function_of("advantage", config.algo)
        self.arguments = catalogue.arguments("advantage", config.algo)
        self.name = config.algo.advantage
        self.per_group = config.rollout.rollouts_per_prompt
        self.state: dict[str, Any] = {}

    def advantages(self, batch: Batch, metrics: dict[str, float]) -> Tensor:
        """float32[N], an episode's advantage on each of its action tokens, 0 for dropped episodes. Moves the state on.

        metrics gains actor/zero_advantage_frac, the share of the whole batch's kept episodes that train nothing. Raises LearnerFailure when the function
        returns another shape, a number that is not finite, or a state that a checkpoint could not give back.
        """
        outcomes, own = outcomes_of(batch, self.per_group)
        values, state = self._returned(self.function(outcomes, self.state, **self.arguments), len(outcomes.rewards))
        self.state = state
        values = torch.where(outcomes.kept, values, 0.0)
        if outcomes.kept.any():
            metrics["actor/zero_advantage_frac"] = float((values[outcomes.kept] == 0).double().mean())
        episode_of = torch.tensor([s.trajectory for s in batch.samples], dtype=torch.long)[batch.sample_of]
        return values[own][episode_of].float()

    def _returned(self, returned: Any, episodes: int) -> tuple[Tensor, dict[str, Any]]:
        """What the function returned, checked: float64[B] and the state."""
        key = f"algo.advantage={self.name}"
        if not isinstance(returned, tuple) or len(returned) != 2:
            raise LearnerFailure(f"{key} returned a value of type {type(returned).__name__}; it must return two things, the advantages and the state")
        try:
            values = torch.as_tensor(returned[0], dtype=torch.float64).detach().cpu()
        except (TypeError, ValueError, RuntimeError):
            raise LearnerFailure(f"{key} returned advantages that are no numbers; it must return one finite number for each episode") from None
        if values.shape != (episodes,) or not torch.isfinite(values).all():
            raise LearnerFailure(
                f"{key} returned {list(values.shape)} advantages, finite or not, for {episodes} episodes; it must return one finite number for each"
            )
        state = returned[1]
        foreign = _foreign(dict(state), "state") if isinstance(state, Mapping) else f"state is of type {type(state).__name__}"
        if foreign:
            raise LearnerFailure(
                f"{key}: {foreign}; the state must be a dict of plain numbers, strings, lists and dicts, which a checkpoint can keep"
            )
        return values, dict(state)


def _foreign(value: Any, where: str) -> str | None:
    """The first part of a state that a checkpoint would not give back as it was: numpy's float is one, though it is a float."""
    if type(value) is dict:
        strange = next((key for key in value if type(key) not in (str, int)), None)
        if strange is not None:
            return f"{where} has a key of type {type(strange).__name__}"
        return next((found for key, part in value.items() if (found := _foreign(part, f"{where}[{key!r}]"))), None)
    if type(value) in (list, tuple):
        return next((found for at, part in enumerate(value) if (found := _foreign(part, f"{where}[{at}]"))), None)
    return None if type(value) in (bool, int, float, str, type(None)) else f"{where} is of type {type(value).__name__}"


def outcomes_of(batch: Batch, per_group: int) -> tuple[Outcomes, Tensor]:
    """The outcomes of the whole batch, over all ranks in order of submission, and the places of this rank's trajectories among them, int64[B]."""
    kept = {s.trajectory: bool(batch.trained[s.offset]) for s in batch.samples}
    mine = [(t.episode_id.ordinal, t.reward, t.task_id, kept.get(i, False)) for i, t in enumerate(batch.trajectories)]
    group = world_group()
    rows = mine
    if group is not None:
        shares: list[Any] = [None] * dist.get_world_size(group)
        dist.all_gather_object(shares, mine, group=group)
        rows = sorted(row for share in shares for row in share)
    place = {row[0]: index for index, row in enumerate(rows)}
    outcomes = Outcomes(
        rewards=torch.tensor([row[1] for row in rows], dtype=torch.float64),
        tasks=tuple(row[2] for row in rows),
        groups=torch.tensor([row[0] // per_group for row in rows], dtype=torch.long),
        kept=torch.tensor([row[3] for row in rows], dtype=torch.bool),
    )
    return outcomes, torch.tensor([place[row[0]] for row in mine], dtype=torch.long)


def token_outcomes(batch: Batch) -> tuple[Tensor, float]:
    """Each token's episode reward, float32[N], and the share of the whole batch's trained tokens, over all ranks, whose reward is above 0."""
    rewards = torch.tensor([batch.trajectories[s.trajectory].reward for s in batch.samples], dtype=torch.float32)[batch.sample_of]
    counts = torch.stack([(batch.trained & (rewards > 0)).sum(), batch.trained.sum()]).double()
    group = world_group()
    if group is not None:
        dist.all_reduce(counts, group=group)
    return rewards, float(counts[0] / counts[1]) if counts[1] else 0.0
