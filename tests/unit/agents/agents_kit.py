"""Parts shared by the tests of sao.agents: a small byte-level BPE, a scripted engine and a scripted environment."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from sao.environment import Action, Context, Message, StepResult, Task
from sao.inference.protocol import GenerateRequest, Generation

CHATML_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
THINK_TEMPLATE = (
    "{% set last = namespace(user=-1) %}{% for m in messages %}{% if m.role == 'user' %}{% set last.user = loop.index0 %}{% endif %}{% endfor %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' and loop.index0 < last.user and '</think>' in m.content %}{{ m.content.split('</think>')[-1] }}"
    "{% else %}{{ m.content }}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CALCULATOR = {
    "type": "function",
    "function": {
        "name": "calculator",
        "description": "adds",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}, "required": ["a", "b"]},
    },
}


def make_tokenizer(tags: str = "special", template: str | None = CHATML_TEMPLATE, control: bool = True) -> PreTrainedTokenizerFast:
    """Byte-level BPE, digits split. tags: `special`, `added` (registered as non-special) or `text` (no tag tokens)."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)])
    backend.decoder = decoders.ByteLevel()
    specials = ["<|endoftext|>", *(["<|im_start|>", "<|im_end|>"] if control else [])]
    specials += ["<tool_call>", "</tool_call>"] if tags == "special" else []
    trainer = trainers.BpeTrainer(
        vocab_size=420, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), special_tokens=specials, min_frequency=1, show_progress=False
    )
    corpus = ['hello hello the calculator says {"name": "calculator", "arguments": {"a": 1, "b": 2}} system user assistant tool'] * 8
    backend.train_from_iterator(corpus, trainer)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|im_end|>" if control else "<|endoftext|>", pad_token="<|endoftext|>")
    if tags == "added":
        tokenizer.add_tokens(["<tool_call>", "</tool_call>"])
    tokenizer.chat_template = template
    return tokenizer


class ScriptedGenerate:
    """Answers each request with the next reply, cut to the request's budget; records every request.

    A reply is a list of ids (finish `stop`), or (ids, finish), or a Generation, or an exception to raise, or seconds to sleep before going on.
    Log-probs are -(position + 1) / 1000 and the version is the request's number.
    """

    def __init__(self, replies: Sequence[Any]) -> None:
        self.replies = list(replies)
        self.requests: list[GenerateRequest] = []
        self.sampled: list[list[int]] = []

    async def __call__(self, request: GenerateRequest) -> Generation:
        self.requests.append(request)
        reply = self.replies.pop(0)
        while isinstance(reply, float):
            await asyncio.sleep(reply)
            reply = self.replies.pop(0)
        if isinstance(reply, BaseException):
            raise reply
        if isinstance(reply, Generation):
            self.sampled.append([int(token) for token in reply.token_ids])
            return reply
        ids, finish = reply if isinstance(reply, tuple) else (reply, "stop")
        cap = request.sampling.max_tokens
        if len(ids) > cap:
            ids, finish = ids[:cap], "length"
        self.sampled.append(list(ids))
        start = len(request.token_ids)
        return Generation(
            token_ids=np.asarray(ids, np.int32),
            logprobs=-(np.arange(start, start + len(ids), dtype=np.float32) + 1) / 1000,
            versions=np.full(len(ids), len(self.requests) - 1, np.int32),
            finish=finish,
            engine="scripted",
        )


class ScriptedEnvironment:
    """Answers each step with the next result; a result may be an exception to raise, seconds to sleep, or a function of the action."""

    def __init__(self, results: Sequence[Any] = (), opening: Any = None, tools: Any = (), close_error: Exception | None = None) -> None:
        self.results = list(results)
        self.opening = [{"role": "user", "content": "hello"}] if opening is None else opening
        self.tool_list = tools
        self.close_error = close_error
        self.actions: list[Action] = []
        self.context: Context | None = None
        self.closed = 0

    async def reset(self, context: Context) -> Sequence[Message]:
        self.context = context
        if isinstance(self.opening, Exception):
            raise self.opening
        if isinstance(self.opening, float):
            await asyncio.sleep(self.opening)
        return self.opening

    async def step(self, action: Action) -> StepResult:
        self.actions.append(action)
        result: Any = self.results.pop(0)
        while isinstance(result, float):
            await asyncio.sleep(result)
            result = self.results.pop(0)
        if isinstance(result, BaseException):
            raise result
        return result(action) if isinstance(result, Callable) else result  # type: ignore[arg-type]

    def tools(self) -> Any:
        return self.tool_list

    async def close(self) -> None:
        self.closed += 1
        if self.close_error:
            raise self.close_error


def user(text: str) -> Message:
    return {"role": "user", "content": text}


def say(text: str = "next", reward: float = 0.0, **more: Any) -> StepResult:
    """A step that answers with one user message."""
    return StepResult([user(text)], reward, **more)


DONE = StepResult(reward=1.0, terminated=True)
TASK = Task(task_id="t-1", environment="scripted", payload={}, seed=7, workload="default")
