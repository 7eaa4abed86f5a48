"""Real OpenEnv servers for the tests, run by the interpreter that has openenv-core: `python openenv_server.py PORT`.

/echo takes two sessions at a time, /line four. One process serves both: importing openenv-core takes ten seconds of a core.
"""

from __future__ import annotations

import os
import sys
import time
from typing import Any, Literal

import uvicorn
from fastapi import FastAPI
from openenv.core.env_server import Action, Environment, Observation, State, create_fastapi_app
from pydantic import Field


class Say(Action):
    text: str = Field(description="what to say")


class Move(Action):
    """Move on the line."""

    direction: Literal["left", "right"]
    steps: int = 1


class Heard(Observation):
    text: str = ""


class Place(Observation):
    position: int = 0
    goal: int = 0


class Echo(Environment[Say, Heard, State]):
    """Says back what it hears; `bye` ends it, and some words break it."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        super().__init__()
        self.steps = 0

    def reset(self, seed: int | None = None, episode_id: str | None = None, word: str = "", **kwargs: Any) -> Heard:
        return Heard(text=f"seed {seed} {word}".strip())

    def step(self, action: Say, timeout_s: float | None = None, **kwargs: Any) -> Heard:
        self.steps += 1
        if action.text == "sleep":
            time.sleep(3)
        if action.text == "raise":
            raise RuntimeError("broken inside")
        if action.text == "exit":
            os._exit(3)
        return Heard(text=f"you said {action.text}", reward=0.5, done=action.text == "bye")

    @property
    def state(self) -> State:
        return State(step_count=self.steps)


class Line(Environment[Move, Place, State]):
    """Walk to the goal."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def reset(self, seed: int | None = None, episode_id: str | None = None, **kwargs: Any) -> Place:
        self.position, self.goal = 0, 1 + (seed or 0) % 3
        return Place(position=0, goal=self.goal)

    def step(self, action: Move, timeout_s: float | None = None, **kwargs: Any) -> Place:
        self.position += action.steps if action.direction == "right" else -action.steps
        there = self.position == self.goal
        return Place(position=self.position, goal=self.goal, reward=float(there), done=there)

    @property
    def state(self) -> State:
        return State()


if __name__ == "__main__":
    both = FastAPI()
    both.mount("/echo", create_fastapi_app(Echo, Say, Heard, max_concurrent_envs=2))
    both.mount("/line", create_fastapi_app(Line, Move, Place, max_concurrent_envs=4))
    uvicorn.run(both, port=int(sys.argv[1]), log_level="warning")
