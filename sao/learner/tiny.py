"""A small language model made on the spot: Llama configuration, random weights, a tokenizer trained on the environment's own texts.

The tokenizer is byte-level BPE, so any text can be encoded, but digits and operators are split off first and stay single tokens: copying a number is
copying its digits. Everything else an environment repeats word for word (system prompt, tool schema, the scaffold of a call) melts into a few tokens.
The result is an ordinary Hugging Face directory; the same seed and arguments give the same bytes.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from sao.agents.chatml import with_tools
from sao.environment import Task
from sao.errors import ConfigError
from sao.tasks.target import load_target

CONTROL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
TAGS = ("<tool_call>", "</tool_call>")
# One digit or operator; or a line with its newline; or the rest. A piece never crosses a newline, so that a role name, a system text and a schema
# encode alike whether they are encoded together or one by one.
PIECES = r"[0-9+\-*/=]|[^0-9+\-*/=\n]*\n|[^0-9+\-*/=\n]+"
# The same with every word a piece of its own (its space before it): a word has the same token wherever it stands, so it can be copied.
WORDS = r"[0-9+\-*/=]|\n| ?[^\W\d_]+|[^\w\n]|_"
# The bytes of sao.agents.chatml, for other programs that read the directory.
CHATML = (
    "{%- for message in messages -%}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] }}"
    "{%- if loop.first and message['role'] == 'system' and tools -%}"
    "{{ '\n\n# Tools' }}{%- for tool in tools -%}{{ '\n' + tool | tojson(separators=(',', ':')) }}{%- endfor -%}"
    "{%- endif -%}"
    "{{ '<|im_end|>\n' }}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\n' }}{%- endif -%}"
)


def make(
    directory: str,
    seed: int,
    *,
    environment: str,
    environment_args: Mapping[str, Any] | None = None,
    vocab_size: int = 1024,
    demonstrations: int = 300,
    words: bool = False,
    width: int = 64,
    layers: int = 3,
    heads: int = 4,
    head_size: int = 32,
    feed_forward: int = 160,
    context: int = 512,
    rope_theta: float = 100.0,
) -> None:
    """Write a model directory (fp32 weights, tokenizer, chat template, generation config) to `directory`.

    environment: package.module:Class whose demonstrations the tokenizer is trained on. vocab_size: an upper bound, the vocabulary holds what those texts
    need. words: no token spans two words. head_size must be one vLLM supports on CPU (32, 64, ...).
    """
    demonstrator = load_target(environment, "model.factory_args.environment")
    if not callable(getattr(demonstrator, "demonstration", None)):
        raise ConfigError(
            f"model.factory_args.environment={environment} has no classmethod `demonstration`, of which the tokenizer is made; add one or name a model in model.path"
        )
    tokenizer = train_tokenizer(texts(demonstrator, environment_args or {}, demonstrations), vocab_size, WORDS if words else PIECES)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=width,
        intermediate_size=feed_forward,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        head_dim=head_size,
        max_position_embeddings=context,
        rope_parameters={"rope_type": "default", "rope_theta": rope_theta},
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        dtype="float32",
    )
    model = initialise(LlamaForCausalLM(config), seed)
    model.generation_config = GenerationConfig(eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id, do_sample=True)
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)


def texts(environment: Any, arguments: Mapping[str, Any], count: int) -> Iterator[str]:
    """The messages of `count` demonstrations; which ones does not depend on the model's seed."""
    tools: Sequence[Mapping[str, Any]] = ()
    for index in range(count):
        messages = environment.demonstration(random.Random(f"tokenizer/{index}"), index % 2 == 0, **arguments)
        if index == 0 and hasattr(environment, "generate_payload"):
            payload = environment.generate_payload(random.Random("tokenizer"), "train", **arguments)
            tools = environment(Task("tokenizer", "", payload), **arguments).tools()
        for message in with_tools(messages, tools):
            yield f"{message['role']}\n{message['content']}"


def train_tokenizer(corpus: Iterator[str], vocab_size: int, pieces: str = PIECES) -> PreTrainedTokenizerFast:
    """Byte-level BPE with single digits and operators, ChatML control tokens and the two tags of a tool call. pieces: what no token crosses."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(pieces), "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        min_frequency=2,
        show_progress=False,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        special_tokens=list(CONTROL),
    )
    tokenizer.train_from_iterator((piece for text in corpus for piece in _without_tags(text)), trainer)
    tokenizer.add_tokens([AddedToken(tag, normalized=False, special=False) for tag in TAGS])
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        additional_special_tokens=["<|im_start|>"],
        clean_up_tokenization_spaces=False,
    )
    fast.chat_template = CHATML
    return fast


def _without_tags(text: str) -> list[str]:
    for tag in TAGS:
        text = text.replace(tag, "\0")
    return [piece for piece in text.split("\0") if piece]


@torch.no_grad()
def initialise(model: LlamaForCausalLM, seed: int) -> LlamaForCausalLM:
    """Embeddings at 0.02; matrices at width ** -0.5, those that write into the residual stream smaller by sqrt(2 * layers)."""
    generator = torch.Generator().manual_seed(seed)
    scale = model.config.hidden_size**-0.5
    for name, parameter in sorted(model.named_parameters()):
        if parameter.dim() < 2:
            continue
        std = 0.02 if "embed" in name else scale / (2 * model.config.num_hidden_layers) ** 0.5 if "o_proj" in name or "down_proj" in name else scale
        parameter.normal_(0.0, std, generator=generator)
    return model
