"""An agent of the calculator task as its author would write it for OpenAI: the official client, a tool of its own, and no word of how it is trained.

It is the program of `experiment=gateway_demo`, where many episodes run in one process and share a client (`solve`); as a script it plays the one task in
SAO_TASK: `python -m sao.envs.program.calculator_agent`.
"""

from __future__ import annotations

import asyncio
import functools
import json
import operator
import os
import re
from collections.abc import Mapping
from typing import Any

from openai import AsyncOpenAI

SYSTEM = 'Use the calculator, one operation a call. Then say "The answer is" and the number.'
TOOL: Any = {
    "type": "function",
    "function": {
        "name": "calculator",
        "parameters": {"type": "object", "properties": {"expression": {"type": "string"}}, "required": ["expression"]},
    },
}
OPERATIONS = {"+": operator.add, "-": operator.sub, "*": operator.mul}
OPERATION = re.compile(r"\s*(-?\d{1,9})\s*([-+*])\s*(-?\d{1,9})\s*", re.ASCII)
ANSWER = re.compile(r"\s*(?:The answer is)?\s*(-?\d{1,18})\.?\s*", re.ASCII | re.IGNORECASE)


async def solve(row: Mapping[str, Any], variables: Mapping[str, str]) -> str:
    """Play one task, `{"expression": "12+34*5"}`, and return the answer."""
    client = _client(variables["OPENAI_BASE_URL"]).with_options(api_key=variables["OPENAI_API_KEY"])
    messages: list[Any] = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": f"What is {row['expression']}?"}]
    while True:
        completion = await client.chat.completions.create(model=variables["OPENAI_MODEL"], messages=messages, tools=[TOOL])
        message = completion.choices[0].message
        if not message.tool_calls:
            return message.content or ""
        messages.append(message)
        for call in message.tool_calls:
            if call.type == "function":
                messages.append({"role": "tool", "tool_call_id": call.id, "content": calculate(json.loads(call.function.arguments)["expression"])})


def calculate(expression: str) -> str:
    """One operation on two integers, or what is wrong with it."""
    match = OPERATION.fullmatch(expression)
    if match is None:
        return "error: not one operation on two integers"
    left, sign, right = match.groups()
    return str(OPERATIONS[sign](int(left), int(right)))


async def solved(completion: str, row: Mapping[str, Any]) -> float:
    """The reward: 1 when the agent's last words are the right number, else 0."""
    from sao.envs.calculator.arithmetic import Problem

    said = ANSWER.fullmatch(completion)
    return float(said is not None and int(said[1]) == Problem.parse(str(row["expression"])).answer)


@functools.cache
def _client(base_url: str) -> AsyncOpenAI:
    """One connection pool for all episodes of a process."""
    return AsyncOpenAI(base_url=base_url, api_key="set for each episode")


if __name__ == "__main__":
    print(asyncio.run(solve(json.loads(os.environ["SAO_TASK"]), os.environ)))
