"""Which model a run starts from: found, or made on the spot; checked without loading a weight."""

from __future__ import annotations

import json
import math
import multiprocessing
import os
import shutil
import tempfile
from collections.abc import Callable, Mapping
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sao.config import Config
from sao.errors import ConfigError, SystemFailure
from sao.runtime.processes import die_with_parent

if TYPE_CHECKING:
    from sao.agents.renderer import Renderer

HUB_FILES = ("*.json", "*.safetensors", "*.txt", "*.model", "*.jinja", "*.py")  # a hub repository may hold the weights in five forms


@dataclass(frozen=True)
class ModelFacts:
    """What the plan needs to know of a model directory. `tensors`: elements of each weight as stored, tied ones once."""

    path: str
    tensors: Mapping[str, int]
    context: int
    layers: int
    width: int
    feed_forward: int
    vocabulary: int
    kv_elements_per_token: int

    @property
    def parameters(self) -> int:
        return sum(self.tensors.values())


def prepare(config: Config) -> str:
    """The directory of the starting policy. Makes or warm-starts it in a process of its own, so that the driver never loads torch.

    A dry run trains nothing: where a warm start would have to be trained, it gets the model from which that would begin, of the same shape and tokenizer.
    """
    given = _existing(config.model.path) if config.model.path else ""
    if config.model.warmstart:
        from sao.warmstart import cached

        found = cached(config)
        if found is not None:
            print(f"warm start: cached in {found}", flush=True)
            return str(found)
        if not config.run.dry_run:
            return _in_child(_warmstart, config)
        print(f"warm start: none cached; the run itself begins with its {config.warmstart.steps} steps", flush=True)
    if given:
        return given
    kept = _kept(config)
    if kept is not None:
        print(f"model: cached in {kept}", flush=True)
        return str(kept)
    return _in_child(_from_factory, config)


def _in_child(make: Callable[[Config], str], config: Config) -> str:
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=context, initializer=die_with_parent) as pool:
        try:
            return pool.submit(make, config).result()
        except BrokenProcessPool:
            raise SystemFailure("the process that makes the model died; it may have run out of memory") from None


def _warmstart(config: Config) -> str:
    from sao.warmstart import warmstart

    return str(warmstart(config))


def _from_factory(config: Config) -> str:
    """A model that is not kept is made in a folder the operating system cleans."""
    return make_base(config, tempfile.mkdtemp(prefix="sao-model-"))


def make_base(config: Config, directory: str) -> str:
    """The model before any training: `model.path` as it is, or what `model.factory` makes in `model.cache_dir`, else in `directory`."""
    if config.model.path:
        return config.model.path
    if not config.model.factory:
        raise ConfigError("model.path and model.factory are both empty: name a Hugging Face directory or choose model=demo")
    if not config.model.cache_dir:
        _call_factory(config, directory)
        return directory
    return str(_kept(config) or _keep(config))


def _call_factory(config: Config, directory: str) -> None:
    from sao.tasks.target import load_target

    load_target(config.model.factory, "model.factory")(directory, config.warmstart.seed, **config.model.factory_args)


def _kept(config: Config) -> Path | None:
    """The factory's model in `model.cache_dir`, or None when it has to be made. Loads no torch."""
    if config.model.path or not config.model.cache_dir:
        return None
    target = Path(config.model.cache_dir).expanduser()
    return target if (target / "config.json").is_file() else None


def _keep(config: Config) -> Path:
    """Make the model beside its place and move it there whole, so that an interrupted start leaves no half of one."""
    target = Path(config.model.cache_dir).expanduser()
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        scratch = Path(tempfile.mkdtemp(prefix=".making-", dir=target.parent))
    except OSError as error:
        raise ConfigError(f"model.cache_dir={config.model.cache_dir} cannot be written ({error.strerror}); name another directory") from None
    try:
        _call_factory(config, str(scratch))
        scratch.chmod(0o755)
        try:
            os.replace(scratch, target)
        except OSError as error:
            if _kept(config) is None:  # else another run has made it meanwhile
                raise ConfigError(f"model.cache_dir={config.model.cache_dir} holds something else ({error.strerror}); empty it") from None
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    print(f"model: saved in {target}", flush=True)
    return target


def _existing(path: str) -> str:
    """A local directory, or a hub id that is in the local cache or can be downloaded."""
    local = Path(path).expanduser()
    if local.is_dir():
        if not (local / "config.json").is_file():
            raise ConfigError(f"model.path={path} has no config.json; name a Hugging Face model directory")
        return str(local.resolve())
    if local.is_absolute() or path.startswith(".") or path.count("/") != 1:
        raise ConfigError(f"model.path={path} does not exist; name a local Hugging Face directory or a hub id of the form owner/name")
    try:
        from huggingface_hub import snapshot_download

        return str(snapshot_download(path, allow_patterns=list(HUB_FILES)))
    except (OSError, ValueError) as error:
        raise ConfigError(f"model.path={path} is no local directory and could not be fetched from the hub ({type(error).__name__})") from None


def facts(path: str, key: str = "model.path") -> ModelFacts:
    """Sizes from config.json and the headers of the weight files. `key`: how the configuration names the path."""
    try:
        config = json.loads((Path(path) / "config.json").read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"{key}={path}: config.json cannot be read ({type(error).__name__}); name a Hugging Face model directory") from None
    files = sorted(Path(path).glob("*.safetensors"))
    if not files:
        raise ConfigError(f"{key}={path} holds no *.safetensors file; convert the checkpoint with save_pretrained")
    sizes: dict[str, int] = {}
    for file in files:
        try:
            sizes |= tensor_sizes(file)
        except (OSError, ValueError, KeyError, TypeError, MemoryError) as error:
            raise ConfigError(f"{key}={path}: {file.name} is damaged ({error}); copy the checkpoint again") from None
    text = config.get("text_config") or config  # models that also read pictures keep the language model's sizes there
    layers, width, heads = (int(text.get(key) or 0) for key in ("num_hidden_layers", "hidden_size", "num_attention_heads"))
    kv_heads = int(text.get("num_key_value_heads") or heads)
    head_width = int(text.get("head_dim") or width // max(1, heads))
    return ModelFacts(
        path=path,
        tensors=sizes,
        context=int(text.get("max_position_embeddings") or 0),
        layers=layers,
        width=width,
        feed_forward=int(text.get("intermediate_size") or 4 * width),
        vocabulary=int(text.get("vocab_size") or 0),
        kv_elements_per_token=2 * layers * kv_heads * head_width,
    )


def difference(found: ModelFacts, expected: ModelFacts) -> str | None:
    """In what two models cannot be the same: a size of their configurations or of a tensor that both name; None when nothing says so."""
    for name in ("layers", "width", "feed_forward", "vocabulary", "kv_elements_per_token"):
        if getattr(found, name) != getattr(expected, name):
            return f"{name} is {getattr(found, name)} instead of {getattr(expected, name)}"
    for name in sorted(found.tensors.keys() & expected.tensors.keys()):
        if found.tensors[name] != expected.tensors[name]:
            return f"{name} has {found.tensors[name]} elements instead of {expected.tensors[name]}"
    return None


def tensor_sizes(file: Path) -> dict[str, int]:
    """Tensor names and element counts from a safetensors header. Raises ValueError when the file is longer or shorter than its header says."""
    there = file.stat().st_size
    with open(file, "rb") as stream:
        size = int.from_bytes(stream.read(8), "little")
        if there < 8 or size > there:
            raise ValueError("its header is cut off")
        header: dict[str, Any] = json.loads(stream.read(size))
    tensors = {name: tensor for name, tensor in header.items() if name != "__metadata__"}
    expected = 8 + size + max((tensor["data_offsets"][1] for tensor in tensors.values()), default=0)
    if there != expected:
        raise ValueError(f"it has {there} bytes instead of {expected}")
    return {name: math.prod(tensor["shape"]) for name, tensor in tensors.items()}


def check_tokenizer(config: Config, path: str) -> Renderer:
    """The run's renderer: the tokenizer loads and the renderer can work with it; a `UserError` says what is missing."""
    from sao.agents.renderer import generation_stop_ids, load_renderer
    from sao.agents.tokenizer import load_tokenizer

    tokenizer = load_tokenizer(path, trust_remote_code=config.model.trust_remote_code)
    model, stops = config.model, generation_stop_ids(path)
    return load_renderer(model.renderer, tokenizer, reasoning=model.reasoning, thinking=model.thinking, extra_stop_ids=stops)
