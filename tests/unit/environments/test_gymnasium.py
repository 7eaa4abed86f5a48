"""Gymnasium environments, the real package's own and ones registered here, played in text."""

from __future__ import annotations

import asyncio
import sys
import threading
from typing import Any, ClassVar

import gymnasium
import numpy as np
import pytest

from sao.config_load import compose
from sao.environment import Action, Context, Task
from sao.environments import gymnasium as adapter
from sao.environments.gymnasium import GymnasiumEnvironment
from sao.environments.threads import Lane, Threads
from sao.errors import ConfigError, EnvironmentFailure
from sao.tasks.source import build_source, check_arguments
from tests.play_kit import make, play

LAKE = {"id": "FrozenLake-v1", "kwargs": {"render_mode": "ansi", "is_slippery": False}, "actions": ["left", "down", "right", "up"]}


class Echo(gymnasium.Env):
    """Says back what it is told; `stop` ends it. Keeps which threads it ran on and how often it was closed."""

    observation_space = gymnasium.spaces.Text(100)
    action_space = gymnasium.spaces.Text(10)
    made: ClassVar[list[Echo]] = []

    def __init__(self) -> None:
        self.threads: set[int] = set()
        self.closed = 0
        self.hold = threading.Event()
        Echo.made.append(self)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        self.threads.add(threading.get_ident())
        return f"seed {seed} options {options}", {}

    def step(self, action: str) -> Any:
        self.threads.add(threading.get_ident())
        if action == "hang":
            self.hold.wait(30)
        if action == "old":
            return "x", 0.0, True, {}
        if action == "iterate":
            raise StopIteration
        if action == "exit":
            raise SystemExit(3)
        return f"you said {action}", np.float32(0.5), action == "stop", False, {"length": np.int64(len(action)), "note": "text"}

    def close(self) -> None:
        self.closed += 1


gymnasium.register("sao-test/Echo-v0", entry_point=Echo)
ECHO = {"id": "sao-test/Echo-v0", "kwargs": {"disable_env_checker": True}}


def test_a_way_over_the_ice_is_worth_one():
    opening, tools, results = play(make(GymnasiumEnvironment, **LAKE), ["down", "Down", "2", "I go\nright.", "down", "right"])
    assert opening == [{"role": "user", "content": "[S]FFF\nFHFH\nFFFH\nHFFG\nAnswer with one of: left, down, right, up."}]
    assert tools == [] and results[0].observation[0]["content"] == "  (Down)\nSFFF\n[F]HFH\nFFFH\nHFFG"
    assert [r.reward for r in results] == [0, 0, 0, 0, 0, 1] and [r.terminated for r in results] == [False] * 5 + [True]
    assert results[-1].info["prob"] == 1.0


def test_what_is_no_action_is_answered_and_steps_nothing():
    _, _, results = play(make(GymnasiumEnvironment, **LAKE), ["fly", "4", "-1", "", "<think>up</think>", "<think>left</think>down"])
    assert [r.info["ill_formed"] for r in results] == [1, 2, 3, 4, 5, 5]
    assert results[0].observation[0]["content"] == "error: 'fly' is no action. Answer with one of: left, down, right, up."
    assert "[F]HFH" in results[-1].observation[0]["content"]


def test_the_seed_is_the_episodes_and_observations_are_plain():
    def game(seed: int) -> str:
        return str(play(make(GymnasiumEnvironment, id="Blackjack-v1"), ["0"], seed)[0][-1]["content"])

    assert game(3) == game(3) and "np." not in game(3) and len({game(seed) for seed in range(6)}) > 1
    assert game(3).endswith("Answer with a number from 0 to 1.")


def test_a_truncated_episode_is_truncated():
    _, _, results = play(make(GymnasiumEnvironment, id="Taxi-v4", kwargs={"max_episode_steps": 2}), ["0", "1", "2"])
    assert [(r.terminated, r.truncated) for r in results] == [(False, False), (False, True)]


@pytest.mark.parametrize(
    ("space", "text", "value"),
    [
        (gymnasium.spaces.Box(-1, 1, (2,)), "[0.5, -1]", np.array([0.5, -1], np.float32)),
        (gymnasium.spaces.MultiDiscrete([2, 3]), "[1, 2]", np.array([1, 2])),
        (gymnasium.spaces.MultiBinary(3), "[0, 1, 1]", np.array([0, 1, 1], np.int8)),
        (gymnasium.spaces.Discrete(2, start=5), "6", 6),
    ],
)
def test_other_spaces_are_read_as_json(space, text, value):
    assert np.array_equal(adapter.read_action(text, space, ()), value)
    for wrong in ("", "[9, 9, 9]", '{"a": 1}', "[[", "null", "[1e999]"):
        with pytest.raises(adapter.NotAnAction):
            adapter.read_action(wrong, space, ())


def test_text_passes_through_and_the_environment_never_runs_on_the_event_loop():
    environment = make(GymnasiumEnvironment, {"options": {"level": 2}}, **ECHO)
    opening, _, results = play(environment, ["hi", "hello there, all", "stop"])
    assert opening[-1]["content"] == "seed 7 options {'level': 2}"
    assert [r.reward for r in results] == [0.5, 0.0, 0.5] and results[0].info["length"] == 2
    made = Echo.made[-1]
    assert threading.get_ident() not in made.threads and made.closed == 1


def test_opening_messages_of_a_row_come_first():
    opening, _, _ = play(make(GymnasiumEnvironment, {"_messages": [{"role": "user", "content": "Play."}]}, **ECHO), [])
    assert opening == [{"role": "user", "content": "Play.\nseed 7 options None"}]


@pytest.mark.parametrize(("said", "match"), [("old", "five values, returned 4 values"), ("iterate", "StopIteration"), ("exit", "SystemExit")])
def test_a_broken_step_is_a_typed_failure(said, match):
    with pytest.raises(EnvironmentFailure, match=match):
        play(make(GymnasiumEnvironment, **ECHO), [said])
    assert Echo.made[-1].closed == 1


def test_a_step_that_never_returns_is_abandoned_counted_and_closed_when_it_does():
    async def episode() -> None:
        environment = GymnasiumEnvironment(Task("t-1", "env", {}), **ECHO)
        environment._lane = Lane(threads := Threads(1))
        await environment.reset(Context())
        made = Echo.made[-1]
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(environment.step(Action("hang")), 0.05)
        assert threads.abandoned == 1
        await asyncio.wait_for(environment.close(), 1)
        assert made.closed == 0
        with pytest.raises(EnvironmentFailure, match="never returned"):
            await Lane(threads).run(lambda: None)
        made.hold.set()
        while threads.abandoned:  # noqa: ASYNC110 - a thread's doing
            await asyncio.sleep(0.005)
        assert await Lane(threads).run(lambda: 5) == 5 and made.closed == 1

    asyncio.run(episode())


def test_a_close_that_is_given_up_before_it_starts_still_runs():
    async def main() -> None:
        threads, hold, closed = Threads(1), threading.Event(), threading.Event()
        first = asyncio.create_task(Lane(threads).run(lambda: hold.wait(30)))
        await asyncio.sleep(0.05)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05):
                await Lane(threads).close(closed.set)
        assert not closed.is_set()
        hold.set()
        await first
        assert await Lane(threads).run(lambda: closed.wait(5)) and threads.abandoned == 0

    asyncio.run(main())


def test_a_close_that_never_returns_is_counted():
    async def main() -> None:
        threads, hold = Threads(1), threading.Event()
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.1):
                await Lane(threads).close(lambda: hold.wait(30) and None)
        assert threads.abandoned == 1
        hold.set()

    asyncio.run(main())


def test_a_call_that_is_given_up_before_it_starts_never_runs():
    async def scenario() -> None:
        threads, hold, ran = Threads(1), threading.Event(), []
        first = asyncio.create_task(Lane(threads).run(lambda: hold.wait(30)))
        await asyncio.sleep(0.01)
        second = asyncio.create_task(Lane(threads).run(lambda: ran.append(1)))
        await asyncio.sleep(0.01)
        second.cancel()
        await asyncio.gather(second, return_exceptions=True)
        hold.set()
        assert await first
        await Lane(threads).run(lambda: None)
        assert ran == [] and threads.abandoned == 0

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("args", "match"),
    [
        ([], "needs env.args.id=ID"),
        (["env.args.id=Nothing-v9"], "env.args.id=Nothing-v9 could not be made .*NameNotFound"),
        (["env.args.make=os:sep"], "env.args.make=os:sep could not be made"),
        (["env.args.make=os:getcwd"], "made a str, which is no Gymnasium environment"),
        (["env.args.id=FrozenLake-v1", "env.args.actions=[a,b]"], "has 2 names, but the space has 4 actions"),
        (["env.args.id=CartPole-v1", "env.args.wrong=1"], "takes other arguments"),
    ],
)
def test_mistakes_are_refused_at_the_door(args, match):
    config = compose(["env=gymnasium", "model.path=m", *args])
    with pytest.raises(ConfigError, match=match):
        check_arguments(config.env, config.reward)


def test_without_the_package_one_sentence_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "gymnasium", None)
    with pytest.raises(ConfigError, match=r"install it with `pip install 'sao-rl\[gymnasium\]'`"):
        GymnasiumEnvironment.check_args(id="FrozenLake-v1")


def test_tasks_are_seeds_without_end():
    config = compose(["env=gymnasium", "env.args.id=Blackjack-v1", "model.path=m"])
    source = build_source(config, [config.env])
    tasks = [source.next() for _ in range(4)] + source.held_out(4)
    assert source.length is None and len({task.seed for task in tasks}) == 8
