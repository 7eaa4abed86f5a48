"""Small models, trajectories and configurations for the learner's tests."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from transformers import AutoModel, LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

from sao.config import Config
from sao.learner import attention
from sao.learner.models import CriticModel
from sao.trajectory import EpisodeId, FinishReason, SamplingSpec, Segment, Trajectory

VOCABULARY = 41
SHAPE = {
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "attn_implementation": attention.NAME,
}


class ExactNorm(nn.Module):
    """RMSNorm in the input's own precision: the libraries' goes through float32, which hides what 1e-9 is to show."""

    def __init__(self, original: nn.Module) -> None:
        super().__init__()
        self.weight, self.eps = original.weight, original.variance_epsilon

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps)


def causal_model(kind: str = "llama", *, dtype: torch.dtype = torch.float64, seed: int = 0, **changes: object) -> nn.Module:
    attention.register()
    torch.manual_seed(seed)
    if kind == "llama":
        model: nn.Module = LlamaForCausalLM(LlamaConfig(**SHAPE | {"tie_word_embeddings": True} | changes))
    else:
        model = Qwen3ForCausalLM(Qwen3Config(**SHAPE | {"head_dim": 8, "tie_word_embeddings": False} | changes))
    for parameter in model.parameters():
        nn.init.normal_(parameter, mean=1.0 if parameter.ndim == 1 else 0.0, std=0.3)
    return exact(model.to(dtype).eval())


def critic_model(kind: str = "llama", *, dtype: torch.dtype = torch.float64, seed: int = 1) -> CriticModel:
    return CriticModel(causal_model(kind, dtype=dtype, seed=seed).base_model, "normal")


def exact(model: nn.Module) -> nn.Module:
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if type(child).__name__.endswith("RMSNorm"):
                setattr(module, name, ExactNorm(child))
    return model


def save_model(directory: Path, kind: str = "llama", seed: int = 0) -> str:
    attention.register()
    torch.manual_seed(seed)
    config = LlamaConfig(**SHAPE | {"tie_word_embeddings": True}) if kind == "llama" else Qwen3Config(**SHAPE | {"head_dim": 8})
    model = (LlamaForCausalLM if kind == "llama" else Qwen3ForCausalLM)(config)
    for parameter in model.parameters():
        if parameter.ndim > 1:
            nn.init.normal_(parameter, std=0.2)
    model.save_pretrained(directory)
    return str(directory)


def backbone(path: str) -> nn.Module:
    return AutoModel.from_pretrained(path)


def segment(
    mask: list[int] | np.ndarray,
    *,
    rng: np.random.Generator,
    version: int | list[int] = 0,
    temperature: float = 1.0,
    parent: tuple[int, int] | None = None,
    logprob: float | None = None,
) -> Segment:
    chosen = np.asarray(mask, bool)
    behaviour = rng.uniform(-5, -1, len(chosen)) if logprob is None else np.full(len(chosen), logprob)
    return Segment(
        rng.integers(0, VOCABULARY, len(chosen)),
        chosen,
        np.where(chosen, behaviour, np.nan),
        np.where(chosen, version, -1),
        SamplingSpec(temperature=temperature),
        parent=parent,
    )


def trajectory(ordinal: int, segments: list[Segment], reward: float = 1.0, finish: FinishReason | None = None, **more: object) -> Trajectory:
    return Trajectory(EpisodeId(ordinal), f"task-{ordinal}", "test", tuple(segments), reward, finish or FinishReason.terminal(), 0, **more)


def batch(count: int = 6, seed: int = 0, version: int = 0, **more: object) -> list[Trajectory]:
    """Episodes of 5 to 20 tokens with two turns and rewards that vary."""
    rng = np.random.default_rng(seed)
    out = []
    for ordinal in range(count):
        parts = [(rng.integers(1, 5), 0), (rng.integers(1, 5), 1), (rng.integers(1, 4), 0), (rng.integers(1, 5), 1), (rng.integers(0, 3), 0)]
        mask = np.concatenate([np.full(n, kind) for n, kind in parts])
        out.append(trajectory(ordinal, [segment(mask, rng=rng, version=version, **more)], float(ordinal % 2)))
    return out


def config(**changes: object) -> Config:
    """Defaults with rates a tiny model can feel and no critic-only steps; changes are dotted keys with _ for the dot: algo__gamma=0.9."""
    made = Config()
    made.critic.critic_only_steps = 0
    made.optim.policy.lr = 1e-2
    made.optim.critic.lr = 1e-2
    made.algo.eps_low, made.algo.eps_high = 0.99, 1e6
    made.learner.tokens_per_micro_batch = 64
    for key, value in changes.items():
        group, _, name = key.rpartition("__")
        target = made
        for part in group.split("__") if group else []:
            target = getattr(target, part)
        assert hasattr(target, name), key
        setattr(target, name, value)
    return made
