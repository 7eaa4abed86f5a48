"""Small tokenizers that hold each family's control tokens, special and not, as the real ones do."""

from __future__ import annotations

from functools import cache

from agents_kit import CHATML_TEMPLATE, THINK_TEMPLATE, make_tokenizer
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from sao.agents.renderer import Renderer, load_renderer

TAGS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>")
SPECIAL = {
    "chatml": ("<|endoftext|>", "<|im_start|>", "<|im_end|>"),
    "qwen3": ("<|endoftext|>", "<|im_start|>", "<|im_end|>"),
    "llama3": (
        *("<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>"),
        *("<|eom_id|>", "<|eot_id|>", "<|python_tag|>"),
    ),
    "glm45": ("<|endoftext|>", "[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>", "/nothink"),
}
ADDED = {
    "chatml": ("<tool_call>", "</tool_call>"),
    "qwen3": TAGS,
    "llama3": (),
    "glm45": (*TAGS, "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
}
EOS = {"chatml": "<|im_end|>", "qwen3": "<|im_end|>", "llama3": "<|eot_id|>", "glm45": "<|endoftext|>"}
FAMILIES = tuple(SPECIAL)
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Weather of a place.",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string"},
                "days": {"type": "integer"},
                "hourly": {"type": "boolean"},
                "near": {"type": "array"},
                "more": {"type": "object"},
            },
            "required": ["city"],
        },
    },
}


@cache
def family_tokenizer(family: str, template: str | None = None) -> PreTrainedTokenizerFast:
    """Byte-level BPE with some merges, so that text has several spellings."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=360, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), min_frequency=1, show_progress=False)
    corpus = ['system user assistant tool hello the weather in 日本 is {"name": "weather", "arguments": {"city": "Oslo"}} 🎉 true'] * 4
    backend.train_from_iterator(corpus, trainer)
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL[family]])
    backend.add_tokens([AddedToken(token, special=False, normalized=False) for token in ADDED[family]])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=EOS[family])
    tokenizer.chat_template = template
    return tokenizer


@cache
def family_renderer(family: str, reasoning: str = "keep", thinking: bool = True) -> Renderer:
    """A family by name; `fallback` is a plain chat template, `forking` one that strips reasoning."""
    if family in ("fallback", "forking"):
        template = CHATML_TEMPLATE if family == "fallback" else THINK_TEMPLATE
        return load_renderer("template", make_tokenizer(template=template), reasoning="template" if family == "forking" else "keep")
    return load_renderer(family, family_tokenizer(family), reasoning=reasoning, thinking=thinking)


def call(name: str, arguments: object) -> dict[str, object]:
    """A structured call in the OpenAI form."""
    return {"type": "function", "function": {"name": name, "arguments": arguments}}
