"""The calculator environment: three operands, two operations, and a tool that does one operation a call.

An episode is two calls and an answer. Precedence decides which operation comes first, operands and results have to be copied without a slip, and
a wrong call is answered with an error message the policy can recover from. The reward is 1 exactly when the answer turn is the right number.
"""

from __future__ import annotations

import json
import random
import re
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

from sao.environment import Action, Context, Message, StepResult, Task
from sao.envs.calculator.arithmetic import OperationError, Problem, one_operation
from sao.envs.calculator.demonstrations import script
from sao.errors import ConfigError

SYSTEM = 'Use the calculator, one operation a call. Then say "The answer is" and the number.'
OPERATORS = (("+", "*"), ("*", "+"), ("-", "*"), ("*", "-"), ("+", "-"), ("-", "+"), ("+", "+"))
SCHEMA: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "calculator",
        "parameters": {"type": "object", "properties": {"expression": {"type": "string"}}, "required": ["expression"]},
    },
}
ANSWER = re.compile(r"\s*(?:The answer is)?\s*(-?\d{1,18})\.?\s*", re.ASCII | re.IGNORECASE)
MOST_DRAWS = 10_000
HELD_OUT_SHARE = 10  # one expression in so many belongs to the held-out split


def split_of(expression: str) -> str:
    """`train` or `held_out`: a property of the expression itself, so the two splits are disjoint however tasks are drawn."""
    return "held_out" if zlib.crc32(expression.encode()) % HELD_OUT_SHARE == 0 else "train"


def tool_call(expression: str) -> str:
    """The call of the calculator as the policy writes it (Hermes form)."""
    return "<tool_call>" + json.dumps({"name": "calculator", "arguments": {"expression": expression}}) + "</tool_call>"


class CalculatorEnvironment:
    """`task.payload` is {"expression": "12+34*5"}.

    tool: false makes every call an error, the control that shows the answers come from the tool. operand_min, operand_max: range of
    the operands generated (of equal length by default, so that a question has one shape).
    """

    def __init__(self, task: Task, *, tool: bool = True, operand_min: int = 10, operand_max: int = 99) -> None:
        self.problem = Problem.parse(str(task.payload["expression"]))
        self.tool = tool
        self.calls = 0
        self.errors = 0

    def opening(self) -> list[Message]:
        return [{"role": "system", "content": SYSTEM}, {"role": "user", "content": f"What is {self.problem.expression}?"}]

    def tools(self) -> Sequence[Mapping[str, Any]]:
        return (SCHEMA,)

    async def reset(self, context: Context) -> Sequence[Message]:
        return self.opening()

    async def step(self, action: Action) -> StepResult:
        if action.tool_calls:
            observation: list[Message] = []
            for call in action.tool_calls:
                message: Message = {"role": "tool", "name": call.name, "content": self.call(call.arguments.get("expression"))}
                observation.append({**message, "tool_call_id": call.call_id} if call.call_id else message)
            return StepResult(observation)
        answered = ANSWER.fullmatch(action.text)
        solved = answered is not None and int(answered[1]) == self.problem.answer
        return StepResult(reward=float(solved), terminated=True, info={"calls": self.calls, "errors": self.errors})

    def call(self, expression: object) -> str:
        """Answer one call of the tool: the number, or an error message. Never raises: whatever the policy wrote is its own business."""
        self.calls += 1
        try:
            if not self.tool:
                raise OperationError("unavailable")
            return str(one_operation(expression))
        except OperationError as error:
            self.errors += 1
            return f"error: {error}"

    async def close(self) -> None:
        return None

    @classmethod
    def generate_payload(cls, rng: random.Random, split: str, *, tool: bool = True, operand_min: int = 10, operand_max: int = 99) -> dict[str, Any]:
        """Draw one task of `split` (train | held_out), operands uniform in operand_min..operand_max."""
        if split not in ("train", "held_out"):
            raise ValueError(f"split {split!r} is not train or held_out")
        for _ in range(MOST_DRAWS):
            a, b, c = (rng.randint(operand_min, operand_max) for _ in range(3))
            first, second = rng.choice(OPERATORS)
            expression = f"{a}{first}{b}{second}{c}"
            if split_of(expression) == split:
                return {"expression": expression}
        raise ConfigError(f"env.args.operand_min={operand_min} and operand_max={operand_max} leave no {split} expression; widen the range")

    @classmethod
    def demonstration(cls, rng: random.Random, clean: bool, *, tool: bool = True, operand_min: int = 10, operand_max: int = 99) -> list[Message]:
        """One complete conversation for `sao warmstart`, always with a working tool.

        clean: only right solutions, one in eight with an error and its recovery. Otherwise the mixture of `demonstrations.MIXTURE`.
        """
        payload = cls.generate_payload(rng, "train", operand_min=operand_min, operand_max=operand_max)
        environment = cls(Task("demonstration", "calculator", payload))
        messages = environment.opening()
        *calls, answer = script(environment.problem, rng, clean)
        for expression in calls:
            messages.append({"role": "assistant", "content": tool_call(expression)})
            messages.append({"role": "tool", "name": "calculator", "content": environment.call(expression)})
        return [*messages, {"role": "assistant", "content": f"The answer is {answer}"}]
