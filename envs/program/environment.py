"""Any agent program as an environment: it asks the policy over HTTP as it would ask OpenAI or Anthropic, and is trained on what it was answered."""

from __future__ import annotations

import asyncio
import inspect
import json
import os
import random
import re
import shlex
import shutil
import tempfile
import time
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from sao.environment import Message, StepResult, Task
from sao.envs.program.process import run_command, search_path
from sao.errors import ConfigError, EnvironmentFailure
from sao.rewards.preflight import reward_config
from sao.rewards.runner import close_shared, shared_runner
from sao.tasks.row_source import MESSAGES_KEY
from sao.tasks.target import load_environment, load_target

TASKS = "env.args.tasks"
PYTHON = re.compile(r"python[\d.]*")
SCORED = ("message", "output")
ROW_BYTES = 128 * 1024 - len("SAO_TASK=") - 1  # Linux: one variable has at most 32 pages, its end included (execve(2), MAX_ARG_STRLEN)


class ProgramEnvironment:
    """One task, one program, one score.

    command: a command line, or a list of words, run in a directory of its own; words that name files are made absolute.
    function: instead, `package.module:function`: a coroutine function `(row, variables)` of this process, for agents that are cheaper than a process.
    Both find where the model is in their variables: OPENAI_BASE_URL, OPENAI_API_KEY, OPENAI_MODEL, ANTHROPIC_BASE_URL, ANTHROPIC_API_KEY,
    ANTHROPIC_MODEL, and the task's row as JSON in SAO_TASK.
    reward: a RewardConfig as a dict. Its function scores, as `scored` says, the last message of the policy or the program's output (its standard
    output, or what the function returned).
    variables: more of them. at_once: programs that run at the same time in this worker.
    tasks, tasks_args: an environment whose generator (and demonstrations, and tools) to use, `package.module:Class`, where no task file is given.
    """

    def __init__(
        self,
        task: Task,
        *,
        reward: Mapping[str, Any] | None = None,
        command: str | Sequence[str] = (),
        function: str = "",
        scored: str = "message",
        variables: Mapping[str, str] | None = None,
        at_once: int = 4,
        tasks: str = "",
        tasks_args: Mapping[str, Any] | None = None,
    ) -> None:
        self.command = _words(command)
        if bool(self.command) == bool(function):
            raise ConfigError("env=program runs env.args.command or env.args.function: set one of them")
        if scored not in SCORED:
            raise ConfigError(f"env.args.scored={scored!r} is not {' or '.join(SCORED)}")
        self.function = load_target(function, "env.args.function") if function else None
        if self.function is not None and not inspect.iscoroutinefunction(self.function):
            raise ConfigError(f"env.args.function={function} must be a coroutine function: write `async def`")
        self.task = task
        self.row = {key: value for key, value in task.payload.items() if key != MESSAGES_KEY}
        self.scored = scored
        self.extra = {str(name): str(value) for name, value in (variables or {}).items()}
        self.others = (tasks, dict(tasks_args or {}))
        self.reward = dict(reward or {})
        if at_once < 1:
            raise ConfigError(f"env.args.at_once={at_once} must be above 0")
        self.at_once = at_once
        self._place: asyncio.Semaphore | None = None
        self._directory: Path | None = None

    async def prepare(self) -> None:
        if self.command:
            place = _places(self.at_once)
            await place.acquire()
            self._place = place
            self._directory = Path(tempfile.mkdtemp(prefix="sao-program-"))

    async def run(self, variables: Mapping[str, str]) -> str:
        given = {**variables, **self.extra, "SAO_TASK": json.dumps(self.row, ensure_ascii=False, default=str)}
        if self._directory is not None:
            size = len(given["SAO_TASK"].encode())
            if size > ROW_BYTES:
                raise EnvironmentFailure(
                    f"the row has {size} bytes and a process is given at most {ROW_BYTES} of it (SAO_TASK): put long texts into files that the row names, "
                    "or use env.args.function"
                )
            return await run_command(self.command, self._directory, given)
        assert self.function is not None
        said = await self.function(self.row, given)
        if said is not None and not isinstance(said, str):
            raise EnvironmentFailure(f"env.args.function returned a {type(said).__name__}; return the agent's output as text, or nothing")
        return said or ""

    async def score(self, messages: Sequence[Message], output: str) -> StepResult:
        began = time.monotonic()
        *before, last = messages
        text = str(last["content"]) if self.scored == "message" else output
        score = await shared_runner(reward_config(self.reward)).score(text, self.row, messages=before)
        return StepResult(reward=score, terminated=True, info={"reward_s": time.monotonic() - began})

    async def close(self) -> None:
        try:
            if self._directory is not None:
                await asyncio.to_thread(shutil.rmtree, self._directory, True)
        finally:
            if self._place is not None:
                self._place.release()

    @classmethod
    def check_args(cls, *, command: str | Sequence[str] = (), variables: Mapping[str, str] | None = None, **others: Any) -> None:
        """Refuse a program that is not there, and a script that its Python would not find."""
        program, *rest = _words(command) or [""]
        if program and shutil.which(program, path=(variables or {}).get("PATH", search_path())) is None:
            raise ConfigError(f"env.args.command: {program} is no program on PATH and no file that can be executed; mend the command")
        if rest and PYTHON.fullmatch(Path(program).name) and not rest[0].startswith("-") and not os.path.exists(rest[0]):
            raise ConfigError(f"env.args.command: there is no file {rest[0]} in {os.getcwd()}; mend the command")

    @classmethod
    async def shutdown(cls) -> None:
        """End the reward processes of this worker; called once, after its last episode."""
        await asyncio.to_thread(close_shared)

    # -- what another environment lends, named by `tasks` -----------------------------------------------------------------------------

    def tools(self) -> Sequence[Mapping[str, Any]]:
        """The tools of the environment in `tasks`, for a warm start; a program brings its own."""
        target, args = self.others
        return load_environment(target, TASKS)(self.task, **args).tools() if target else ()

    @classmethod
    def generate_payload(cls, rng: random.Random, split: str, *, tasks: str = "", tasks_args: Mapping[str, Any] | None = None, **own: Any) -> Any:
        return _lender(tasks, "generate_payload")(rng, split, **(tasks_args or {}))

    @classmethod
    def demonstration(cls, rng: random.Random, clean: bool, *, tasks: str = "", tasks_args: Mapping[str, Any] | None = None, **own: Any) -> Any:
        return _lender(tasks, "demonstration")(rng, clean, **(tasks_args or {}))


def _words(command: str | Sequence[str]) -> list[str]:
    """The command's words, those that name files made absolute: the program starts in a directory of its own."""
    words = shlex.split(command) if isinstance(command, str) else [str(word) for word in command]
    return [str(Path(word).absolute()) if os.path.isfile(word) else word for word in words]


def _lender(tasks: str, method: str) -> Any:
    if not tasks:
        raise ConfigError(f"env=program has no tasks: set data.path to a file of tasks, or {TASKS} to an environment with a {method}")
    found = getattr(load_environment(tasks, TASKS), method, None)
    if found is None:
        raise ConfigError(f"{TASKS}={tasks} has no {method}")
    return found


_semaphores: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, dict[int, asyncio.Semaphore]] = weakref.WeakKeyDictionary()


def _places(at_once: int) -> asyncio.Semaphore:
    """The places of this worker's programs; environments of one event loop that allow the same number share them."""
    return _semaphores.setdefault(asyncio.get_running_loop(), {}).setdefault(at_once, asyncio.Semaphore(at_once))
