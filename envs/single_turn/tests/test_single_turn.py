"""One prompt, one answer, one score."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from sao.config import Config, EnvConfig
from sao.environment import Action, Context, Environment, Task
from sao.envs.single_turn.environment import SingleTurnEnvironment
from sao.errors import ConfigError, RewardFailure
from sao.rewards.preflight import check_rewards
from sao.rewards.runner import close_shared, shared_metrics
from sao.tasks.source import build_source, environment_args, load_environment

EXACT = {"function": "sao.rewards.builtin:exact_match"}


@pytest.fixture(autouse=True)
def no_process_stays() -> Iterator[None]:
    yield
    close_shared()


def test_from_a_file_to_a_score(tmp_path: Path) -> None:
    path = tmp_path / "tasks.jsonl"
    path.write_text("".join(json.dumps({"question": f"{n}+{n}?", "answer": str(2 * n)}) + "\n" for n in range(3)))
    config = Config()
    config.data.path, config.data.prompt_column = str(path), "question"
    config.reward.function = EXACT["function"]
    task = build_source(config, [config.env]).next()

    async def episode(text: str) -> float:
        environment = load_environment(config.env.target)(task, **environment_args(config.env, config.reward))
        assert isinstance(environment, Environment)
        assert list(await environment.reset(Context())) == [{"role": "user", "content": task.payload["question"]}]
        result = await environment.step(Action(text))
        await environment.close()
        assert result.terminated and not result.observation and not environment.tools()
        return result.reward

    assert asyncio.run(episode(str(task.payload["answer"]))) == 1.0
    assert asyncio.run(episode("no")) == 0.0


def test_the_reward_sees_the_row_as_it_is_in_the_file() -> None:
    row = {"prompt": [{"role": "user", "content": "2+2?"}], "answer": "4"}
    environment = SingleTurnEnvironment(Task("t", "single_turn", {**row, "_messages": row["prompt"]}), reward=EXACT)
    assert environment.row == row


def test_a_system_message_is_added_only_where_there_is_none() -> None:
    plain = SingleTurnEnvironment(Task("t", "single_turn", {"prompt": "2+2?"}), reward=EXACT, system="Be brief.")
    assert [message["role"] for message in plain.messages] == ["system", "user"]
    own = [{"role": "system", "content": "Think."}, {"role": "user", "content": "2+2?"}]
    assert SingleTurnEnvironment(Task("t", "single_turn", {"prompt": own}), reward=EXACT, system="Be brief.").messages == own


def test_a_failing_reward_is_a_failure_and_not_a_zero() -> None:
    environment = SingleTurnEnvironment(Task("t", "single_turn", {"prompt": "2+2?"}), reward=EXACT)
    with pytest.raises(RewardFailure) as caught:
        asyncio.run(environment.step(Action("4")))
    assert caught.value.reason == "reward_raised"


def test_bad_reward_settings_are_one_sentence() -> None:
    with pytest.raises(ConfigError, match=r"reward\.function is empty"):
        SingleTurnEnvironment(Task("t", "single_turn", {"prompt": "2+2?"}), reward={})
    with pytest.raises(ConfigError, match=r"env\.args\.reward has the unknown key 'timeout'; the keys are function, mode"):
        SingleTurnEnvironment(Task("t", "single_turn", {"prompt": "2+2?"}), reward={**EXACT, "timeout": 3})


def test_the_preflight_checks_the_reward_of_every_environment_that_takes_one() -> None:
    config = Config()
    calculator = EnvConfig("calculator", "sao.envs.calculator.environment:CalculatorEnvironment")
    check_rewards([calculator], config.reward)
    with pytest.raises(ConfigError, match=r"env=single_turn: reward\.function is empty"):
        check_rewards([calculator, config.env], config.reward)
    config.env.args = {"reward": EXACT}
    check_rewards([calculator, config.env], config.reward)


def test_shutdown_ends_the_processes_of_the_worker() -> None:
    environment = SingleTurnEnvironment(Task("t", "single_turn", {"prompt": "2+2?", "answer": "4"}), reward=EXACT)

    async def episode() -> None:
        assert (await environment.step(Action("4"))).reward == 1.0
        assert shared_metrics()["reward/scored"] == 1.0
        await SingleTurnEnvironment.shutdown()

    asyncio.run(episode())
    assert shared_metrics() == {}
