"""S copies of the reference's transformer in one set of tensors, so that the seeds of a cell share each operation.

A model of 30,000 parameters spends its time on the overhead of operations, not on arithmetic: five seeds side by side cost little more than one. Every
copy stays for itself: its weights, gradient norm, clipping, learning rate and optimiser state. tests/unit/benchmarks/test_ablation_stack.py compares
each copy with examples/reference_sao.py.

Shape letters: S copies, B episodes, N tokens, R = S * B rows, D width, H heads, E = D / H.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

import torch
import torch.nn.functional as F
from torch import Tensor


def load_reference() -> ModuleType:
    """examples/reference_sao.py as a module."""
    if "reference_sao" not in sys.modules:
        path = Path(__file__).resolve().parents[2] / "examples" / "reference_sao.py"
        spec = importlib.util.spec_from_file_location("reference_sao", path)
        assert spec and spec.loader
        sys.modules["reference_sao"] = module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    return sys.modules["reference_sao"]


reference = load_reference()
Weights = dict[str, Tensor]  # name -> [S, ...]
ATTENTION = ("qkv", "out")  # what a critic with frozen attention leaves alone


def stack(models: Sequence[torch.nn.Module]) -> Weights:
    """Weights of S reference policies or critics of one shape. Matrices are transposed, [S, in, out]; q, k, v and gate, up lie side by side."""
    rows = []
    for model in models:
        p = {name: value.detach() for name, value in model.named_parameters()}
        row = {"embed": p["model.embed_tokens.weight"], "norm": p["model.norm.weight"][None]}
        for i in range(model.model.shape.layers):
            at = f"model.layers.{i}."
            row[f"qkv.{i}"] = torch.cat([p[f"{at}self_attn.{x}_proj.weight"].T for x in "qkv"], 1)
            row[f"out.{i}"] = p[f"{at}self_attn.o_proj.weight"].T
            row[f"gate.{i}"], row[f"up.{i}"], row[f"down.{i}"] = (p[f"{at}mlp.{x}_proj.weight"].T for x in ("gate", "up", "down"))
            row[f"norm_a.{i}"], row[f"norm_b.{i}"] = p[f"{at}input_layernorm.weight"][None], p[f"{at}post_attention_layernorm.weight"][None]
        if "value_head.weight" in p:
            row["head"], row["bias"] = p["value_head.weight"].T, p["value_head.bias"]
        rows.append(row)
    return {name: torch.stack([row[name] for row in rows]).contiguous() for name in rows[0]}


def clone(weights: Weights) -> Weights:
    return {name: value.detach().clone() for name, value in weights.items()}


def select(weights: Weights, copies: Sequence[int]) -> Weights:
    """The copies named, in that order; one may be named several times."""
    return {name: value.detach()[list(copies)].clone() for name, value in weights.items()}


def as_engines_hold_them(weights: Weights) -> Weights:
    """Rounded to bfloat16, the type in which inference engines usually hold weights; the sampler's arithmetic stays float32."""
    return {name: value.detach().bfloat16().float() for name, value in weights.items()}


def _norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return F.rms_norm(x, (x.shape[-1],), eps=eps) * weight


class Stack:
    """The forward pass for one shape. `length` bounds positions."""

    def __init__(self, shape: reference.Shape, length: int) -> None:
        self.shape = shape
        self.cos, self.sin = reference.rotation(torch.arange(length), shape.width // shape.heads, shape.rope_theta)
        self.allowed = torch.zeros(length, length).masked_fill(torch.ones(length, length, dtype=torch.bool).triu(1), -torch.inf)

    def hidden(self, w: Weights, ids_RN: Tensor, cache: dict[int, tuple[Tensor, Tensor]] | None = None) -> Tensor:
        """ids [R, N], rows of copy 0 first -> [S, B * N, D]. With a cache only new tokens are passed: the prompt, then one at a time."""
        shape, copies, (rows, n) = self.shape, len(w["embed"]), ids_RN.shape
        offset = torch.arange(copies).repeat_interleave(rows // copies)[:, None] * shape.vocabulary
        x = F.embedding(ids_RN + offset, w["embed"].flatten(0, 1)).view(copies, -1, shape.width)
        start = cache[0][0].shape[2] if cache else 0
        cos, sin = (table[start : start + n, None, None] for table in (self.cos, self.sin))
        for i in range(shape.layers):
            qkv = torch.bmm(_norm(x, w[f"norm_a.{i}"], shape.norm_eps), w[f"qkv.{i}"]).view(rows, n, 3, shape.heads, -1)
            q, k = reference.rotate(qkv[:, :, :2], cos, sin).permute(2, 0, 3, 1, 4)  # [R, H, N, E] each
            v = qkv[:, :, 2].transpose(1, 2)
            if cache is not None:
                if i in cache:
                    k, v = torch.cat([cache[i][0], k], 2), torch.cat([cache[i][1], v], 2)
                cache[i] = (k, v)
            mixed = self._attend(q, k, v).transpose(1, 2).reshape(copies, -1, shape.width)
            x = torch.baddbmm(x, mixed, w[f"out.{i}"])
            y = _norm(x, w[f"norm_b.{i}"], shape.norm_eps)
            x = torch.baddbmm(x, F.silu(torch.bmm(y, w[f"gate.{i}"])) * torch.bmm(y, w[f"up.{i}"]), w[f"down.{i}"])
        return _norm(x, w["norm"], shape.norm_eps)

    def _attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scale, n = q.shape[-1] ** -0.5, q.shape[2]
        if n == 1:  # one query a row: products and sums are faster than thousands of tiny matrix products
            share = torch.softmax((q * k).sum(-1) * scale, -1)
            return (share[..., None] * v).sum(2, keepdim=True)
        return torch.softmax((q @ k.mT) * scale + self.allowed[:n, :n], -1) @ v

    def logits(self, w: Weights, ids_RN: Tensor, cache: dict[int, tuple[Tensor, Tensor]] | None = None) -> Tensor:
        """[R, N, vocabulary]"""
        return torch.bmm(self.hidden(w, ids_RN, cache), w["embed"].mT).view(*ids_RN.shape, -1)

    def logprobs(self, w: Weights, ids_RT: Tensor) -> Tensor:
        """log pi(ids[t] | ids[:t]) for t >= 1, float32 [R, T - 1]."""
        logits = self.logits(w, ids_RT[:, :-1])
        return logits.gather(-1, ids_RT[:, 1:, None])[..., 0] - logits.logsumexp(-1)

    def values(self, w: Weights, ids_RT: Tensor) -> Tensor:
        """V of the state in which each token t >= 1 was chosen, [R, T - 1]."""
        return torch.baddbmm(w["bias"][:, None], self.hidden(w, ids_RT[:, :-1]), w["head"]).view(ids_RT.shape[0], -1)


class AdamW:
    """AdamW (betas 0.9 and 0.95, eps 1e-8, no decay) on S copies, each with its own rate and its own clipping. lr: [S]."""

    BETAS, EPS = (0.9, 0.95), 1e-8

    def __init__(self, weights: Weights, lr: Tensor, clip: float, frozen: Sequence[str] = ()) -> None:
        self.weights = weights
        self.names = [name for name in weights if name.partition(".")[0] not in frozen]
        for name in self.names:
            weights[name].requires_grad_(True)
        self.clip, self.steps = clip, 0
        self.rates = [lr.view(-1, *[1] * (weights[name].ndim - 1)) for name in self.names]
        self.first, self.second = ([torch.zeros_like(weights[name]) for name in self.names] for _ in range(2))

    @torch.no_grad()
    def step(self) -> Tensor:
        """One step along the gradients that lie in `.grad`; returns each copy's norm before clipping, [S]. A copy whose norm is not finite stays where it is."""
        parameters = [self.weights[name] for name in self.names]
        gradients = [p.grad for p in parameters]
        norm = torch.stack([g.flatten(1).square().sum(1) for g in gradients]).sum(0).sqrt()
        scale = torch.where(norm > self.clip, self.clip / norm, 1.0)
        sound = torch.isfinite(norm)
        self.steps += 1
        if not bool(sound.all()):
            gradients = [torch.where(sound.view(-1, *[1] * (g.ndim - 1)), g, 0.0) for g in gradients]
            scale = torch.where(sound, scale, 0.0)
        gradients = torch._foreach_mul(gradients, [scale.view(-1, *[1] * (g.ndim - 1)) for g in gradients])
        b1, b2 = self.BETAS
        torch._foreach_lerp_(self.first, gradients, 1 - b1)
        torch._foreach_mul_(self.second, b2)
        torch._foreach_addcmul_(self.second, gradients, gradients, 1 - b2)
        root = torch._foreach_sqrt(torch._foreach_div(self.second, 1 - b2**self.steps))
        torch._foreach_add_(root, self.EPS)
        move = torch._foreach_div(torch._foreach_mul(self.first, self.rates), root)
        torch._foreach_sub_(parameters, torch._foreach_div(move, 1 - b1**self.steps))
        for p in parameters:
            p.grad = None
        return norm
