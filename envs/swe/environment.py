"""SWE tasks: a repository with a bug, a statement of what fails, and the project's own tests as the judge. Held out by package.

actions=bash: one command a turn in the sandbox, stateless, as mini-swe-agent has it; `echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT` hands the work in. The diff is
taken from outside and graded in a second, clean sandbox. actions=edit, for very small models (envs/swe/edits.py): some lines around the bug are shown
with their numbers, and the policy changes one. The reward is 1 exactly when the patch resolves the task.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from sao.environment import Action, Context, Message, StepResult, Task
from sao.envs.swe import edits
from sao.envs.swe.actions import BASH, SENTINEL, read_command, read_edit, shown, submission
from sao.errors import ConfigError, EnvironmentFailure
from sao.sandbox.protocol import Sandbox, SandboxSpec
from sao.swe.grading import Verdict, grade_in
from sao.swe.mutations import KINDS
from sao.swe.patches import changed_line
from sao.swe.repo import HELD_OUT, TASKS, TRAIN, Listed, SweTask, list_tasks, read_task
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
# Verdicts on edits of one line, by repository, task and patch: small policies write the same few again and again, and a verified task always answers alike.
_judged: dict[tuple[str, str, str], Verdict] = {}
MOST_JUDGED = 100_000


class SweEnvironment:
    """`task.payload` is {"instance_id"}: a task of the repository `repo`.

    actions: bash or edit. tool: bash as a tool call instead of a fenced block. timeout_s: of one command. kinds: tasks drawn are of these kinds of mutation
    (all by default). context: lines shown above and below the bug with actions=edit (where the window starts varies). statement: with actions=edit,
    whether the statement comes before them. graded: false leaves the patch ungraded and hands it back as the last message, as `sao eval swebench` wants it.
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
        kinds: Sequence[str] = (),
        context: int = 2,
        statement: bool = True,
        graded: bool = True,
    ) -> None:
        if actions not in ("bash", "edit"):
            raise ConfigError(f"env.args.actions={actions} is neither bash nor edit")
        self.repo = repo
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
        if self.actions == "edit":
            return edits.opening(handed_out(self.task), self.task, self.context, self.statement)
        await build(self.box, self.task)
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
        return await self._judge(action, patch)

    async def _edit(self, action: Action) -> StepResult:
        assert self.box is not None
        edit = read_edit(action.text)
        before = handed_out(self.task)
        after = edit.apply(before) if edit else None
        if edit is None or after is None:
            return StepResult([self._answer(action, EDIT_ERROR)])
        patch = changed_line(str(self.task.mutation["path"]), before, after, edit.line) if after != before else b""
        if not self.graded:
            return self._handed_back(action, patch)
        key = self.repo, self.task.instance_id, hashlib.sha256(patch).hexdigest()
        verdict = _judged.get(key)
        if verdict is None:
            await build(self.box, self.task)
            verdict = await grade_in(self.box, self.task, patch)
            if len(_judged) < MOST_JUDGED:
                _judged[key] = verdict
        return StepResult(reward=float(verdict.resolved), terminated=True, info=figures(verdict, self.commands))

    async def _judge(self, action: Action, patch: bytes) -> StepResult:
        """In the copy from before the first command."""
        if not self.graded:
            return self._handed_back(action, patch)
        assert self.base is not None
        verdict = await grade_in(self.base, self.task, patch)
        return StepResult(reward=float(verdict.resolved), terminated=True, info=figures(verdict, self.commands))

    def _handed_back(self, action: Action, patch: bytes) -> StepResult:
        return StepResult([self._answer(action, patch.decode("utf-8", "replace"))], terminated=True)

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
    def generate_payload(cls, rng: random.Random, split: str, *, repo: str = "runs/swe-tasks", kinds: Sequence[str] = (), **_: Any) -> dict[str, Any]:
        """Draw one task of `split` (train | held_out). Raises ConfigError when the repository has none."""
        if unknown := [kind for kind in kinds if kind not in KINDS]:
            raise ConfigError(f"env.args.kinds: there is no {unknown[0]}; there are {', '.join(KINDS)}")
        found = [task.instance_id for task in listed(repo) if task.split == SPLITS[split] and (not kinds or task.kind in kinds)]
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
        kinds: Sequence[str] = (),
        context: int = 2,
        statement: bool = True,
        **_: Any,
    ) -> list[Message]:
        """A conversation of `actions=edit` for `sao warmstart`, on any line of a training package that a mutation can break: no test is run.

        Right when clean, else right half of the time.
        """
        if actions != "edit" or statement:
            raise ConfigError("a warm start on env=swe needs env.args.actions=edit and env.args.statement=false; name a model that can write already")
        files = sorted({(task.source, task.path) for task in listed(repo) if task.split == TRAIN})
        return edits.demonstration(Path(repo).expanduser(), files, kinds or KINDS, context, rng, right=clean or rng.random() < 0.5)


@lru_cache(maxsize=1024)
def load(repo: str, instance_id: str) -> SweTask:
    return read_task(Path(repo).expanduser() / TASKS / instance_id)


@lru_cache(maxsize=8)
def listed(repo: str) -> tuple[Listed, ...]:
    return list_tasks(Path(repo).expanduser())


def figures(verdict: Verdict, commands: int) -> dict[str, float]:
    """What an episode reports beside its reward."""
    return {f"verdict/{verdict.verdict}": 1.0, "commands": float(commands), "grading_s": verdict.seconds}
