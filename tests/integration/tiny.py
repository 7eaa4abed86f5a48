"""A random Llama of 0.3 M parameters: a model directory without downloads, and what Hugging Face says of its tokens."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM

VOCABULARY = 256
CONTEXT = 1024


def tiny_llama(seed: int, tied: bool = True, vocabulary: int = VOCABULARY, directory: Path | None = None) -> LlamaForCausalLM:
    """head_dim 32 (the CPU attention's smallest), fp32. Weights large enough that two seeds disagree clearly about every token."""
    torch.manual_seed(seed)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=vocabulary,
            hidden_size=96,
            intermediate_size=256,
            num_hidden_layers=2,
            num_attention_heads=3,
            num_key_value_heads=3,
            head_dim=32,
            tie_word_embeddings=tied,
            max_position_embeddings=CONTEXT,
            pad_token_id=0,
            bos_token_id=1,
            eos_token_id=2,
        )
    ).float()
    for parameter in model.parameters():
        if parameter.ndim == 2:
            torch.nn.init.normal_(parameter, std=0.08)
    if directory is not None:
        model.save_pretrained(directory)
    return model.eval()


@torch.no_grad()
def log_softmax(model: LlamaForCausalLM, token_ids: np.ndarray, temperature: float = 1.0) -> torch.Tensor:
    """[B, T] or [T] ids -> log-probs of the next token after each position, [..., T, V]."""
    ids = torch.as_tensor(np.asarray(token_ids), dtype=torch.long)
    logits = model(ids if ids.ndim == 2 else ids[None]).logits
    result = torch.log_softmax(logits / temperature, -1)
    return result if ids.ndim == 2 else result[0]


def reference(model: LlamaForCausalLM, prompt: np.ndarray, sampled: np.ndarray, temperature: float = 1.0) -> np.ndarray:
    """Log-probs of `sampled` after `prompt`, float32[len(sampled)]."""
    ids = np.concatenate([prompt, sampled])
    scores = log_softmax(model, ids, temperature)[:-1].gather(1, torch.as_tensor(ids[1:], dtype=torch.long)[:, None])[:, 0]
    return scores.numpy()[len(prompt) - 1 :]


def start_engine(*arguments: Any, **options: Any) -> Any:
    """A VllmEngine. A run starts each in a process of its own; here other tests have imported what vLLM 0.32 trips over.

    Its kernel dispatcher looks at every object of every module for an attribute `kernel`, which llvmlite's lazy functions do not survive.
    """
    from sao.inference.vllm_engine import VllmEngine

    hidden = {name: sys.modules.pop(name) for name in list(sys.modules) if name.partition(".")[0] == "llvmlite"}
    try:
        return VllmEngine(*arguments, **options)
    finally:
        sys.modules.update(hidden)
