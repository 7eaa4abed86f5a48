"""Loading the policy and the critic from a Hugging Face directory, and writing them back."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from sao.errors import ConfigError
from sao.learner import attention

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float64": torch.float64}
ATTENTIONS = (attention.NAME, "flash_attention_2", "flash_attention_3")
HEAD_FILE = "value_head.safetensors"


def choose_device(name: str) -> torch.device:
    """`auto` is the GPU when torch sees one."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if name not in ("cpu", "cuda"):
        raise ConfigError(f"learner.device is {name!r}; choose auto, cpu or cuda")
    if name == "cuda" and not torch.cuda.is_available():
        raise ConfigError("learner.device is cuda, but torch sees no GPU; set learner.device=cpu")
    return torch.device(name)


def _load(kind: Any, path: str, key: str, *, dtype: str, attention_name: str, trust_remote_code: bool) -> nn.Module:
    from transformers.utils import logging as progress

    if dtype not in DTYPES:
        raise ConfigError(f"model.dtype is {dtype!r}; choose float32 or bfloat16")
    if attention_name not in ATTENTIONS:
        raise ConfigError(
            f"learner.attention is {attention_name!r}, which would let packed samples see each other; choose one of {', '.join(ATTENTIONS)}"
        )
    attention.register()
    # A bar per load would end up in the learner's log and on the screen of a run.
    progress.disable_progress_bar()
    try:
        model = kind.from_pretrained(path, dtype=DTYPES[dtype], attn_implementation=attention_name, trust_remote_code=trust_remote_code)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{key} {path!r} cannot be loaded as a Hugging Face model: {str(error).splitlines()[0]}") from error
    # eval() turns dropout off, which RL needs (the ratio must be 1 on-policy), and changes nothing else.
    return model.eval()


def load_policy(path: str, *, dtype: str, attention_name: str, trust_remote_code: bool = False) -> nn.Module:
    """A causal language model. Refused when its logits are more than lm_head(hidden): log-probs are computed from that alone."""
    from transformers import AutoModelForCausalLM

    model = _load(AutoModelForCausalLM, path, "model.path", dtype=dtype, attention_name=attention_name, trust_remote_code=trust_remote_code)
    config: Any = model.config
    for name in ("final_logit_softcapping", "logits_scaling", "logit_scale"):
        if getattr(config, name, None) not in (None, 1, 1.0):
            raise ConfigError(f"model.path {path!r} sets {name} in its config, which the learner's scoring does not apply; choose another model")
    return model


class CriticModel(nn.Module):
    """The policy's architecture without its vocabulary head, and a scalar head on the last hidden state.

    Parameter names follow the causal model (`model.layers.0.self_attn.q_proj.weight`), plus `value_head.weight` and `value_head.bias`.
    """

    def __init__(self, backbone: nn.Module, head_init: str = "zero") -> None:
        super().__init__()
        self.model = backbone
        reference = next(backbone.parameters())
        config: Any = backbone.config
        self.value_head = nn.Linear(config.hidden_size, 1, dtype=reference.dtype, device=reference.device)
        if head_init not in ("zero", "normal"):
            raise ConfigError(f"critic.head_init is {head_init!r}; choose zero or normal")
        if head_init == "zero":
            nn.init.zeros_(self.value_head.weight)
        else:
            nn.init.normal_(self.value_head.weight, std=config.hidden_size**-0.5)
        nn.init.zeros_(self.value_head.bias)


def load_critic(
    policy_path: str, critic_path: str, *, head_init: str, dtype: str, attention_name: str, trust_remote_code: bool = False
) -> CriticModel:
    """A critic from the policy's checkpoint, or from a directory that `save_critic` wrote when `critic_path` is given."""
    from transformers import AutoModel

    path, key = (critic_path, "critic.path") if critic_path else (policy_path, "model.path")
    backbone = _load(AutoModel, path, key, dtype=dtype, attention_name=attention_name, trust_remote_code=trust_remote_code)
    critic = CriticModel(backbone, head_init)
    if critic_path:
        file = Path(critic_path) / HEAD_FILE
        if not file.is_file():
            raise ConfigError(f"critic.path {critic_path!r} has no {HEAD_FILE}; give a critic directory written by sao, or leave critic.path empty")
        critic.value_head.load_state_dict(load_file(file))
    return critic


def freeze(model: nn.Module, patterns: Sequence[str]) -> int:
    """Freeze every parameter whose name matches one of the regular expressions; returns how many.

    No pattern freezes nothing. A pattern that matches no parameter, or patterns that match every one, are a ConfigError.
    """
    names = [name for name, _ in model.named_parameters()]
    chosen: set[str] = set()
    for pattern in patterns:
        try:
            matched = {name for name in names if re.search(pattern, name)}
        except re.error as error:
            raise ConfigError(f"critic.freeze has {pattern!r}, which is not a regular expression: {error}") from error
        if not matched:
            raise ConfigError(
                f"critic.freeze has {pattern!r}, which matches no parameter of the critic (the first is {names[0]}); mend it or set critic.freeze=[]"
            )
        chosen |= matched
    if len(chosen) == len(names):
        raise ConfigError(f"critic.freeze {list(patterns)} freezes every parameter of the critic; leave some to train")
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name not in chosen)
    return len(chosen)


def named_weights(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Parameters and persistent buffers under their Hugging Face names; tied tensors once, under the first name."""
    seen: set[int] = set()
    for name, tensor in model.state_dict(keep_vars=True).items():
        if id(tensor) not in seen:
            seen.add(id(tensor))
            yield name, tensor.detach()


def save_critic(critic: CriticModel, directory: Path) -> None:
    """The backbone as a Hugging Face directory, and the head beside it."""
    backbone: Any = critic.model
    backbone.save_pretrained(directory)
    save_file({k: v.detach().cpu().contiguous() for k, v in critic.value_head.state_dict().items()}, directory / HEAD_FILE)
