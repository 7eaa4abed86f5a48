"""An episode worker plays agent programs as it plays environments: same requests, same trajectories, same failures."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import openai
import pytest
from agents_kit import make_tokenizer
from gateway_kit import RENDERER

from sao.config import Config, EngineConfig, EnvConfig, ModelConfig, RolloutConfig
from sao.config_load import check
from sao.environment import StepResult, Task
from sao.errors import ConfigError, EngineFailure
from sao.inference.pool import LocalHandle
from sao.inference.scripted import ScriptedEngine
from sao.ledger import Ledger
from sao.rollout.episodes import EpisodeFailure, EpisodeRequest
from sao.rollout.worker import EpisodeWorker
from sao.tasks.target import is_program, load_environment
from sao.trajectory import EpisodeId


class Chatter:
    """Two turns with the official client; worth the number of messages."""

    def __init__(self, task):
        self.task = task

    async def prepare(self): ...

    async def run(self, variables):
        async with openai.AsyncOpenAI(base_url=variables["OPENAI_BASE_URL"], api_key=variables["OPENAI_API_KEY"], max_retries=0) as client:
            messages = [{"role": "user", "content": self.task.payload["say"]}]
            for _ in range(2):
                answer = await client.chat.completions.create(model="m", messages=messages, temperature=1.0)
                messages += [answer.choices[0].message.model_dump(exclude_none=True), {"role": "user", "content": "go on"}]

    async def score(self, messages, output):
        return StepResult(reward=float(len(messages)), terminated=True, info={"words": 2})

    async def close(self): ...


@pytest.fixture(scope="module")
def model_path(tmp_path_factory):
    path = tmp_path_factory.mktemp("model")
    make_tokenizer().save_pretrained(path)
    return str(path)


def run(model_path, *requests, engine=None, environment="Chatter"):
    async def play():
        engines = [LocalHandle(engine or ScriptedEngine("e0", version=5, vocabulary=400), "e0")]
        rollout, engine_config = RolloutConfig(max_turn_tokens=32, max_tokens=512, time_limit_s=20.0), EngineConfig(start_timeout_s=0.1)
        config = replace(Config(), model=ModelConfig(path=model_path), rollout=rollout, engine=engine_config)
        worker = EpisodeWorker(config, [EnvConfig(name="chat", target=f"{__name__}:{environment}")], model_path, engines)
        outcomes = await asyncio.gather(*(worker.run(request) for request in requests))
        await worker.close()
        return outcomes

    return asyncio.run(play())


def request(ordinal, **more):
    return EpisodeRequest(EpisodeId(ordinal), Task(f"t{ordinal}", "chat", {"say": f"hello {ordinal}"}), 5, **more)


def test_programs_of_one_worker_play_at_once_for_training_and_for_evaluation(model_path):
    greedy = request(7, purpose="eval", temperature=0.0, pinned=True)
    outcomes = run(model_path, *map(request, range(6)), greedy)
    for ordinal, (finished, trajectory) in enumerate(outcomes):
        assert str(finished.meta.episode_id) == f"{(*range(6), 7)[ordinal]}.0" and str(finished.meta.finish) == "terminal"
        assert finished.meta.reward == 4.0 and finished.meta.turns == 2 and finished.meta.oldest_version == 5
        assert finished.meta.metrics["env/words"] == 2.0 and finished.meta.metrics["gateway/requests"] == 2.0
        text = RENDERER.encoder.decode(trajectory.segments[0].token_ids.tolist())
        assert len(trajectory.segments) == 1 and text.startswith(f"<|im_start|>user\nhello {trajectory.episode_id.ordinal}<|im_end|>")
    assert outcomes[-1][1].segments[0].sampling.temperature == 0.0
    assert outcomes[-1][1].metrics["gateway/overridden/temperature"] == 2.0


def test_a_pin_that_no_engine_honours_is_the_engines_failure(model_path):
    ((failure, _),) = run(model_path, replace(request(0, pinned=True), version=4))
    assert isinstance(failure, EpisodeFailure) and failure.reason == "engine" and "pinned" in failure.message


def test_an_engine_that_breaks_in_the_second_turn_costs_what_the_first_sampled(model_path):
    def fault(generate, sampled):
        if generate.request_id.endswith("/1"):
            raise EngineFailure("out of order")

    ((failure, trajectory),) = run(model_path, request(0), engine=ScriptedEngine("e0", version=5, vocabulary=400, fault=fault, stop_one_in=10**9))
    assert failure.reason == "engine" and failure.tokens == trajectory.sampled_tokens > 0


class Stopper(Chatter):
    """One turn with a stop string; worth 1, or broken afterwards."""

    async def run(self, variables):
        async with openai.AsyncOpenAI(base_url=variables["OPENAI_BASE_URL"], api_key=variables["OPENAI_API_KEY"], max_retries=0) as client:
            for _ in range(2):
                await client.chat.completions.create(model="m", messages=[{"role": "user", "content": "hello"}], stop=list("aeiostn"))
        if self.task.payload["say"] == "break":
            raise ValueError("broken")


@pytest.mark.parametrize("say", ["hello", "break"])
def test_tokens_after_a_stop_string_are_dropped_by_that_name_and_the_ledger_closes(model_path, say):
    tokens = []
    engine = ScriptedEngine("e0", version=5, vocabulary=400, fault=lambda generate, sampled: tokens.append(sampled))
    asked = EpisodeRequest(EpisodeId(0), Task("t0", "chat", {"say": say}), 5)
    ((outcome, trajectory),) = run(model_path, asked, engine=engine, environment="Stopper")
    sampled, kept = len(tokens), trajectory.sampled_tokens
    assert 0 < kept < sampled
    ledger = Ledger()
    ledger.submit(EpisodeId(0), "t0", "chat", "default", 5)
    if say == "break":
        ledger.drop(EpisodeId(0), outcome.reason, outcome.tokens)
        assert ledger.dropped_tokens == {"environment": sampled}
    else:
        ledger.finish(outcome.meta)
        assert ledger.dropped_tokens == {"after_stop": sampled - kept}
    audit = ledger.audit()
    assert audit["closes"] and audit["tokens"]["sampled"] == sampled and not audit["prompts"]["dropped"].get("after_stop")


def test_a_class_that_runs_is_held_to_the_protocol_of_a_program():
    assert is_program(load_environment(f"{__name__}:Chatter"))
    with pytest.raises(ConfigError, match="not an agent program: it has no score"):
        load_environment(f"{__name__}:Half")


class Half:
    prepare = close = run = Chatter.run


def test_a_program_without_a_score_is_refused_before_anything_starts():
    config = replace(Config(), model=ModelConfig(path="m"), env=EnvConfig(name="program", target="sao.envs.program.environment:ProgramEnvironment"))
    with pytest.raises(ConfigError, match="set reward="):
        check(config)
    config.gateway.sampling = "ignore"
    with pytest.raises(ConfigError, match=r"gateway\.sampling"):
        check(config)
