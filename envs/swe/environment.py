"""SWE tasks: a repository with a bug, a statement of what fails, and the project's own tests as the judge. Held out by package.

actions=bash: one command a turn in the sandbox, stateless, as mini-swe-agent has it; `echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT` hands the work in. The diff is
taken from outside and graded in a second, clean sandbox. actions=edit, for very small models: some lines around the bug are shown with their numbers, and the
policy changes one. The reward is 1 exactly when the patch resolves the task.
"""

from __future__ import annotations

import random
import zlib
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from sao.environment import Action, Context, Message, StepResult, Task
from sao.envs.swe.actions import BASH, SENTINEL, Edit, read_command, read_edit, shown, submission
from sao.errors import ConfigError, EnvironmentFailure
from sao.sandbox.protocol import Sandbox, SandboxSpec
from sao.swe.grading import Verdict, grade_in
from sao.swe.patches import changed_line
from sao.swe.repo import HELD_OUT, TASKS, TRAIN, SweTask, ids_by_split, read_task
from sao.swe.workspace import build, changes, handed_out, workspace_spec

SYSTEM = "You mend software. Each turn, write what you think and exactly one command in a ```bash block; its output is the answer."
RULES = f"""The repository is the working directory. Every command runs in a new shell. Change the source, not the tests.
When the work is done, hand it in with a command of its own:

```bash
echo {SENTINEL}
```"""
FORMAT_ERROR = "Nothing was run: write exactly one command, in one ```bash block."
EDIT_ERROR = "Nothing was changed: write `replace line N: TEXT` or `in line N: OLD => NEW`, for a line of the file."
SPLITS = {"train": TRAIN, "held_out": HELD_OUT}


class SweEnvironment:
    """`task.payload` is {"instance_id"}: a task of the repository `repo`.

    actions: bash or edit. tool: bash as a tool call instead of a fenced block. timeout_s: of one command. context: lines shown above and below the bug with
    actions=edit (where the window starts varies). statement: with actions=edit, whether the statement comes before them. graded: false leaves the
    patch ungraded and hands it back as the last message, which is what `sao eval swebench` wants.
    """

    sandbox = True

    def __init__(
        self,
        task: Task,
        *,
        repo: str = "runs/swe-tasks",
        actions: str = "bash",
        tool: bool = False,
        timeout_s: float = 30.0,
        context: int = 2,
        statement: bool = True,
        graded: bool = True,
    ) -> None:
        if actions not in ("bash", "edit"):
            raise ConfigError(f"env.args.actions={actions} is neither bash nor edit")
        self.task = load(repo, str(task.payload["instance_id"]))
        self.actions, self.tool, self.timeout_s, self.context, self.statement, self.graded = actions, tool, timeout_s, context, statement, graded
        self.box: Sandbox | None = None
        self.base: Sandbox | None = None
        self.commands = 0

    @staticmethod
    def extend_spec(spec: SandboxSpec) -> SandboxSpec:
        return workspace_spec(spec)

    def tools(self) -> Sequence[Mapping[str, Any]]:
        return (BASH,) if self.tool and self.actions == "bash" else ()

    async def reset(self, context: Context) -> Sequence[Message]:
        if context.sandbox is None:
            raise EnvironmentFailure("swe was given no sandbox to work in")
        self.box = context.sandbox
        await build(self.box, self.task)
        if self.actions == "edit":
            return opening_of_edit(self.task, self.context, self.statement)
        self.base = await self.box.fork()
        return [{"role": "system", "content": SYSTEM}, {"role": "user", "content": f"{self.task.statement}\n{RULES}"}]

    async def step(self, action: Action) -> StepResult:
        assert self.box is not None
        if self.actions == "edit":
            return await self._edit(action)
        command = read_command(action)
        if command is None:
            return StepResult([self._answer(action, FORMAT_ERROR)])
        self.commands += 1
        result = await self.box.exec(command, timeout_s=self.timeout_s)
        handed_in = submission(result)
        if handed_in is None:
            return StepResult([self._answer(action, shown(result, self.timeout_s))])
        assert self.base is not None
        patch = handed_in if b"diff --git " in handed_in else await changes(self.box, self.base)
        return await self._judged(action, patch, self.base)

    async def _edit(self, action: Action) -> StepResult:
        assert self.box is not None
        edit = read_edit(action.text)
        path = str(self.task.mutation["path"])
        before = handed_out(self.task, path)
        after = edit.apply(before) if edit else None
        if edit is None or after is None:
            return StepResult([self._answer(action, EDIT_ERROR)])
        patch = changed_line(path, before, after, edit.line) if after != before else b""
        return await self._judged(action, patch, self.box)

    async def _judged(self, action: Action, patch: bytes, clean: Sandbox) -> StepResult:
        """clean: holds the repository as handed out, and no command of the policy ever ran in it."""
        if not self.graded:
            return StepResult([self._answer(action, patch.decode("utf-8", "replace"))], terminated=True)
        verdict = await grade_in(clean, self.task, patch)
        return StepResult(reward=float(verdict.resolved), terminated=True, info=figures(verdict, self.commands))

    def _answer(self, action: Action, text: str) -> Message:
        if not action.tool_calls:
            return {"role": "user", "content": text}
        call = action.tool_calls[0]
        message: Message = {"role": "tool", "name": call.name, "content": text}
        return {**message, "tool_call_id": call.call_id} if call.call_id else message

    async def close(self) -> None:
        if self.base is not None:
            await self.base.close()

    @classmethod
    def generate_payload(cls, rng: random.Random, split: str, *, repo: str = "runs/swe-tasks", **_: Any) -> dict[str, Any]:
        """Draw one task of `split` (train | held_out). Raises ConfigError when the repository has none."""
        found = by_split(repo).get(SPLITS[split], [])
        if not found:
            raise ConfigError(f"env.args.repo={repo} has no {split} task; make some with `sao env make swe`")
        return {"instance_id": rng.choice(found)}

    @classmethod
    def demonstration(
        cls,
        rng: random.Random,
        clean: bool,
        *,
        repo: str = "runs/swe-tasks",
        actions: str = "bash",
        context: int = 2,
        statement: bool = True,
        **_: Any,
    ) -> list[Message]:
        """A conversation of `actions=edit` for `sao warmstart`: right when clean, else right half of the time."""
        if actions != "edit":
            raise ConfigError("a warm start on env=swe needs env.args.actions=edit; for actions=bash name a model that can already write commands")
        task = load(repo, cls.generate_payload(rng, "train", repo=repo)["instance_id"])
        right = right_edit(task)
        said = right if clean or rng.random() < 0.5 else wrong_edit(task, right, context, rng)
        return [*opening_of_edit(task, context, statement), {"role": "assistant", "content": said}]


@lru_cache(maxsize=1024)
def load(repo: str, instance_id: str) -> SweTask:
    return read_task(Path(repo).expanduser() / TASKS / instance_id)


@lru_cache(maxsize=8)
def by_split(repo: str) -> dict[str, list[str]]:
    return ids_by_split(Path(repo).expanduser())


def figures(verdict: Verdict, commands: int) -> dict[str, float]:
    """What an episode reports beside its reward."""
    return {f"verdict/{verdict.verdict}": 1.0, "commands": float(commands), "grading_s": verdict.seconds}


def window(task: SweTask, context: int) -> tuple[int, int]:
    """First and last line shown, from 1: 2 * context + 1 lines, the bug somewhere among them, always in the same place for one task."""
    size = 2 * context + 1
    above = zlib.crc32(task.instance_id.encode()) % size
    first = max(1, int(task.mutation["line"]) - above)
    return first, first + size - 1


def opening_of_edit(task: SweTask, context: int, statement: bool) -> list[Message]:
    lines = handed_out(task, str(task.mutation["path"])).decode("utf-8", "replace").splitlines()
    first, last = window(task, context)
    listing = "\n".join(
        f"{number}: {lines[number - 1].strip() if context == 0 else lines[number - 1]}" for number in range(first, min(last, len(lines)) + 1)
    )
    return [{"role": "user", "content": f"{task.statement}\n{task.mutation['path']}:\n{listing}" if statement else listing}]


def right_edit(task: SweTask) -> str:
    """The shortest swap that undoes the bug, where whole words and operators are swapped; else the whole line."""
    line, wrong, right = int(task.mutation["line"]), str(task.mutation["wrong"]), str(task.mutation["right"])
    old, new = difference(wrong, right)
    edit = Edit(line, new, old)
    done = edit.apply(b"\n" * (line - 1) + wrong.encode() + b"\n") if old and new else None
    if done is not None and done.splitlines()[line - 1] == right.encode():
        return f"in line {line}: {old} => {new}"
    return f"replace line {line}: {right.strip()}"


def difference(before: str, after: str) -> tuple[str, str]:
    """The parts in which two lines differ, widened to spaces on both sides."""
    start = next((i for i, (a, b) in enumerate(zip(before, after, strict=False)) if a != b), min(len(before), len(after)))
    end = 0
    while end < min(len(before), len(after)) - start and before[-1 - end] == after[-1 - end]:
        end += 1
    start = before.rfind(" ", 0, start) + 1
    tail = before[len(before) - end :].split(" ", 1)[0] if end else ""
    end -= len(tail)
    return before[start : len(before) - end].strip(), after[start : len(after) - end].strip()


def wrong_edit(task: SweTask, right: str, context: int, rng: random.Random) -> str:
    """A well-formed edit that mends nothing."""
    line = rng.randint(*window(task, context))
    other = rng.choice(("== => !=", "and => or", "1 => 2", "< => >=", "+ => -", "return => pass"))
    edit = f"in line {line}: {other}"
    return edit if edit != right else f"in line {line}: x => y"
