"""An environment that holds the event loop all episodes share is noticed and named: method, seconds, line; also when it never lets go."""

from __future__ import annotations

import asyncio
import logging
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from agents_kit import DONE, TASK, ScriptedEnvironment, ScriptedGenerate, say

from sao.agents import held
from sao.agents.limits import Limits
from sao.agents.turns import run_episode
from sao.errors import EnvironmentFailure
from sao.rollout.last_words import last_words
from sao.trajectory import SamplingSpec, Trajectory

NEVER = """
import asyncio, logging, sys, time
from pathlib import Path
from functools import partial
sys.path.insert(0, {kit!r})
from agents_kit import TASK, ScriptedEnvironment, ScriptedGenerate, make_tokenizer
from sao.agents.limits import Limits
from sao.agents.renderer import load_renderer
from sao.agents.turns import run_episode
from sao.rollout.last_words import Recorder, Watch, named
from sao.trajectory import SamplingSpec

logging.basicConfig(stream=sys.stdout, format="%(message)s")

class Stuck(ScriptedEnvironment):
    async def step(self, action):
        while True:
            time.sleep(0.01)

async def main():
    record = Recorder(Path(sys.argv[1]))
    Watch(record).start()
    renderer = load_renderer("chatml", make_tokenizer())
    episode = run_episode(TASK, Stuck(), renderer, ScriptedGenerate([[90, renderer.stop_ids[0]]]), episode_id=(3, 0), admitted_version=0,
        sampling=SamplingSpec(), limits=Limits(), record=partial(record, "train-3.0"))
    await named(episode, "train-3.0", record)

asyncio.run(main())
"""


@pytest.fixture
def brief(monkeypatch) -> None:
    monkeypatch.setattr(held, "BLOCKED_S", 0.05)


def episode(renderer, environment, record=lambda method: None, **limits: Any) -> Trajectory:  # type: ignore[no-untyped-def]
    generate = ScriptedGenerate([[90, renderer.stop_ids[0]]] * 4)
    run = run_episode(
        TASK, environment, renderer, generate, episode_id=(0, 0), admitted_version=0, sampling=SamplingSpec(), limits=Limits(**limits), record=record
    )
    return asyncio.run(run)


def slow(result: Any, seconds: float = 0.1):  # type: ignore[no-untyped-def]
    def answer(action: Any) -> Any:
        time.sleep(seconds)
        return result

    return answer


def test_a_step_that_holds_the_loop_is_named_and_counted(chatml, brief, caplog) -> None:
    with caplog.at_level(logging.WARNING):
        got = episode(chatml, ScriptedEnvironment([slow(say()), slow(say(), 0.001), slow(DONE)]))
    assert 0.2 <= got.metrics["blocked_s"] == got.metrics["blocked_s/scripted"] < 1.0
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == 2 and all(text.startswith("ScriptedEnvironment.step held the event loop for 0.") for text in said)
    assert "environment scripted, task t-1" in said[0] and "asyncio.to_thread" in said[0]


def test_waiting_is_not_holding(chatml, brief) -> None:
    assert "blocked_s" not in episode(chatml, ScriptedEnvironment([0.1, say(), DONE])).metrics


@pytest.mark.parametrize("method", ["reset", "tools", "close"])
def test_every_method_is_watched(chatml, brief, method: str) -> None:
    class Slow(ScriptedEnvironment):
        pass

    def held_up(self: Any, *args: Any) -> Any:
        time.sleep(0.1)
        return getattr(ScriptedEnvironment, method)(self, *args)

    async def held_up_async(self: Any, *args: Any) -> Any:
        return await held_up(self, *args)

    setattr(Slow, method, held_up if method == "tools" else held_up_async)
    heard: list[str] = []
    got = episode(chatml, Slow([DONE]), heard.append)
    assert got.metrics["blocked_s"] >= 0.1
    assert [name for name in heard if name] == [f"Slow.{name}" for name in ("reset", "tools", "step", "close")] and heard[-1] == ""


def test_a_step_over_time_says_that_it_was_its_own_doing(chatml, brief) -> None:
    class Sleeper(ScriptedEnvironment):
        async def step(self, action: Any) -> Any:
            time.sleep(0.2)  # noqa: ASYNC251 - the fault itself
            await asyncio.sleep(5)

    with pytest.raises(EnvironmentFailure, match=r"rollout\.time_limit_s=0\.1\); it held the event loop for 0\.2 s"):
        episode(chatml, Sleeper(), time_limit_s=0.1)


def test_a_step_that_never_lets_go_is_named_while_it_holds_on(tmp_path: Path) -> None:
    """The worker's own log has method, episode and line; the file that outlives it has them for the driver."""
    code = NEVER.format(kit=str(Path(__file__).parent))
    process = subprocess.Popen([sys.executable, "-c", code, str(tmp_path / "file")], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        words = last_words(tmp_path / "file")
    finally:
        process.kill()
        process.wait()
    assert line.startswith("Stuck.step of episode train-3.0 has held the event loop for ") and "in step" in line, line
    assert words.episode == "train-3.0" and words.method == "Stuck.step" and words.seconds >= 0.5
    assert str(last_words(tmp_path / "file")).startswith("it was running Stuck.step of episode train-3.0, for ")
