"""A batch of episodes for every copy, one column at a time, and the supervised start."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ablation_parts.stack import AdamW, Stack, Weights, reference, stack
from ablation_parts.tasks import PAD, POLICY, Task, draw

SHAPE = {"width": 32, "layers": 2, "heads": 2, "feed_forward": 64}


class Rollouts(NamedTuple):
    """R = S * B episodes, the rows of copy 0 first; the columns are those of examples/reference_sao.py."""

    ids: Tensor  # [R, T]
    mask: Tensor  # [R, T - 1] bool
    behaviour: Tensor  # [R, T - 1], NaN off the mask
    rewards: Tensor  # [R]


def shape_of(task: type[Task]) -> reference.Shape:
    return reference.Shape(vocabulary=task.vocabulary, **SHAPE)


@torch.no_grad()
def rollout(net: Stack, weights: Weights, episodes: Task, generators: Sequence[torch.Generator]) -> Rollouts:
    """Temperature 1. Each copy draws from its own generator, so that a copy's episodes do not depend on which copies are beside it."""
    ids, copies = episodes.prompt, len(generators)
    each, vocabulary = len(ids) // copies, net.shape.vocabulary
    masks = [torch.zeros(len(ids), ids.shape[1] - 1, dtype=torch.bool)]
    logged = [torch.full((len(ids), ids.shape[1] - 1), torch.nan)]
    cache: dict[int, tuple[Tensor, Tensor]] = {}
    logprobs = torch.log_softmax(net.logits(weights, ids, cache)[:, -1], -1)
    while ids.shape[1] < episodes.max_tokens:
        forced = episodes.next(ids)
        if bool((forced == PAD).all()):
            break
        # The smallest of exponential clocks with rates p is a sample of p.
        clocks = torch.cat([torch.empty(each, vocabulary).exponential_(generator=g) for g in generators])
        acts = forced == POLICY
        token = torch.where(acts, (logprobs - clocks.log()).argmax(-1), forced)[:, None]
        masks.append(acts[:, None])
        logged.append(torch.where(acts[:, None], logprobs.gather(1, token), torch.nan))
        ids = torch.cat([ids, token], 1)
        if ids.shape[1] < episodes.max_tokens:
            logprobs = torch.log_softmax(net.logits(weights, token, cache)[:, -1], -1)
    return Rollouts(ids, torch.cat(masks, 1), torch.cat(logged, 1), episodes.rewards(ids))


def evaluate(net: Stack, weights: Weights, task: type[Task], seeds: Sequence[int], count: int) -> Tensor:
    """Mean reward of each copy at temperature 1 on `count` held-out episodes, [S]; the same episodes for everyone who asks with the same seeds."""
    generators = [torch.Generator().manual_seed(7_000_000 + seed) for seed in seeds]
    payload = torch.cat([draw(task, count, g, heldout=True) for g in generators])
    return rollout(net, weights, task(payload), generators).rewards.view(len(seeds), count).mean(1)


def warm_start(task: type[Task], seeds: Sequence[int], *, batch: int = 64, lr: float = 3e-3) -> Weights:
    """Short supervised learning on demonstrations of mixed quality: the policies every method of a (task, seed) starts from."""
    models = []
    for seed in seeds:
        torch.manual_seed(seed)
        models.append(reference.Policy(shape_of(task)))
    weights, net = stack(models), Stack(shape_of(task), task.max_tokens)
    generators = [torch.Generator().manual_seed(1_000 + seed) for seed in seeds]
    optimizer = AdamW(weights, torch.full((len(seeds),), lr), 1.0)
    for _ in range(task.warm_steps):
        parts = [task(draw(task, batch, g, heldout=False)).demonstrations(g) for g in generators]
        ids, mask = (torch.cat(column) for column in zip(*parts, strict=True))
        logprobs = torch.where(mask, net.logprobs(weights, ids), 0.0).view(len(seeds), -1).sum(1)
        (-(logprobs / mask.view(len(seeds), -1).sum(1)).sum()).backward()
        optimizer.step()
    return {name: value.detach() for name, value in weights.items()}
