"""Maths with a Python tool: the policy may run programs in the episode's sandbox, then gives its answer in a box. The reward is 1 exactly when it is right.

The tool is stateless: each call is a fresh interpreter, without network, under the limits of `env.sandbox`. What a program prints comes back, and the value
of its last line when that is an expression, as in a notebook. A program that fails, hangs or is killed is an answer to the policy, never an error of ours.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Mapping, Sequence
from typing import Any

from sao.environment import Action, Context, Message, StepResult, Task
from sao.envs.arithmetic.expressions import OPERATORS, draw, split_of, value
from sao.errors import ConfigError, EnvironmentFailure
from sao.evals.symbolic import close_shared, grade
from sao.sandbox.protocol import ExecResult, Sandbox

SYSTEM = "Use the python tool where it helps. Then give the answer in \\boxed{}."
SCHEMA: dict[str, Any] = {
    "type": "function",
    "function": {"name": "python", "parameters": {"type": "object", "properties": {"code": {"type": "string"}}, "required": ["code"]}},
}
# Runs what it reads, and shows the value of a last expression. No file is written, so a program can be run where nothing can be.
DRIVER = """
import ast, sys, traceback
names = {"__name__": "__main__"}
try:
    body = ast.parse(sys.stdin.read(), "program").body
    last = body.pop() if body and isinstance(body[-1], ast.Expr) else None
    exec(compile(ast.Module(body, []), "program", "exec"), names)
    shown = None if last is None else eval(compile(ast.Expression(last.value), "program", "eval"), names)
    if shown is not None:
        print(shown)
except Exception as error:
    behind = None if isinstance(error, SyntaxError) else error.__traceback__.tb_next
    traceback.print_exception(type(error), error, behind)
    sys.exit(1)
"""
MOST_DRAWS = 10_000


class MathPythonEnvironment:
    """`task.payload` is {"problem": "...", "answer": "413"}.

    timeout_s: of one program. output_chars: kept of what it prints. operands, operand_min, operand_max, operators: of the problems generated, which are
    expressions too long to work out in the head; sets of real problems come by `sao eval aime tool=python data=...` or as rows with both columns.
    """

    sandbox = True

    def __init__(
        self,
        task: Task,
        *,
        timeout_s: float = 10.0,
        output_chars: int = 2000,
        operands: int = 3,
        operand_min: int = 10,
        operand_max: int = 99,
        operators: str = OPERATORS,
    ) -> None:
        self.problem = str(task.payload["problem"])
        self.gold = str(task.payload["answer"])
        self.timeout_s = timeout_s
        self.output_chars = output_chars
        self.box: Sandbox | None = None
        self.calls = 0
        self.errors = 0

    def opening(self) -> list[Message]:
        return [{"role": "system", "content": SYSTEM}, {"role": "user", "content": self.problem}]

    def tools(self) -> Sequence[Mapping[str, Any]]:
        return (SCHEMA,)

    async def reset(self, context: Context) -> Sequence[Message]:
        self.box = context.sandbox
        return self.opening()

    async def step(self, action: Action) -> StepResult:
        if action.tool_calls:
            observation: list[Message] = []
            for call in action.tool_calls:
                message: Message = {"role": "tool", "name": call.name, "content": await self.run(call.arguments.get("code"))}
                observation.append({**message, "tool_call_id": call.call_id} if call.call_id else message)
            return StepResult(observation)
        verdict = await grade(action.text, self.gold)
        counts = {"calls": self.calls, "errors": self.errors, "unparseable": float(verdict.kind == "unparseable")}
        return StepResult(reward=float(bool(verdict)), terminated=True, info=counts)

    async def run(self, code: object) -> str:
        """What a program says. Raises SandboxFailure when the sandbox could not do its work."""
        self.calls += 1
        if not isinstance(code, str):
            self.errors += 1
            return "error: code must be a string"
        if self.box is None:
            raise EnvironmentFailure("math_python was given no sandbox to run programs in")
        result = await self.box.exec(["python3", "-I", "-c", DRIVER], timeout_s=self.timeout_s, stdin=code.encode(errors="replace"))
        self.errors += result.rc != 0 or result.timed_out
        return said(result, self.timeout_s, self.output_chars)

    async def close(self) -> None:
        """The sandbox is the episode's, which closes it."""

    @classmethod
    async def shutdown(cls) -> None:
        """End the graders of this worker; called once, after its last episode."""
        await asyncio.to_thread(close_shared)

    @classmethod
    def generate_payload(
        cls,
        rng: random.Random,
        split: str,
        *,
        timeout_s: float = 10.0,
        output_chars: int = 2000,
        operands: int = 3,
        operand_min: int = 10,
        operand_max: int = 99,
        operators: str = OPERATORS,
    ) -> dict[str, Any]:
        """Draw one task of `split` (train | held_out)."""
        if split not in ("train", "held_out"):
            raise ValueError(f"split {split!r} is not train or held_out")
        if operands < 2 or not 0 <= operand_min <= operand_max or not operators or set(operators) - set(OPERATORS):
            raise ConfigError(f"env.args: at least 2 operands, 0 <= operand_min <= operand_max, and operators out of {OPERATORS}")
        for _ in range(MOST_DRAWS):
            expression = draw(rng, operands, operand_min, operand_max, operators)
            if split_of(expression) == split:
                return {"problem": f"What is {expression}?", "answer": str(value(expression))}
        raise ConfigError(f"env.args.operand_min={operand_min} and operand_max={operand_max} leave no {split} expression; widen the range")


def said(result: ExecResult, timeout_s: float, most: int) -> str:
    """The tool's message: the output, cut in its middle, and how the program ended where it did not end well."""
    text = result.text.strip()
    if len(text) > most:
        text = f"{text[: most // 2]}\n[... {len(text) - most} characters ...]\n{text[len(text) - most // 2 :]}"
    if result.timed_out:
        return f"{text}\nerror: it ran for more than {timeout_s:g} s".strip()
    if result.killed_by:
        return f"{text}\nerror: it was ended: {result.killed_by}".strip()
    return text or ("(no output)" if result.rc == 0 else f"error: exit code {result.rc}")
