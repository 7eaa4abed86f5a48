"""Advantages without a critic: pure functions of the batch's outcomes.

Each takes `Outcomes` and a state, and returns one advantage per episode and the state to keep; the learner gives an episode's advantage to all its
action tokens. The state is plain data (numbers, strings, lists, dicts), empty at first, kept in checkpoints; only `running_mean` has one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

State = dict[str, Any]


@dataclass(frozen=True, eq=False)
class Outcomes:
    """The episodes of one optimiser batch, over all ranks, in order of submission.

    rewards float64[B]: each episode's outcome. tasks: the id of each episode's task. groups int64[B]: equal for rollouts of one draw of a task.
    kept bool[B]: false for episodes that train nothing (algo.truncation=drop); they take no part in any mean.
    """

    rewards: Tensor
    tasks: tuple[str, ...]
    groups: Tensor
    kept: Tensor


def outcome(outcomes: Outcomes, state: State) -> tuple[Tensor, State]:
    """A = r: no baseline at all (Williams, 1992). float64[B]."""
    return torch.where(outcomes.kept, outcomes.rewards, 0.0), state


def batch_mean(outcomes: Outcomes, state: State) -> tuple[Tensor, State]:
    """A = r - mean of the batch's outcomes, the episode's own included. float64[B]; 0 where not kept."""
    kept = outcomes.kept
    if not kept.any():
        return torch.zeros_like(outcomes.rewards), state
    return torch.where(kept, outcomes.rewards - outcomes.rewards[kept].mean(), 0.0), state


def group(outcomes: Outcomes, state: State) -> tuple[Tensor, State]:
    """A = (r - mean) / std over the rollouts of one prompt (GRPO: Shao et al., 2024, arXiv 2402.03300, section 4.1.2).

    std is the sample's (divided by n - 1), as in the common implementations. A group of equal outcomes, or with one kept member, gives 0 exactly.
    """
    advantages = torch.zeros_like(outcomes.rewards)
    for key in torch.unique(outcomes.groups):
        members = (outcomes.groups == key) & outcomes.kept
        rewards = outcomes.rewards[members]
        if len(rewards) > 1 and rewards.min() < rewards.max():
            advantages[members] = (rewards - rewards.mean()) / rewards.std()
    return advantages, state


def running_mean(outcomes: Outcomes, state: State, *, window: int, per_task: bool) -> tuple[Tensor, State]:
    """A = r - mean of the last `window` outcomes before this one, of the same task or (per_task false) of all: the baseline of SAO, arXiv 2607.07508.

    Episodes are taken in order of submission, so one of this batch counts for those after it and never for itself. The first of its kind has nothing to be
    compared with and gives 0. state: {task: [oldest, ..., newest]}, the key "" for all tasks. Raises ValueError for a window below 1.
    """
    if window < 1:
        raise ValueError(f"window must be at least 1, got {window}")
    history: dict[str, list[float]] = {key: list(rewards) for key, rewards in state.items()}
    advantages = torch.zeros_like(outcomes.rewards)
    for index, reward in enumerate(outcomes.rewards.tolist()):
        if not outcomes.kept[index]:
            continue
        seen = history.setdefault(outcomes.tasks[index] if per_task else "", [])
        if seen:
            advantages[index] = reward - sum(seen) / len(seen)
        seen.append(reward)
        del seen[:-window]
    return advantages, history
