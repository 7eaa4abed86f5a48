"""What the preflight makes of environments: opened as an episode opens them, closed again, and measured with their tools."""

from __future__ import annotations

import asyncio

import pytest

from sao.config import Config, EnvConfig
from sao.environment import Task
from sao.errors import ConfigError
from sao.runtime import preflight
from sao.runtime.preflight import check_openings


class Words:
    """A renderer whose prompt has a token a word, and ten a tool."""

    def open(self, messages, tools):
        return [0] * (sum(len(message["content"].split()) for message in messages) + 10 * len(tools))


class Plain:
    closed = 0

    def __init__(self, task: Task, tools: int = 0, wait_s: float = 0.0) -> None:
        self.task, self.tool_count, self.wait_s = task, tools, wait_s

    async def reset(self, context):
        await asyncio.sleep(self.wait_s)
        assert context.seed == self.task.seed
        return [{"role": "user", "content": self.task.payload["text"]}]

    async def step(self, action): ...

    def tools(self):
        return [{"function": {"name": f"tool{i}"}} for i in range(self.tool_count)]

    async def close(self):
        Plain.closed += 1


class Late(Plain):
    async def reset(self, context):
        raise TimeoutError("the database did not answer")


def check(texts, *, name="Plain", max_tokens=12, max_model_len=0, **args):
    config = Config()
    config.rollout.max_tokens, config.engine.max_model_len = max_tokens, max_model_len
    tasks = [Task(f"t{i}", "mine", {"text": text}, seed=7) for i, text in enumerate(texts)]
    other = Task("o", "other", {"text": "a " * 99})
    check_openings(config, [EnvConfig("mine", f"{__name__}:{name}", args)], [*tasks, other], Words())


def test_what_fits_says_nothing_and_is_closed(capsys):
    Plain.closed = 0
    check(["a", "a b", "a " * 11])
    assert capsys.readouterr().out == "" and Plain.closed == 3


def test_the_tools_count(capsys):
    check(["a"], tools=1)
    with pytest.raises(
        ConfigError, match=r"no prompt .* the shortest of 2 has 12 tokens with rollout.max_tokens=12; raise rollout.max_tokens above 12$"
    ):
        check(["a b", "a b c"], tools=1)


def test_both_limits_are_named_where_both_are_too_low():
    with pytest.raises(ConfigError, match=r"raise rollout.max_tokens and engine.max_model_len above 13"):
        check(["a " * 13], max_model_len=12)
    with pytest.raises(ConfigError, match=r"raise rollout.max_tokens above 13"):
        check(["a " * 13], max_model_len=64)


def test_some_that_do_not_fit_are_counted(capsys):
    check(["a " * 12, "a " * 40, "a"])
    assert "warning: env=mine: 2 of the 3 prompts looked at leave no room for an answer (up to 40 tokens" in capsys.readouterr().out


def test_a_slow_reset_is_a_warning_and_closed(capsys, monkeypatch):
    monkeypatch.setattr(preflight, "RESET_LIMIT_S", 0.05)
    Plain.closed = 0
    check(["a", "b"], wait_s=5.0)
    assert "warning: env=mine: reset took over 0.05 s" in capsys.readouterr().out and Plain.closed == 1


def test_a_time_out_of_its_own_is_an_error_of_the_environment():
    with pytest.raises(ConfigError, match=r"env=mine cannot open task t0 \(TimeoutError: the database did not answer\)"):
        check(["a"], name="Late")


class Program:
    def __init__(self, task): ...

    async def prepare(self): ...

    async def run(self, variables): ...

    async def score(self, messages, output): ...

    async def close(self): ...


@pytest.mark.parametrize(("key", "value"), [("compaction", "summary"), ("observation_tokens", 64), ("observation_keep", "both")])
def test_limits_that_an_agent_program_never_meets_are_refused_where_there_is_nothing_else(key, value):
    config = Config()
    setattr(config.rollout, key, value)
    programs, plain = EnvConfig("mine", f"{__name__}:Program"), EnvConfig("plain", f"{__name__}:Plain")
    with pytest.raises(ConfigError, match=rf"rollout\.{key} does nothing"):
        check_openings(config, [programs], [], Words())
    check_openings(config, [programs, plain], [Task("t", "plain", {"text": "a"}, seed=7)], Words())
