"""`sao warmstart`: supervised learning on an environment's demonstrations, so that reinforcement learning starts from partial skill.

The first steps imitate clean demonstrations, the rest a mixture of good and bad ones: the policy learns the moves first and keeps its errors. Texts go
through the renderer that episodes use, and only what the assistant says is learned. Hidden matrices train with Muon, the rest with AdamW.

The result is a Hugging Face directory in a cache, under a hash of what determines it: the model, these settings, and a sample of the demonstrations
themselves, so that any change of the environment that shows in them makes a new checkpoint.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from sao.agents.renderer import demonstration_tokens, load_renderer
from sao.agents.tokenizer import load_tokenizer
from sao.config import Config
from sao.environment import Task
from sao.errors import UserError
from sao.runtime.models import make_base
from sao.tasks.target import load_environment

if TYPE_CHECKING:
    import torch

FORMAT = 1  # raise when this file or the factory learns differently from the same settings
POOL = 6_000  # most demonstrations made per phase; longer phases pass over them again
Progress = Callable[[str, float], None]  # a line for the screen, and the share done


class Example(NamedTuple):
    """One demonstration as tokens; `sampled` marks what the assistant says, its closing token included."""

    ids: list[int]
    sampled: list[bool]


def warmstart(config: Config, *, progress: Progress | None = None) -> Path:
    """Return the directory of the warm-started model of this configuration, training it when the cache has none.

    Raises UserError when the environment has no `demonstration`, or a target cannot be imported.
    """
    say = progress or _print
    environment = _demonstrated(config)
    target = _target(config, environment)
    cache = target.parent
    if (target / "warmstart.json").exists():
        say(f"warm start: cached in {target}", 1.0)
        return target
    say(f"warm start: none cached, training {config.warmstart.steps} steps", 0.0)
    cache.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=".making-", dir=cache))
    try:
        facts = _train(config, environment, scratch, say)
        (scratch / "warmstart.json").write_text(json.dumps(facts, indent=1))
        scratch.chmod(0o755)
        try:
            os.replace(scratch, target)
        except OSError:
            if not (target / "warmstart.json").exists():
                raise
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    say(f"warm start: loss {facts['loss']:.3f} after {facts['seconds']:.0f} s, saved in {target}", 1.0)
    return target


def cached(config: Config) -> Path | None:
    """The directory `warmstart` would return at once, or None when it would have to train. Loads no torch. Raises UserError as `warmstart` does."""
    target = _target(config, _demonstrated(config))
    return target if (target / "warmstart.json").exists() else None


def _demonstrated(config: Config) -> Any:
    environment = load_environment(config.env.target)
    if not hasattr(environment, "demonstration"):
        raise UserError(
            f"env.target={config.env.target} has no classmethod `demonstration`, which a warm start imitates; add one or set model.warmstart=false"
        )
    return environment


def _target(config: Config, environment: Any) -> Path:
    cache = Path(config.warmstart.cache_dir or "~/.cache/sao/warmstart").expanduser()
    return cache / f"{config.env.name}-{_key(config, environment)}"


def _print(line: str, share: float) -> None:
    print(line, flush=True)


def _key(config: Config, environment: Any) -> str:
    settings = {k: v for k, v in asdict(config.warmstart).items() if k != "cache_dir"}
    model = {k: v for k, v in asdict(config.model).items() if k != "cache_dir"}
    sample = [environment.demonstration(random.Random(f"key/{i}"), i % 2 == 0, **config.env.args) for i in range(64)]
    everything = [FORMAT, config.env.target, settings, model, sample, _tools(config, environment)]
    return hashlib.sha256(json.dumps(everything, sort_keys=True, default=str).encode()).hexdigest()[:16]


def _tools(config: Config, environment: Any) -> Sequence[Any]:
    """The tool schemas, asked of an environment of one generated task; none where the class generates no tasks."""
    if not hasattr(environment, "generate_payload"):
        return ()
    payload = environment.generate_payload(random.Random(0), "train", **config.env.args)
    return list(environment(Task("warmstart", config.env.name, payload), **config.env.args).tools())


def _train(config: Config, environment: Any, directory: Path, say: Progress) -> dict[str, Any]:
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    started, settings = time.monotonic(), config.warmstart
    logging.disable_progress_bar()
    torch.set_num_threads(config.learner.threads)
    torch.manual_seed(settings.seed)
    base = make_base(config, str(directory))
    tokenizer = load_tokenizer(base, trust_remote_code=config.model.trust_remote_code)
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32, trust_remote_code=config.model.trust_remote_code)
    model.train()
    tools, renderer = _tools(config, environment), load_renderer(config.model.renderer, tokenizer, thinking=config.model.thinking)

    def example(name: str, clean: bool) -> Example:
        return Example(*demonstration_tokens(renderer, environment.demonstration(random.Random(name), clean, **config.env.args), tools))

    optimizers = _optimizers(model, config)
    batches = _batches(config, example)
    loss = 0.0
    for step, batch in enumerate(batches):
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = group["initial_lr"] * _schedule(step, settings.steps)
        loss = _step(model, batch, optimizers)
        if step % 50 == 49 and step + 1 < settings.steps:
            say(f"warm start: step {step + 1}/{settings.steps}, loss {loss:.3f}, {time.monotonic() - started:.0f} s", (step + 1) / settings.steps)
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return {
        "steps": settings.steps,
        "loss": loss,
        "seconds": time.monotonic() - started,
        "environment": config.env.target,
        "env_args": config.env.args,
    }


def _optimizers(model: torch.nn.Module, config: Config) -> list[torch.optim.Optimizer]:
    import torch

    settings = config.warmstart
    hidden = {name for name, p in model.named_parameters() if p.dim() == 2 and "layers." in name and settings.matrix_lr > 0}
    matrices = [p for name, p in model.named_parameters() if name in hidden]
    others = [p for name, p in model.named_parameters() if name not in hidden]
    optimizers: list[torch.optim.Optimizer] = [torch.optim.AdamW(others, lr=settings.lr, betas=(0.9, 0.98), weight_decay=0.0)]
    if matrices:
        from sao.learner.muon import Muon

        optimizers.append(Muon(matrices, lr=settings.matrix_lr))
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["initial_lr"] = group["lr"]
    return optimizers


def _schedule(step: int, steps: int) -> float:
    """Fifty steps of warm-up, then a cosine to one twentieth."""
    import math

    return min(1.0, (step + 1) / 50) * (0.05 + 0.475 * (1 + math.cos(math.pi * step / steps)))


def _batches(config: Config, example: Callable[[str, bool], Example]) -> Iterator[list[Example]]:
    """One batch a step: clean demonstrations first, then the mixture."""
    settings = config.warmstart
    clean_steps = round(settings.clean_share * settings.steps)
    for clean, steps in ((True, clean_steps), (False, settings.steps - clean_steps)):
        size = min(POOL, steps * settings.batch_size)
        pool: list[Example] = []
        for step in range(steps):
            batch = []
            for i in range(step * settings.batch_size, (step + 1) * settings.batch_size):
                if i < size:
                    pool.append(example(f"warmstart/{settings.seed}/{clean}/{i}", clean))
                batch.append(pool[i % size])
            yield batch


def _step(model: Any, batch: list[Example], optimizers: list[torch.optim.Optimizer]) -> float:
    """One update on the mean loss per assistant token. Two halves of similar length, because padding is paid for in full."""
    import torch

    total = sum(sum(example.sampled) for example in batch)
    ordered = sorted(batch, key=lambda example: len(example.ids))
    loss = 0.0
    for half in (ordered[: len(ordered) // 2], ordered[len(ordered) // 2 :]):
        if not half:
            continue
        longest = max(len(example.ids) for example in half)
        ids = torch.tensor([example.ids + [0] * (longest - len(example.ids)) for example in half])
        sampled = torch.tensor([example.sampled + [False] * (longest - len(example.sampled)) for example in half])
        logits = model(input_ids=ids[:, :-1], use_cache=False).logits[sampled[:, 1:]]
        part = torch.nn.functional.cross_entropy(logits.float(), ids[:, 1:][sampled[:, 1:]], reduction="sum") / total
        part.backward()
        loss += part.item()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    return loss
