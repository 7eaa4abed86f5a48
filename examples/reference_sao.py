"""SAO in one file: Single-Rollout Asynchronous Optimization (arXiv 2607.07508) on a tiny transformer, to be read from top to bottom.

    python examples/reference_sao.py            # learns the toy task below from nothing in less than a minute on one core

Needs torch alone. The framework does the same with Ray, vLLM and packed batches; tests/integration/test_reference.py shows that its learner computes
the same losses, gradients and weights. Asynchrony is simulated by the one thing that matters to the algorithm: the sampler acts with the weights of
`delay` versions ago. Left out: several segments per episode, truncated episodes, versions that change inside an episode, whitening, several ranks.

Index convention. ids [B, T] holds prompt, actions, observations and padding. Whatever belongs to token t (its mask, log-prob, value, advantage) is
computed from the hidden state of token t - 1, so all such tensors are [B, T - 1] and column j speaks about ids[:, j + 1]:

    ids            x     ASK    OBS    y      z       PAD
    column               0      1      2      3       4
    action mask          1      0      0      1       0        the policy sampled ASK and z; the environment inserted OBS y
    advantage            A0     0      0      A3      0        one step of GAE from ASK to z, however long the observation

Shape letters: B episodes, T tokens, N new tokens, H heads, D width.
"""

from __future__ import annotations

import argparse
import copy
import math
import time
from collections import deque
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

PAD = 0  # follows the end of an episode
POLICY = -1  # what an environment answers when the policy is to move


# 1. The model: a Llama, small. Parameter names are those of transformers' LlamaModel, so that both can load the same weights.


@dataclass(frozen=True)
class Shape:
    vocabulary: int = 16
    width: int = 32
    layers: int = 2
    heads: int = 2
    feed_forward: int = 64
    rope_theta: float = 100.0
    norm_eps: float = 1e-6


class Norm(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(shape.width)), shape.norm_eps

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps)


def rotation(positions: Tensor, size: int, theta: float) -> tuple[Tensor, Tensor]:
    """cos and sin [N, size] of rotary position embedding; angles in float32, as transformers has them."""
    frequency = 1.0 / theta ** (torch.arange(0, size, 2, dtype=torch.float32) / size)
    angle = (positions.float()[:, None] * frequency).repeat(1, 2)
    return angle.cos(), angle.sin()


def rotate(x_BHND: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    left, right = x_BHND.chunk(2, -1)
    return x_BHND * cos + torch.cat([-right, left], -1) * sin


class Attention(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.heads = shape.heads
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (nn.Linear(shape.width, shape.width, bias=False) for _ in range(4))

    def forward(self, x_BND: Tensor, cos: Tensor, sin: Tensor, cache: dict[int, Tensor] | None, layer: int) -> Tensor:
        q, k, v = (project(x_BND).unflatten(-1, (self.heads, -1)).transpose(1, 2) for project in (self.q_proj, self.k_proj, self.v_proj))
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        if cache is not None:
            kv = torch.stack([k, v])
            cache[layer] = torch.cat([cache[layer], kv], -2) if layer in cache else kv
            k, v = cache[layer]
        # New tokens come all at once (the whole prefix is in the cache only when there is one new token, which may see everything).
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=q.shape[2] > 1)
        return self.o_proj(mixed.transpose(1, 2).flatten(2))


class FeedForward(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = (nn.Linear(shape.width, shape.feed_forward, bias=False) for _ in range(2))
        self.down_proj = nn.Linear(shape.feed_forward, shape.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.input_layernorm, self.self_attn = Norm(shape), Attention(shape)
        self.post_attention_layernorm, self.mlp = Norm(shape), FeedForward(shape)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, cache: dict[int, Tensor] | None, layer: int) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin, cache, layer)
        return x + self.mlp(self.post_attention_layernorm(x))


class Transformer(nn.Module):
    """ids [B, N] -> hidden states [B, N, D]. With a cache (a dict, empty at first) only new tokens are passed: the prompt, then one at a time."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.embed_tokens = nn.Embedding(shape.vocabulary, shape.width)
        self.layers = nn.ModuleList(Layer(shape) for _ in range(shape.layers))
        self.norm = Norm(shape)
        for name, parameter in self.named_parameters():
            if parameter.ndim == 2:
                shrink = (2 * shape.layers) ** 0.5 if "o_proj" in name or "down_proj" in name else 1.0
                nn.init.normal_(parameter, std=shape.width**-0.5 / shrink)

    def forward(self, ids_BN: Tensor, cache: dict[int, Tensor] | None = None) -> Tensor:
        x = self.embed_tokens(ids_BN)
        start = cache[0].shape[-2] if cache else 0
        positions = torch.arange(start, start + ids_BN.shape[1])
        cos, sin = (table.to(x.dtype) for table in rotation(positions, self.shape.width // self.shape.heads, self.shape.rope_theta))
        for index, layer in enumerate(self.layers):
            x = layer(x, cos, sin, cache, index)
        return self.norm(x)


class Policy(nn.Module):
    """Logits are the hidden state against the embedding table (tied)."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.model = Transformer(shape)

    def forward(self, ids_BN: Tensor, cache: dict[int, Tensor] | None = None) -> Tensor:
        return F.linear(self.model(ids_BN, cache), self.model.embed_tokens.weight)

    def logprobs(self, ids_BT: Tensor) -> Tensor:
        """log pi(ids[t] | ids[:t]) for t >= 1: [B, T - 1]."""
        return torch.log_softmax(self(ids_BT[:, :-1]), -1).gather(-1, ids_BT[:, 1:, None])[..., 0]


class Critic(nn.Module):
    """The policy's architecture and initial weights, a scalar head in place of the vocabulary, attention frozen (section 3.2)."""

    def __init__(self, policy: Policy, *, freeze_attention: bool = True) -> None:
        super().__init__()
        self.model = copy.deepcopy(policy.model)
        self.value_head = nn.Linear(policy.model.shape.width, 1)
        nn.init.zeros_(self.value_head.weight)
        nn.init.zeros_(self.value_head.bias)
        self.to(next(policy.parameters()).dtype)
        for name, parameter in self.named_parameters():
            parameter.requires_grad_(not (freeze_attention and "self_attn" in name))

    def forward(self, ids_BT: Tensor) -> Tensor:
        """V of the state in which each token t >= 1 was chosen: [B, T - 1]."""
        return self.value_head(self.model(ids_BT[:, :-1]))[..., 0]


# 2. The sampler: a batch of episodes side by side, one column at a time. It keeps the log-prob with which each token was really sampled.


class Episodes(Protocol):
    """B episodes of an environment; what they hide from the policy lives inside."""

    prompt: Tensor  # [B, P]

    def next(self, ids_BN: Tensor) -> Tensor:
        """[B]: the environment's own next token, POLICY where the policy is to move, PAD where the episode is over."""
        ...

    def rewards(self, ids_BT: Tensor) -> Tensor:
        """[B]"""
        ...


class Rollouts(NamedTuple):
    ids: Tensor  # [B, T]
    mask: Tensor  # [B, T - 1] bool, action tokens
    behaviour: Tensor  # [B, T - 1], log pi_rollout of action tokens, 0 elsewhere
    reward: Tensor  # [B], of the outcome


@torch.no_grad()
def rollout(policy: Policy, episodes: Episodes, max_tokens: int, generator: torch.Generator) -> Rollouts:
    """Temperature 1, the whole distribution: the ratio of section 3.1 is valid for nothing else."""
    ids, cache = episodes.prompt, {}
    masks = [torch.zeros(ids.shape[0], ids.shape[1] - 1, dtype=torch.bool)]
    logged = [torch.zeros(masks[0].shape)]
    logprobs = torch.log_softmax(policy(ids, cache)[:, -1], -1)
    while ids.shape[1] < max_tokens:
        forced = episodes.next(ids)
        if bool((forced == PAD).all()):
            break
        sampled = torch.multinomial(logprobs.exp(), 1, generator=generator)[:, 0]
        acts = forced == POLICY
        token = torch.where(acts, sampled, forced)[:, None]
        masks.append(acts[:, None])
        logged.append(torch.where(acts[:, None], logprobs.gather(1, token), 0.0))
        ids = torch.cat([ids, token], 1)
        logprobs = torch.log_softmax(policy(token, cache)[:, -1], -1)
    return Rollouts(ids, torch.cat(masks, 1), torch.cat(logged, 1), episodes.rewards(ids))


# 3. Advantages: GAE over action tokens alone, with a lambda that knows the episode's length (section 3.2).


def length_adaptive_lambda(action_tokens_B: Tensor, alpha: float) -> Tensor:
    return (1 - 1 / (alpha * action_tokens_B.double())).clamp(0, 1)


def skip_observation_gae(rewards: Tensor, values: Tensor, mask: Tensor, lam_B: Tensor, gamma: float = 1.0) -> Tensor:
    """Walk back over the columns; observations leave no trace, so that from one turn to the next is ONE step of gamma * lambda."""
    advantages = torch.zeros_like(values)
    next_value = next_advantage = torch.zeros_like(values[:, 0])
    for t in reversed(range(mask.shape[1])):
        acts = mask[:, t]
        delta = rewards[:, t] + gamma * next_value - values[:, t]
        advantage = delta + gamma * lam_B.to(values.dtype) * next_advantage
        advantages[:, t] = torch.where(acts, advantage, 0.0)
        next_value, next_advantage = torch.where(acts, values[:, t], next_value), torch.where(acts, advantage, next_advantage)
    return advantages


# 4. Losses, each divided by ALL action tokens of the batch: rejected tokens weaken the update, survivors are never scaled up.


def value_loss(values: Tensor, returns: Tensor, mask: Tensor) -> Tensor:
    return torch.where(mask, values - returns, 0.0).square().sum() / mask.sum()


def dis_loss(logprobs: Tensor, behaviour: Tensor, advantages: Tensor, mask: Tensor, eps_low: float, eps_high: float) -> tuple[Tensor, Tensor]:
    """Direct double-sided importance sampling (section 3.1): the ratio to the policy that SAMPLED, masked on both sides whatever the sign of A.

    The ratio is a detached weight. Differentiated, it would bring a factor 1 + log pi, negative for every token with probability below 1/e.
    Returns (loss, accepted [B, T - 1]).
    """
    log_ratio = (logprobs - behaviour).detach()
    accepted = mask & (log_ratio > math.log(1 - eps_low)) & (log_ratio < math.log(1 + eps_high))
    weight = torch.where(accepted, log_ratio.exp(), 0.0)
    return -(weight * advantages * torch.where(accepted, logprobs, 0.0)).sum() / mask.sum(), accepted


# 5. One step, and the loop around it.


@dataclass(frozen=True)
class Settings:
    """The paper's where they do not depend on the model's size; eps_low and eps_high are epsilons, the band is (0.7, 6)."""

    eps_low: float = 0.3
    eps_high: float = 5.0
    alpha: float = 1.5
    critic_updates: int = 2  # K
    critic_only_steps: int = 10  # the actor waits for a critic that knows something
    policy_lr: float = 1e-3
    critic_lr: float = 5e-3
    policy_clip: float = 1.0
    critic_clip: float = 10.0


def adamw(model: nn.Module, lr: float) -> torch.optim.AdamW:
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=lr, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.0)


def descend(optimizer: torch.optim.Optimizer, loss: Tensor, clip: float) -> float:
    """One optimiser step; the gradient's norm before clipping."""
    optimizer.zero_grad()
    loss.backward()
    parameters = optimizer.param_groups[0]["params"]
    norm = float(torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None]))
    if norm > clip:
        for parameter in parameters:
            if parameter.grad is not None:
                parameter.grad *= clip / norm
    optimizer.step()
    return norm


class Learner:
    def __init__(self, policy: Policy, critic: Critic, settings: Settings) -> None:
        self.policy, self.critic, self.settings = policy, critic, settings
        self.policy_optimizer, self.critic_optimizer = adamw(policy, settings.policy_lr), adamw(critic, settings.critic_lr)

    def step(self, batch: Rollouts, *, actor: bool = True) -> dict[str, float]:
        s, (ids, mask, behaviour, reward) = self.settings, batch
        length = mask.sum(1)
        is_last = mask & (mask.cumsum(1) == length[:, None])
        metrics = {"reward": float(reward.mean())}

        # a. The critic: K steps towards the outcome itself (the lambda = 1 return).
        returns = torch.where(mask, reward[:, None], 0.0)
        for update in range(s.critic_updates):
            loss = value_loss(self.critic(ids), returns, mask)
            descend(self.critic_optimizer, loss, s.critic_clip)
            metrics[f"value_loss_{update}"] = loss.item()

        # b. Values are read again with the critic just trained. c. Advantages, the outcome on the last ACTION token.
        with torch.no_grad():
            values = self.critic(ids)
        outcome = torch.where(is_last, reward[:, None], 0.0)
        advantages = skip_observation_gae(outcome, values, mask, length_adaptive_lambda(length, s.alpha))

        # d. One step of the actor.
        if actor:
            loss, accepted = dis_loss(self.policy.logprobs(ids), behaviour, advantages, mask, s.eps_low, s.eps_high)
            metrics["grad_norm"] = descend(self.policy_optimizer, loss, s.policy_clip)
            metrics["policy_loss"] = loss.item()
            metrics["masked"] = 1 - float(accepted.sum() / mask.sum())
        return metrics


def train(task: type[AskAndAdd], learner: Learner, *, steps: int, batch: int, delay: int, seed: int) -> list[dict[str, float]]:
    """The asynchronous loop, its clock replaced by `delay`: the batch of version v was sampled with the weights of version v - delay."""
    generator = torch.Generator().manual_seed(seed)
    recent = deque([copy.deepcopy(learner.policy)], maxlen=delay + 1)  # recent[0] is what the engines hold
    history = []
    for step in range(steps):
        rollouts = rollout(recent[0], task(batch, generator), task.max_tokens, generator)
        actor = step >= learner.settings.critic_only_steps
        history.append(learner.step(rollouts, actor=actor))
        if actor:
            recent.append(copy.deepcopy(learner.policy))
    return history


# 6. A toy task: the policy must ask (one token), is told a digit (two tokens it did not sample), and must answer with the sum modulo 4.


class AskAndAdd:
    """Reward 1 for `x ASK OBS y z` with z = x + y mod 4; whoever does not ask is told nothing and gets 0. Digit d is token 3 + d."""

    ASK, OBS, DIGITS, BASE = 1, 2, 3, 4
    vocabulary, max_tokens = 7, 5

    def __init__(self, batch: int, generator: torch.Generator) -> None:
        self.x, self.y = torch.randint(self.BASE, (2, batch), generator=generator)
        self.prompt = (self.DIGITS + self.x)[:, None]

    def next(self, ids_BN: Tensor) -> Tensor:
        asked = ids_BN[:, 1] == self.ASK if ids_BN.shape[1] > 1 else torch.ones(len(self.x), dtype=torch.bool)
        token = [self.x, self.x, torch.full_like(self.x, self.OBS), self.DIGITS + self.y][ids_BN.shape[1] % 4]
        moves = ids_BN.shape[1] in (1, 4)
        return torch.where(asked, POLICY if moves else token, PAD)

    def rewards(self, ids_BT: Tensor) -> Tensor:
        if ids_BT.shape[1] < self.max_tokens:
            return torch.zeros(len(self.x))
        return (ids_BT[:, -1] == self.DIGITS + (self.x + self.y) % self.BASE).float()


# 7. Run it.


def main() -> None:
    parser = argparse.ArgumentParser(description="Train a tiny transformer by SAO on the toy task.")
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--delay", type=int, default=4)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(options.seed)
    policy = Policy(Shape(vocabulary=AskAndAdd.vocabulary))
    learner = Learner(policy, Critic(policy), Settings())
    started = time.perf_counter()
    history = train(AskAndAdd, learner, steps=options.steps, batch=options.batch, delay=options.delay, seed=options.seed)
    window = max(1, options.steps // 12)
    for begin in range(0, options.steps, window):
        rows = history[begin : begin + window]
        reward, loss, masked = (sum(r.get(key, 0.0) for r in rows) / len(rows) for key in ("reward", "value_loss_0", "masked"))
        print(f"steps {begin:4d}..{begin + len(rows) - 1:4d}  reward {reward:.3f}  value loss {loss:.3f}  masked {masked:.3f}")
    print(
        f"{time.perf_counter() - started:.0f} s on one core; weights {options.delay} versions old at every step; chance is {AskAndAdd.vocabulary**-2:.3f}"
    )


if __name__ == "__main__":
    main()
