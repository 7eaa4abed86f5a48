"""An episode of an environment without a model: the turn loop's own checks, scripted answers."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from sao.agents.observations import check_messages, check_step, check_tools
from sao.environment import Action, Context, Environment, Message, StepResult, Task, ToolCall


def call(name: str, **arguments: Any) -> Action:
    return Action("", (ToolCall(name, arguments, "call_0"),))


def make(kind: type, payload: dict[str, Any] | None = None, seed: int = 7, /, **args: Any) -> Environment:
    environment: Environment = kind(Task("t-1", "env", payload or {}, seed), **args)
    return environment


def play(environment: Environment, answers: Sequence[str | Action], seed: int = 7) -> tuple[list[Message], list[Any], list[StepResult]]:
    """Opening, tools and the results of the answers up to the end of the episode; closes it, and closes it once more for good measure."""

    async def episode() -> tuple[list[Message], list[Any], list[StepResult]]:
        results: list[StepResult] = []
        try:
            opening = check_messages(await environment.reset(Context(seed=seed)), "reset")
            tools = check_tools(environment.tools(), "tools")
            for answer in answers:
                result = await environment.step(answer if isinstance(answer, Action) else Action(answer))
                results.append(check_step(result, "step"))
                if results[-1].terminated or results[-1].truncated:
                    break
        finally:
            await environment.close()
            await environment.close()
        return opening, tools, results

    return asyncio.run(episode())
