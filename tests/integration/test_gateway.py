"""Agents we did not write, through the gateway, against a live vLLM: official clients, mini-swe-agent, sub-agents at once, edited history.

The policy is a small model that has learned two conversations by heart, so that it calls tools as it should; what it says is sampled all the same, at
temperature 1, and every log-prob of the resulting rows is held against Hugging Face's.
"""

from __future__ import annotations

import asyncio
import json
import sys

import anthropic
import numpy as np
import openai
import pytest
import torch

from sao.agents.limits import Limits
from sao.agents.renderer import demonstration_tokens, load_renderer
from sao.agents.tokenizer import load_tokenizer
from sao.config import EngineConfig, GatewayConfig, WeightsConfig
from sao.environment import Task
from sao.envs.program.environment import ProgramEnvironment
from sao.gateway.episode import run_program
from sao.gateway.server import Gateway
from sao.gateway.session import Terms
from sao.inference.pool import EnginePool, LocalHandle
from sao.trajectory import EpisodeId, SamplingSpec
from tests.integration.tiny import reference

pytestmark = pytest.mark.integration

ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}, "required": ["a", "b"]},
    },
}
BASH = {
    "type": "function",
    "function": {
        "name": "bash",
        "description": "Execute a bash command",
        "parameters": {
            "type": "object",
            "properties": {"command": {"type": "string", "description": "The bash command to execute"}},
            "required": ["command"],
        },
    },
}


def call(name, **arguments):
    return "<tool_call>" + json.dumps({"name": name, "arguments": arguments}) + "</tool_call>"


def say(role, content):
    return {"role": role, "content": content}


SUM = [
    say("system", "add"),
    say("user", "1+2?"),
    say("assistant", call("add", a=1, b=2)),
    say("tool", "3"),
    say("assistant", "The sum is 3"),
    say("user", "sure?"),
    say("assistant", "yes"),
]
MADE = "<returncode>0</returncode>\n<output>\ndone\n</output>"
MINI = [
    say("system", "You are a helpful assistant that can interact with a computer."),
    say("user", "Make the file."),
    say("assistant", call("bash", command="echo done > made.txt; cat made.txt")),
    say("tool", MADE),
    say("assistant", call("bash", command="echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT")),
]
MINI_AGENT = """
import json, os
from minisweagent.agents.default import DefaultAgent
from minisweagent.environments.local import LocalEnvironment
from minisweagent.models.litellm_model import LitellmModel

agent = DefaultAgent(
    LitellmModel(model_name="openai/" + os.environ["OPENAI_MODEL"], cost_tracking="ignore_errors"), LocalEnvironment(),
    system_template="You are a helpful assistant that can interact with a computer.", instance_template="{{task}}",
)
print(agent.run(json.loads(os.environ["SAO_TASK"])["task"])["exit_status"], open("made.txt").read())
"""


def learn_by_heart(directory):
    """A Llama of 0.1 M parameters that continues the two conversations as they go; its directory is complete."""
    from transformers import LlamaConfig, LlamaForCausalLM

    from sao.learner.tiny import train_tokenizer

    corpus = [f"{message['role']}\n{message['content']}" for message in SUM + MINI] + [json.dumps(t, separators=(",", ":")) for t in (ADD, BASH)]
    train_tokenizer(iter(corpus * 4), 512).save_pretrained(directory)
    renderer = load_renderer("chatml", load_tokenizer(str(directory)))
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(load_tokenizer(str(directory))), hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=2,
            num_key_value_heads=2, head_dim=32, max_position_embeddings=1024, tie_word_embeddings=True, pad_token_id=0, bos_token_id=None, eos_token_id=2,
        )
    ).float()  # fmt: skip
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    examples = [demonstration_tokens(renderer, messages, [tool]) for messages, tool in ((SUM, ADD), (MINI, BASH))]
    for _ in range(120):
        for ids, mask in examples:
            tokens, wanted = torch.tensor([ids]), torch.tensor(mask)
            logits = model(tokens, use_cache=False).logits[0, :-1][wanted[1:]]
            torch.nn.functional.cross_entropy(logits, tokens[0, 1:][wanted[1:]]).backward()
        optimizer.step()
        optimizer.zero_grad()
    model.model.norm.weight.data *= 4  # sure of itself: sampled at temperature 1, it hardly ever strays
    model.eval().save_pretrained(directory)
    return model, renderer


@pytest.fixture(scope="module")
def policy(tmp_path_factory):
    from tests.integration.tiny import start_engine

    directory = tmp_path_factory.mktemp("heart")
    model, renderer = learn_by_heart(directory)
    engine = start_engine(str(directory), EngineConfig(kv_cache_mb=64, start_timeout_s=600.0), WeightsConfig(), name="gateway")
    yield model, renderer, engine
    asyncio.run(engine.close())


def play(policy, program, payload=None, **limits):
    """One episode of a program, and its rows held against Hugging Face."""
    model, renderer, engine = policy

    async def episode():
        pool = EnginePool([LocalHandle(engine, "gateway")])
        gateway = Gateway(GatewayConfig(), renderer, pool.generate, pool.outage_s)
        sampling = SamplingSpec(stop=renderer.stop_ids, max_tokens=96)
        terms = Terms(
            "train-0.0", Task("t", "program", payload or {}), Limits(max_turns=32, max_turn_tokens=96, max_tokens=4000, max_model_len=1024), sampling
        )
        try:
            return await run_program(terms, program, gateway, episode_id=EpisodeId(0), admitted_version=0)
        finally:
            await gateway.close()

    trajectory = asyncio.run(episode())
    for row in trajectory.segments:
        expected = reference(model, row.token_ids[:1], row.token_ids[1:])
        at = np.flatnonzero(row.action_mask)
        assert np.abs(expected[at - 1] - row.logprobs[at]).max() < 5e-4
        assert set(row.versions[at].tolist()) == {0}
    assert sum(t.output_tokens for t in trajectory.timings) == trajectory.sampled_tokens == sum(row.action_tokens for row in trajectory.segments)
    return trajectory


class Agent:
    """A program whose agent is a coroutine function of the variables, worth 1 when it ends."""

    def __init__(self, agent):
        self.agent = agent

    async def prepare(self): ...

    async def run(self, variables):
        return await self.agent(variables)

    async def score(self, messages, output):
        from sao.environment import StepResult

        self.messages = messages
        return StepResult(reward=1.0, terminated=True)

    async def close(self): ...


def texts(policy, trajectory):
    return [policy[1].encoder.decode(row.token_ids.tolist()) for row in trajectory.segments]


def test_openai_clients_async_and_sync_streaming_and_not_extend_one_row(policy):
    async def agent(variables):
        client = openai.AsyncOpenAI(base_url=variables["OPENAI_BASE_URL"], api_key=variables["OPENAI_API_KEY"])
        messages = [*SUM[:2]]
        stream = await client.chat.completions.create(
            model="m", messages=messages, tools=[ADD], stream=True, stream_options={"include_usage": True}, temperature=0.2
        )
        pieces, usage = [], None
        async for chunk in stream:
            pieces += [c for choice in chunk.choices for c in choice.delta.tool_calls or []]
            usage = chunk.usage or usage
        assert pieces[0].function.name == "add" and usage.completion_tokens > 0
        tool_call = {"id": pieces[0].id, "type": "function", "function": {"name": "add", "arguments": '{"b":2, "a":1}'}}
        messages += [
            {"role": "assistant", "content": None, "tool_calls": [tool_call]},
            {"role": "tool", "tool_call_id": pieces[0].id, "content": "3"},
        ]

        def rest():
            with openai.OpenAI(base_url=variables["OPENAI_BASE_URL"], api_key=variables["OPENAI_API_KEY"]) as sync:
                said = sync.chat.completions.create(model="m", messages=messages, tools=[ADD]).choices[0].message
                assert said.content == "The sum is 3"
                again = [*messages, said.model_dump(exclude_none=True), say("user", "sure?")]
                return sync.chat.completions.create(model="m", messages=again, tools=[ADD]).choices[0].message.content

        return await asyncio.to_thread(rest)

    trajectory = play(policy, Agent(agent))
    assert len(trajectory.segments) == 1 and trajectory.metrics["gateway/overridden/temperature"] == 1
    assert texts(policy, trajectory)[0].count("<|im_start|>assistant") == 3


def test_anthropic_client_with_tools_streaming_and_not(policy):
    async def agent(variables):
        client = anthropic.AsyncAnthropic(base_url=variables["ANTHROPIC_BASE_URL"], api_key=variables["ANTHROPIC_API_KEY"])
        tool = {"name": "add", "input_schema": ADD["function"]["parameters"]}
        messages = [say("user", "1+2?")]
        async with client.messages.stream(model="m", max_tokens=96, system="add", messages=messages, tools=[tool]) as stream:
            first = await stream.get_final_message()
        assert first.stop_reason == "tool_use" and first.content[0].input == {"a": 1, "b": 2}
        result = {"type": "tool_result", "tool_use_id": first.content[0].id, "content": "3"}
        messages += [{"role": "assistant", "content": first.content}, {"role": "user", "content": [result]}]
        second = await client.messages.create(model="m", max_tokens=96, system="add", messages=messages, tools=[tool])
        return second.content[0].text

    trajectory = play(policy, Agent(agent))
    (text,) = texts(policy, trajectory)
    assert text.endswith("tool\n3<|im_end|>\n<|im_start|>assistant\nThe sum is 3<|im_end|>")


def test_mini_swe_agent_runs_unmodified_and_its_commands_too(policy):
    program = ProgramEnvironment(
        Task("t", "program", {"task": "Make the file."}),
        command=[sys.executable, "-c", MINI_AGENT],
        reward={"function": f"{__name__}:submitted"},
        scored="output",
        variables={"LITELLM_LOCAL_MODEL_COST_MAP": "True", "MSWEA_SILENT_STARTUP": "1"},
    )
    trajectory = play(policy, program, {"task": "Make the file."})
    assert trajectory.reward == 1.0 and str(trajectory.finish) == "terminal" and len(trajectory.segments) == 1
    assert trajectory.metrics["tool_calls"] == 2 and "done\n</output>" in texts(policy, trajectory)[0]


async def submitted(completion, row):
    return float(completion.split()[-2:] == ["Submitted", "done"])


def test_sub_agents_at_once_and_an_edited_history_make_one_row_a_branch(policy):
    async def agent(variables):
        client = openai.AsyncOpenAI(base_url=variables["OPENAI_BASE_URL"], api_key=variables["OPENAI_API_KEY"])

        async def ask(messages):
            return (await client.chat.completions.create(model="m", messages=messages, tools=[ADD])).choices[0].message

        first = await ask(SUM[:2])
        begun = [*SUM[:2], first.model_dump(exclude_none=True), {"role": "tool", "tool_call_id": first.tool_calls[0].id, "content": "3"}]

        async def sub_agent(number):
            said = await ask(begun)
            return await ask([*begun, say("assistant", said.content), say("user", f"sure? {number}")])

        await asyncio.gather(*map(sub_agent, range(4)))
        edited = [*SUM[:2], say("assistant", "I will not add."), say("user", "sure?")]
        await ask(edited)

    trajectory = play(policy, Agent(agent))
    assert len(trajectory.timings) == 10 and len(trajectory.segments) == 5
    assert [segment.parent is None for segment in trajectory.segments] == [True, False, False, False, False]
    assert trajectory.metrics["gateway/forks"] == 1
