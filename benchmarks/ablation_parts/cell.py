"""One cell: a method on a task at a staleness bound, all its seeds side by side, from the warm start to the final held-out reward."""

from __future__ import annotations

import json
import os
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ablation_parts import methods
from ablation_parts.sampler import Rollouts, evaluate, rollout, shape_of, warm_start
from ablation_parts.stack import AdamW, Stack, Weights, as_engines_hold_them, clone, select
from ablation_parts.tasks import TASKS, Task, draw
from sao.algorithms.value_loss import explained_variance, mse_sum

CRITIC_RATE = 5.0  # critic's learning rate over the policy's (the paper: 5e-6 and 1e-6)
POLICY_CLIP, CRITIC_CLIP = 1.0, 10.0


@dataclass(frozen=True)
class Plan:
    """Sizes of the whole ablation. rollouts: of one step. final: held-out episodes of the last evaluation; heldout: of those along the way."""

    steps: int = 500
    rollouts: int = 32
    eval_every: int = 25
    heldout: int = 256
    final: int = 1024


@dataclass(frozen=True)
class Spec:
    """lrs: one rate for each copy; seeds: one seed for each copy (a seed may occur with several rates, as the sweep does)."""

    method: str
    task: str
    bound: int
    seeds: tuple[int, ...]
    lrs: tuple[float, ...]
    plan: Plan

    @property
    def key(self) -> str:
        return f"{self.method}-{self.task}-{self.bound}"


def warm_weights(task: type[Task], seeds: Sequence[int], folder: Path) -> Weights:
    """The warm starts of `seeds`, made once for each (task, set of seeds) and kept in `folder`."""
    unique = sorted(set(seeds))
    path = folder / "warm" / f"{task.name}-{'-'.join(map(str, unique))}.pt"
    if not path.is_file():
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(f".{os.getpid()}")
        torch.save(warm_start(task, unique), partial)
        partial.replace(path)  # whoever comes second writes the same bytes
    return select(torch.load(path, weights_only=True), [unique.index(seed) for seed in seeds])


class Run:
    """The state of one cell's training."""

    def __init__(self, spec: Spec, folder: Path) -> None:
        self.spec, self.method, self.task = spec, methods.method(spec.method), TASKS[spec.task]
        self.copies = len(spec.seeds)
        self.each = spec.plan.rollouts * (self.method.group if spec.method in methods.EIGHTFOLD else 1)
        self.net = Stack(shape_of(self.task), self.task.max_tokens)
        self.policy = warm_weights(self.task, spec.seeds, folder)
        self.critic = clone(self.policy)
        self.critic |= {"head": torch.zeros(self.copies, self.net.shape.width, 1), "bias": torch.zeros(self.copies, 1)}
        lrs = torch.tensor(spec.lrs)
        self.policy_optimizer = AdamW(self.policy, lrs, POLICY_CLIP)
        self.critic_optimizer = AdamW(self.critic, lrs * CRITIC_RATE, CRITIC_CLIP, self.method.frozen)
        # Training prompts depend on the seed alone: every method of a (task, seed) meets the same stream.
        self.prompts = [torch.Generator().manual_seed(3_000_000 + seed) for seed in spec.seeds]
        self.sampling = [torch.Generator().manual_seed(5_000_000 + seed) for seed in spec.seeds]
        self.pools = [draw(self.task, self.method.pool, g, heldout=False) for g in self.prompts] if self.method.pool else []
        self.orders: list[list[int]] = [[] for _ in spec.seeds]
        self.states: list[dict[str, Any]] = [{} for _ in spec.seeds]
        self.recent = deque([clone(self.policy)], maxlen=spec.bound + 1)
        self.version = 0
        self.log: list[list[dict[str, float]]] = [[] for _ in spec.seeds]  # per copy, one row a step
        self.masked: list[dict[int, list[int]]] = [{} for _ in spec.seeds]  # gap -> tokens A > 0, masked A > 0, tokens A < 0, masked A < 0, low, high
        self.diverged: list[int | None] = [None for _ in spec.seeds]

    def _draw(self, copy: int) -> tuple[Tensor, tuple[str, ...], Tensor]:
        """(payloads [B, columns], task ids, groups [B]) of one copy's next batch."""
        count = self.each // self.method.group
        if self.method.pool:
            while len(self.orders[copy]) < count:
                self.orders[copy] += torch.randperm(self.method.pool, generator=self.prompts[copy]).tolist()
            chosen, self.orders[copy] = self.orders[copy][:count], self.orders[copy][count:]
            payload, names = self.pools[copy][chosen], tuple(map(str, chosen))
        else:
            payload, names = draw(self.task, count, self.prompts[copy], heldout=False), tuple(f"{self.version}.{i}" for i in range(count))
        groups = torch.arange(count).repeat_interleave(self.method.group)
        return payload.repeat_interleave(self.method.group, 0), tuple(names[i] for i in groups.tolist()), groups

    def step(self, index: int) -> None:
        drawn = [self._draw(copy) for copy in range(self.copies)]
        stale = self.recent[0]
        batch = rollout(self.net, as_engines_hold_them(stale), self.task(torch.cat([d[0] for d in drawn])), self.sampling)
        rows = [slice(copy * self.each, (copy + 1) * self.each) for copy in range(self.copies)]
        entries: list[dict[str, float]] = [{"reward": float(batch.rewards[r].mean())} for r in rows]
        if self.method.critic_updates:
            advantages = self._value_based(batch, rows, entries)
        else:
            parts = []
            for copy, (r, (_, names, groups)) in enumerate(zip(rows, drawn, strict=True)):
                part, self.states[copy] = methods.outcome_advantages(self.method, batch.rewards[r], names, groups, self.states[copy])
                parts.append(part)
            advantages = torch.cat(parts)[:, None] * batch.mask
        if index >= self.method.critic_only_steps:
            self._actor(batch, rows, stale, advantages, entries)
        for log, entry in zip(self.log, entries, strict=True):
            log.append(entry)

    def _value_based(self, batch: Rollouts, rows: list[slice], entries: list[dict[str, float]]) -> Tensor:
        returns = torch.where(batch.mask, batch.rewards[:, None], 0.0)
        for update in range(self.method.critic_updates):
            values = self.net.values(self.critic, batch.ids)
            if update == 0:
                for entry, r in zip(entries, rows, strict=True):
                    explained = explained_variance(values[r].detach(), returns[r], batch.mask[r])
                    if explained is not None:
                        entry["explained_variance"] = explained
            sum(mse_sum(values[r], returns[r], batch.mask[r]) / batch.mask[r].sum() for r in rows).backward()
            norms = self.critic_optimizer.step()
        for entry, norm in zip(entries, norms.tolist(), strict=True):
            entry["critic_grad_norm"] = norm
        with torch.no_grad():
            values = self.net.values(self.critic, batch.ids)
        return methods.gae(self.method.algo, batch, values)

    def _actor(self, batch: Rollouts, rows: list[slice], stale: Weights, advantages: Tensor, entries: list[dict[str, float]]) -> None:
        old = None
        if self.method.needs_old:
            with torch.no_grad():
                old = self.net.logprobs(stale, batch.ids)
        logprobs = self.net.logprobs(self.policy, batch.ids)
        gap = min(self.version, self.spec.bound)
        total = torch.zeros(())
        for copy, (r, entry) in enumerate(zip(rows, entries, strict=True)):
            loss, token = methods.policy_loss(self.method, logprobs, batch, old, advantages, r)
            total = total + loss
            weight, n = token.weights().double(), token.counted.sum()
            if float(weight.sum()) > 0:
                entry["ess"] = float(weight.sum() ** 2 / (n * weight.square().sum()))
            entry["masked_low"], entry["masked_high"] = float(token.low.sum() / n), float(token.high.sum() / n)
            entry["log_ratio"] = float(token.log_ratio.abs().sum() / n)
            cut, up, down = token.low | token.high, token.counted & (advantages[r] > 0), token.counted & (advantages[r] < 0)
            sided = up | down  # tokens without an advantage would train nothing anyway
            counts = torch.stack([x.sum() for x in (up, up & cut, down, down & cut, token.low & sided, token.high & sided)]).tolist()
            seen = self.masked[copy].setdefault(gap, [0] * 6)
            self.masked[copy][gap] = [a + b for a, b in zip(seen, counts, strict=True)]
        total.backward()
        norms = self.policy_optimizer.step().tolist()
        for copy, (norm, entry) in enumerate(zip(norms, entries, strict=True)):
            entry["grad_norm"] = norm
            if self.diverged[copy] is None and not norm < torch.inf:
                self.diverged[copy] = len(self.log[copy])
        self.version += 1
        self.recent.append(clone(self.policy))

    def heldout(self, count: int) -> list[float]:
        return evaluate(self.net, self.policy, self.task, self.spec.seeds, count).tolist()


def run(spec: Spec, folder: Path) -> dict[str, Any]:
    """Train and record; a pure function of the spec (and of this machine's arithmetic): no clock, no state outside `folder`'s warm starts."""
    job, plan = Run(spec, folder), spec.plan
    curves = [[value] for value in job.heldout(plan.heldout)]
    for step in range(plan.steps):
        job.step(step)
        if (step + 1) % plan.eval_every == 0:
            for curve, value in zip(curves, job.heldout(plan.heldout), strict=True):
                curve.append(value)
    final = job.heldout(plan.final)
    copies = []
    for copy, (seed, lr) in enumerate(zip(spec.seeds, spec.lrs, strict=True)):
        copies.append(
            {
                "seed": seed,
                "lr": lr,
                "final": final[copy],
                "curve": curves[copy],
                "diverged_at": job.diverged[copy],
                "windows": _windows(job.log[copy], plan.eval_every),
                "masked": {str(gap): counts for gap, counts in sorted(job.masked[copy].items())},
            }
        )
    return {"spec": asdict(spec), "rollouts_per_step": job.each, "actor_steps": job.version, "copies": copies}


def _windows(log: list[dict[str, float]], width: int) -> dict[str, list[float | None]]:
    """Means of each metric over consecutive windows of `width` steps; None where it was undefined throughout."""
    names = sorted({name for row in log for name in row})
    out: dict[str, list[float | None]] = {name: [] for name in names}
    for begin in range(0, len(log), width):
        for name in names:
            found = [row[name] for row in log[begin : begin + width] if name in row]
            out[name].append(sum(found) / len(found) if found else None)
    return out


def run_to_file(spec: Spec, folder: Path) -> dict[str, Any]:
    """The cell's record from `folder`/cells if it is there and of the same spec, else made and written in one motion. Costs go to a file of their own."""
    path = folder / "cells" / f"{spec.key}.json"
    wanted = json.loads(json.dumps(asdict(spec)))
    if path.is_file():
        found = json.loads(path.read_text())
        if found["spec"] == wanted:
            return found
    started = time.process_time()
    record = run(spec, folder)
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(f".{os.getpid()}")
    partial.write_text(json.dumps(record))
    partial.replace(path)
    with (folder / "costs.jsonl").open("a") as file:
        file.write(json.dumps({"cell": spec.key, "cpu_s": round(time.process_time() - started, 2)}) + "\n")
    return json.loads(path.read_text())
