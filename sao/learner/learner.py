"""The learner: one step of the configured algorithm on a batch of trajectories, in a plain process.

critic x K -> values -> advantages -> one actor step -> new version; without a critic, outcomes -> advantages -> one actor step. Deterministic given the
batch, the seed and the thread count: trajectories are sorted by episode, shuffles are seeded by (seed, step, k). Under torch.distributed each rank passes
its own share of the batch and every count is global.
"""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from sao.agents.tokenizer import load_tokenizer
from sao.algorithms import catalogue
from sao.algorithms.advantages import whiten
from sao.algorithms.off_policy import ratio_metrics
from sao.algorithms.value_loss import explained_variance, masked_variance
from sao.config import Config
from sao.errors import ConfigError, UserError
from sao.inference.protocol import Canary
from sao.learner import protocol
from sao.learner.baseline import Baseline, token_outcomes
from sao.learner.batching import Batch, Packed, make_batch, pack, plan, shuffled
from sao.learner.credit import check_algo, critic_targets, needs_values, policy_advantages, policy_lambda
from sao.learner.critic import Critic, CriticBatch
from sao.learner.models import choose_device, freeze, load_critic, load_policy, named_weights, save_critic
from sao.learner.optimizer import world_group
from sao.learner.parity import VersionRing, check_sharing, gap_metrics, probe_samples
from sao.learner.policy import Policy, PolicyBatch
from sao.learner.protocol import SegmentRecord, StepReport
from sao.learner.scoring import score
from sao.trajectory import Trajectory
from sao.weights.bundle import WeightBundle
from sao.weights.torch_bundle import pack as pack_weights

CANARY_TOKENS = 24
STATE_FILE = "learner.pt"


class Credit(NamedTuple):
    """What each action token is given, float[N] in canonical order; values and returns are NaN without a critic."""

    advantages: Tensor
    values: Tensor
    returns: Tensor


class TorchLearner:
    """Implements sao.learner.protocol.Learner on torch.

    total_steps: actor optimiser steps of the whole run, for the schedules (batches, when run.phase is critic). check_logprobs keeps the last staleness + 1
    policies and measures logprob_gap/same_version_* at every step.
    """

    def __init__(self, config: Config, model_path: str, *, total_steps: int, check_logprobs: bool = False) -> None:
        check_algo(config.algo)
        if config.critic.updates < 0 or config.critic.critic_only_steps < 0:
            raise ConfigError("critic.updates and critic.critic_only_steps count steps; give at least 0")
        if config.run.phase not in ("rl", "critic"):
            raise ConfigError(f"run.phase is {config.run.phase!r}; choose rl or critic")
        torch.set_num_threads(config.learner.threads)
        self.config, self.model_path = config, model_path
        self.device = choose_device(config.learner.device)
        self.version = 0
        self._undone = 0  # versions whose step a roll-back undid: their number is counted, their step is in no weights any more
        self._explained_in_a_row = 0
        model, loading = config.model, self._loading()
        policy = load_policy(model_path, **loading).to(self.device)
        reference = copy.deepcopy(policy).requires_grad_(False) if config.algo.kl_coef else None
        self.policy = Policy(policy, config.algo, config.optim.policy, total_steps=total_steps, reference=reference, autocast=model.autocast)
        self.actor_from = catalogue.critic_only_steps(config)
        self.critic: Critic | None = None
        self.baseline: Baseline | None = None
        if catalogue.needs_critic(config.algo):
            critic = load_critic(model_path, config.critic.path, head_init=config.critic.head_init, **loading).to(self.device)
            freeze(critic, config.critic.freeze)
            batches = total_steps if config.run.phase == "critic" else total_steps + self.actor_from
            self.critic = Critic(critic, config.optim.critic, total_steps=max(1, config.critic.updates) * batches, autocast=model.autocast)
        else:
            self.baseline = Baseline(config)
        self._check_logprobs, self._needs_old = check_logprobs, catalogue.needs_old(config.algo)
        self._ring = VersionRing(policy, config.rollout.staleness + 1) if check_logprobs or self._needs_old else None
        self._sharing = config.learner.sharing == "packed"
        if self._sharing:
            check_sharing(policy, autocast=model.autocast)
        if self._ring:
            self._ring.push(0, policy)

    def _loading(self) -> dict[str, Any]:
        """How models are read from a directory."""
        model = self.config.model
        return {"dtype": model.dtype, "attention_name": self.config.learner.attention, "trust_remote_code": model.trust_remote_code}

    def step(self, trajectories: Sequence[Trajectory], step: int) -> StepReport:
        """Train on one batch. step: batches trained before this one, critic-only ones included (0-based).

        Raises LearnerFailure when a gradient is not finite; the weights of that optimiser stay as they were.
        """
        algo, weights = self.config.algo, self.config.weights
        started = time.perf_counter()
        if weights.reset_optimizer and self.version % weights.publish_every == 0:
            # The weights this step starts from were published. Done here, not at the publication, so that a step trained again comes out the same.
            self.policy.gradients.reset()
        batch = make_batch(trajectories, drop_truncated=algo.truncation == "drop")
        packs = self._packs(batch)
        metrics: dict[str, float] = {}

        credit = self._critic_free(batch, metrics) if self.critic is None else self._from_critic(self.critic, batch, packs, step, metrics)
        with _timed(metrics, "actor"):
            frozen = self.config.run.phase == "critic" or step < self.actor_from
            at_start = self.version
            logprobs, reasons = self._actor(batch, packs, credit.advantages, frozen, metrics)
        if self._ring:
            with _timed(metrics, "check_logprobs"):
                if self._check_logprobs:
                    metrics |= self._ring.check(batch, seed=(self.config.seed, step), autocast=self.config.model.autocast)
                if self.version != at_start:
                    self._ring.push(self.version, self.policy.model)
        same = batch.pure & (batch.versions == at_start)
        metrics |= gap_metrics("logprob_gap", "", logprobs[same], batch.behaviour[same])
        metrics |= {
            "tokens/total": float(batch.tokens),
            "tokens/action": float(batch.action_tokens),
            "tokens/computed": float(sum(p.computed_tokens for p in packs)),
            "tokens/dropped": float((~batch.trained).sum()),
            "tokens/no_logprob": float(sum(s.sampled_tokens - s.action_tokens for t in batch.trajectories for s in t.segments)),
            "timing_s/step": time.perf_counter() - started,
        }
        records = _records(batch, logprobs, credit, reasons)
        return StepReport(step=step, version=self.version, metrics=metrics, records=records)

    def _packs(self, batch: Batch) -> list[Packed]:
        groups = plan([s.length for s in batch.samples], self.config.learner.tokens_per_micro_batch)
        return [pack([batch.samples[i] for i in group], self.device, sharing=self._sharing) for group in groups]

    def _critic_free(self, batch: Batch, metrics: dict[str, float]) -> Credit:
        assert self.baseline is not None
        with _timed(metrics, "advantages"):
            advantages = self.baseline.advantages(batch, metrics)
            _advantage_metrics(batch, advantages, metrics)
        absent = torch.full((batch.action_tokens,), math.nan)
        return Credit(advantages, absent, absent)

    def _from_critic(self, critic: Critic, batch: Batch, packs: Sequence[Packed], step: int, metrics: dict[str, float]) -> Credit:
        """K critic steps, then advantages from the values read after (or before) them."""
        algo = self.config.algo
        with _timed(metrics, "critic"):
            before = self._read_values(critic, batch, packs) if needs_values(batch, algo) or not self.config.critic.updates else None
            blank = torch.zeros(batch.states)
            returns = critic_targets(batch, algo, blank if before is None else before)
            fitted = self._train_critic(critic, batch, returns, step, metrics)
            before = fitted if before is None else before
        with _timed(metrics, "values"):
            reread = algo.values == "after" and self.config.critic.updates
            state_values = self._read_values(critic, batch, packs) if reread else before
        with _timed(metrics, "advantages"):
            explained = explained_variance(before[batch.state_of], returns, batch.trained, group=world_group())
            if explained is not None:
                metrics["critic/vf_explained_var"] = explained
            advantages = self._advantages(batch, state_values, returns, explained, metrics)
        return Credit(advantages, state_values[batch.state_of], returns)

    def _read_values(self, critic: Critic, batch: Batch, packs: Sequence[Packed]) -> Tensor:
        """V of every state of the batch, float[states]; 0 for a sample's state before its first token, which nothing reads."""
        values = torch.zeros(batch.states)
        for packed in packs:
            read = critic.evaluate(packed).cpu()
            values = values.to(read.dtype)
            values[packed.state_slots.cpu()] = read
        return values

    def _train_critic(self, critic: Critic, batch: Batch, returns: Tensor, step: int, metrics: dict[str, float]) -> Tensor:
        """K optimiser steps, each on the whole batch in a fresh seeded order. Returns the values the first of them started from."""
        first = torch.zeros(batch.states)
        lengths = [s.length for s in batch.samples]
        for update in range(self.config.critic.updates):
            order = shuffled(len(lengths), self.config.seed, step, update)
            for group in plan(lengths, self.config.learner.tokens_per_micro_batch, order):
                packed = pack([batch.samples[i] for i in group], self.device, sharing=self._sharing)
                slots = packed.slots.cpu()
                critic.accumulate(CriticBatch(packed, returns[slots].to(self.device), batch.trained[slots].to(self.device)))
                if update == 0:
                    assert critic.last_values is not None
                    first = first.to(critic.last_values.dtype)
                    first[packed.state_slots.cpu()] = critic.last_values.cpu()
            critic.reduce()
            outcome = critic.apply()
            if update == 0 and "critic/vf_loss" in outcome:
                metrics["critic/vf_loss_before"] = outcome["critic/vf_loss"]
            metrics |= outcome
        return first

    def _advantages(self, batch: Batch, values: Tensor, returns: Tensor, explained: float | None, metrics: dict[str, float]) -> Tensor:
        """Advantages float[N], whitened when the configuration and the batch ask for it; 0 for dropped trajectories."""
        algo, group = self.config.algo, world_group()
        lam = policy_lambda(batch, algo)
        advantages = torch.where(batch.trained, policy_advantages(batch, algo, values, lam), 0.0)
        varied = bool(masked_variance(returns, batch.trained, group=group))
        wanted = algo.whiten == "on" or (algo.whiten == "auto" and self._explained_in_a_row < algo.whiten_patience)
        if algo.whiten == "auto" and wanted:
            good = explained is not None and explained > algo.whiten_until_ev
            self._explained_in_a_row = self._explained_in_a_row + 1 if good else 0
        if batch.trained.any():
            _advantage_metrics(batch, advantages, metrics)
            metrics["critic/values_mean"] = float(values[batch.state_of][batch.trained].mean())
            metrics["critic/returns_mean"] = float(returns[batch.trained].mean())
            metrics["sao/lambda_mean"] = float(lam.mean())
        metrics["sao/whitened"] = float(wanted and varied)
        return whiten(advantages, batch.trained, group=group) if wanted and varied else advantages

    def _actor(self, batch: Batch, packs: Sequence[Packed], advantages: Tensor, frozen: bool, metrics: dict[str, float]) -> tuple[Tensor, Tensor]:
        """One optimiser step unless frozen. Returns log-probs before it, float[N], and mask reasons uint8[N]."""
        n = batch.action_tokens
        logprobs = torch.full((n,), math.nan)
        log_ratio, weights = torch.zeros(n), torch.zeros(n)
        counted, low, high = (torch.zeros(n, dtype=torch.bool) for _ in range(3))
        entropy, entropy_rows = 0.0, 0
        outcomes, positive_share = token_outcomes(batch)
        columns = {"behaviour": batch.behaviour, "advantages": advantages, "mask": batch.trained, "versions": batch.versions, "outcomes": outcomes}
        if self._needs_old:
            assert self._ring is not None
            budget, autocast = self.config.learner.tokens_per_micro_batch, self.config.model.autocast
            columns["old"] = self._ring.old_logprobs(batch, budget, autocast=autocast)
        for packed in packs:
            slots = packed.slots.cpu()
            own = {name: column[slots].to(self.device) for name, column in columns.items()}
            micro_batch = PolicyBatch(packed, **own, positive_share=positive_share)
            if frozen:
                scores, token = self.policy.evaluate(micro_batch)
                if scores.entropy is not None:
                    entropy, entropy_rows = entropy + float(scores.entropy.sum()), entropy_rows + len(scores.entropy)
            else:
                self.policy.accumulate(micro_batch)
                assert self.policy.last is not None
                scores, token = self.policy.last
            logprobs, log_ratio, weights = (x.to(scores.logprobs.dtype) for x in (logprobs, log_ratio, weights))
            logprobs[slots], log_ratio[slots], weights[slots] = scores.logprobs.detach().cpu(), token.log_ratio.cpu(), token.weights().cpu()
            counted[slots], low[slots], high[slots] = token.counted.cpu(), token.low.cpu(), token.high.cpu()
        metrics |= ratio_metrics(log_ratio, counted, low, high, self.version - batch.versions, weights=weights, group=world_group())
        metrics["off_policy/non_finite_tokens"] = float((batch.trained & ~counted).sum())
        if entropy_rows:
            metrics["actor/entropy"] = entropy / entropy_rows
        if not frozen:
            self.policy.reduce()
            outcome = self.policy.apply()
            metrics |= outcome
            self.version = self.policy.gradients.steps + self._undone
        reasons = torch.full((n,), protocol.FROZEN if frozen else protocol.TRAINED, dtype=torch.uint8)
        reasons[low], reasons[high] = protocol.REJECTED_LOW, protocol.REJECTED_HIGH
        reasons[batch.trained & ~counted] = protocol.NON_FINITE
        reasons[~batch.trained] = protocol.DROPPED
        return logprobs, reasons

    def gather(self) -> tuple[WeightBundle, Canary]:
        """The policy's weights and the canary's log-probs under them."""
        return pack_weights(named_weights(self.policy.model)), self._canary()

    @torch.no_grad()
    def _canary(self) -> Canary:
        model_config: Any = self.policy.model.config
        vocabulary = int(model_config.vocab_size)
        ids = [(13 + 7919 * i) % vocabulary for i in range(CANARY_TOKENS)]
        packed = pack(probe_samples([ids]), self.device)
        logprobs = score(self.policy.model, packed, autocast=self.config.model.autocast).logprobs
        return Canary(tuple(ids), tuple(logprobs.float().tolist()))

    def export(self, directory: str) -> None:
        """Write `policy/` (with its tokenizer, when the model came with one) and, where there is one, `critic/` (backbone and value head) under `directory`."""
        root = Path(directory)
        policy: Any = self.policy.model
        policy.save_pretrained(root / "policy")
        if self.critic is not None:
            save_critic(self.critic.model, root / "critic")
        try:
            tokenizer = load_tokenizer(self.model_path, trust_remote_code=self.config.model.trust_remote_code)
        except ConfigError:
            return
        tokenizer.save_pretrained(root / "policy")

    def save(self, directory: str) -> None:
        """Write a checkpoint's learner part under `directory`: policy/ and critic/ as `export` does, and learner.pt with both optimisers, the counters, the
        advantage's state and, for a loss that looks back, the policies it looks back to."""
        self.export(directory)
        torch.save(
            {
                "version": self.version,
                "undone": self._undone,
                "explained_in_a_row": self._explained_in_a_row,
                "policy_optimizer": self.policy.gradients.state_dict(),
                "critic_optimizer": self.critic.gradients.state_dict() if self.critic else None,
                "baseline": self.baseline.state if self.baseline else None,
                "ring": self._ring.state_dict() if self._ring and self._needs_old else None,
            },
            Path(directory) / STATE_FILE,
        )

    def restore(self, directory: str) -> None:
        """The reverse of `save`, bit for bit; a ring that serves the log-prob check alone starts again at this version.

        Raises UserError when the checkpoint is of another model.
        """
        root = Path(directory)
        state = torch.load(root / STATE_FILE, map_location=self.device, weights_only=True)
        loading = self._loading()
        try:
            self.policy.model.load_state_dict(load_policy(str(root / "policy"), **loading).state_dict())
            self.policy.gradients.load_state_dict(state["policy_optimizer"])
            if self.critic is not None:
                self.critic.model.load_state_dict(load_critic("", str(root / "critic"), head_init="zero", **loading).state_dict())
                self.critic.gradients.load_state_dict(state["critic_optimizer"])
        except (RuntimeError, ValueError) as error:
            raise UserError(f"checkpoint {root.name} is of another model than {self.model_path}: {' '.join(str(error).split())[:300]}") from error
        self.version = state["version"]
        self._undone = state.get("undone", 0)
        self._explained_in_a_row = state["explained_in_a_row"]
        if self.baseline is not None:
            self.baseline.state = state["baseline"]
        if self._ring and self._needs_old:
            self._ring.load_state_dict(state["ring"])
        elif self._ring:
            self._ring.push(self.version, self.policy.model)

    def renumber(self, version: int) -> None:
        """Call the present weights `version`, which has not served; later steps count on from it."""
        self._undone += version - self.version
        self.version = version
        if self._ring:
            self._ring.push(version, self.policy.model)


@contextmanager
def _timed(metrics: dict[str, float], name: str) -> Iterator[None]:
    begin = time.perf_counter()
    yield
    metrics[f"timing_s/{name}"] = time.perf_counter() - begin


def _advantage_metrics(batch: Batch, advantages: Tensor, metrics: dict[str, float]) -> None:
    kept = advantages[batch.trained]
    if len(kept):
        metrics["actor/advantage_mean"] = float(kept.mean())
        metrics["actor/advantage_abs_mean"] = float(kept.abs().mean())


def _records(batch: Batch, logprobs: Tensor, credit: Credit, reasons: Tensor) -> tuple[SegmentRecord, ...]:
    """One record per segment of every trajectory, in canonical order; segments without an action token are all context."""
    flat = [x.float().numpy() for x in (logprobs, credit.values, credit.advantages, credit.returns)]
    sample_at = {(s.trajectory, s.segment): s for s in batch.samples}
    records = []
    for index, trajectory in enumerate(batch.trajectories):
        for number, segment in enumerate(trajectory.segments):
            columns = np.full((len(flat), len(segment)), np.nan, np.float32)
            mask_reason = np.where((segment.versions >= 0) & ~segment.action_mask, protocol.NON_FINITE, protocol.CONTEXT).astype(np.uint8)
            sample = sample_at.get((index, number))
            if sample is not None:
                span = slice(sample.offset, sample.offset + len(sample.actions))
                for column, source in zip(columns, flat, strict=True):
                    column[sample.actions] = source[span]
                mask_reason[sample.actions] = reasons[span].numpy()
            trainer, values, advantage, target = columns
            records.append(SegmentRecord(trajectory.episode_id, number, trainer, values, advantage, target, mask_reason))
    return tuple(records)
