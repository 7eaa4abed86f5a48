"""Maths with a Python tool: the policy may run programs in the episode's sandbox, then gives its answer in a box. The reward is 1 exactly when it is right.

The tool is stateless: each call is a fresh interpreter, without network, under the limits of `env.sandbox`. What a program prints comes back, and the value
of its last line when that is an expression, as in a notebook. A program that fails, hangs or is killed is an answer to the policy, never an error of ours.
"""

from __future__ import annotations

import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from sao.environment import Action, Context, Message, StepResult, Task
from sao.envs.math.environment import MathEnvironment
from sao.envs.math_python.programs import MIXTURE, PROGRAMS, worked
from sao.errors import ConfigError, EnvironmentFailure
from sao.sandbox.protocol import ExecResult, Sandbox

SYSTEM = r"Use the python tool where it helps. Then give the answer in \boxed{}."
SCHEMA: dict[str, Any] = {
    "type": "function",
    "function": {"name": "python", "parameters": {"type": "object", "properties": {"code": {"type": "string"}}, "required": ["code"]}},
}
# Runs what it reads, and shows the value of a last expression. No file is written, so a program can be run where nothing can be.
DRIVER = """
import ast, sys
names = {"__name__": "__main__"}
try:
    body = ast.parse(sys.stdin.read(), "program").body
    last = body.pop() if body and isinstance(body[-1], ast.Expr) else None
    exec(compile(ast.Module(body, []), "program", "exec"), names)
    shown = None if last is None else eval(compile(ast.Expression(last.value), "program", "eval"), names)
    if shown is not None:
        print(shown)
except Exception as error:
    import traceback
    behind = None if isinstance(error, SyntaxError) else error.__traceback__.tb_next
    traceback.print_exception(type(error), error, behind)
    sys.exit(1)
"""


class MathPythonEnvironment(MathEnvironment):
    """`task.payload` is {"question", "answer"}, as in env=math, whose generator and arguments these are.

    timeout_s: of one program. output_chars: kept of what it prints.
    """

    sandbox = True

    def __init__(
        self,
        task: Task,
        *,
        families: Sequence[str] = (),
        level: int | None = None,
        system: str = SYSTEM,
        timeout_s: float = 10.0,
        output_chars: int = 2000,
    ) -> None:
        super().__init__(task, system=system)
        self.timeout_s = timeout_s
        self.output_chars = output_chars
        self.box: Sandbox | None = None
        self.calls = 0
        self.errors = 0

    def tools(self) -> Sequence[Mapping[str, Any]]:
        return (SCHEMA,)

    async def reset(self, context: Context) -> Sequence[Message]:
        self.box = context.sandbox
        return await super().reset(context)

    async def step(self, action: Action) -> StepResult:
        if not action.tool_calls:
            result = await super().step(action)
            return replace(result, info={**result.info, "calls": float(self.calls), "errors": float(self.errors)})
        observation: list[Message] = []
        for call in action.tool_calls:
            message: Message = {"role": "tool", "name": call.name, "content": await self.run(call.arguments.get("code"))}
            observation.append({**message, "tool_call_id": call.call_id} if call.call_id else message)
        return StepResult(observation)

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

    @classmethod
    def levels(
        cls, *, families: Sequence[str] = (), level: int | None = None, system: str = SYSTEM, timeout_s: float = 10.0, output_chars: int = 2000
    ) -> Sequence[int]:
        return super().levels(families=families, level=level)

    @classmethod
    def generate_payload(
        cls,
        rng: random.Random,
        split: str,
        *,
        families: Sequence[str] = (),
        level: int | None = None,
        system: str = SYSTEM,
        timeout_s: float = 10.0,
        output_chars: int = 2000,
    ) -> dict[str, Any]:
        """Draw one problem of `split` (train | held_out)."""
        return super().generate_payload(rng, split, families=families, level=level)

    @classmethod
    def demonstration(
        cls,
        rng: random.Random,
        clean: bool,
        *,
        families: Sequence[str] = (),
        level: int | None = None,
        system: str = SYSTEM,
        timeout_s: float = 10.0,
        output_chars: int = 2000,
    ) -> list[Message]:
        """A conversation for `sao warmstart`: a program, what it printed, the answer. Of the families that have one (`programs.PROGRAMS`).

        Clean ones are right. The others are of mixed quality (`programs.MIXTURE`), so that a policy which imitates them is left with something to learn.
        """
        known = [family for family in families or PROGRAMS if family in PROGRAMS]
        if not known:
            raise ConfigError(f"env.args.families={list(families)}: demonstrations are known of {', '.join(PROGRAMS)}; name one of them")
        payload = cls.generate_payload(rng, "train", families=known, level=level)
        messages = cls(Task("demonstration", "math_python", payload), system=system).messages
        kind = "good" if clean else rng.choices(list(MIXTURE), list(MIXTURE.values()))[0]
        if kind == "no_tool":
            return [*messages, {"role": "assistant", "content": boxed(rng.randint(0, 99))}]
        program, output = worked(payload["family"], payload["question"], rng if kind == "miscopy" else None)
        return [
            *messages,
            {"role": "assistant", "content": tool_call(program)},
            {"role": "tool", "name": "python", "content": output},
            {"role": "assistant", "content": boxed(int(output))},
        ]


def tool_call(code: str) -> str:
    """The call as the policy writes it (Hermes form)."""
    return "<tool_call>" + json.dumps({"name": "python", "arguments": {"code": code}}) + "</tool_call>"


def boxed(answer: int) -> str:
    return f"\\boxed{{{answer}}}"


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
