"""Tasksets of verifiers 0.4 (its v1 API): rows become tasks, the taskset's own rewards score, the conversation runs through our turn loop.

`env=verifiers env.args.taskset=ID`, an installed package (or a module here) as verifiers names it. Environments whose `run` talks to one agent turn by turn
(`agents.NAME.interaction`) are multi-turn; a plain taskset is one prompt and one answer. Tasks with tool servers, sandboxes or a program of their own are
refused in one sentence.

verifiers runs in a process of its own (`verifiers_server.py`), one per worker, by `env.args.python`: its pins do not fit beside vLLM, so that interpreter may
be another environment's, and what it imports, loads and scores never holds up the worker's event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import itertools
import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

from sao.environment import Action, Context, Message, StepResult, Task
from sao.environments.text import row_of
from sao.errors import ConfigError, EnvironmentFailure
from sao.tasks.rows import Row

SERVER = Path(__file__).with_name("verifiers_server.py")
ROWS_S = 300.0  # a taskset may load its data from somewhere slow
CLOSE_S = 5.0
MOST_BYTES = 64 * 2**20  # of one answer of the process
OPENS_ITSELF = "(the environment opens the conversation)"


class VerifiersEnvironment:
    """One episode of a task of a taskset.

    taskset: id of the installed taskset. config: its configuration. env: id of an environment to pair it with; empty: the taskset's own. held_out: what of
    `config` is different for held-out tasks; empty: there are none. limit: so many tasks are taken; 0: all. python: an interpreter that has verifiers.
    """

    def __init__(
        self,
        task: Task,
        *,
        taskset: str,
        config: Mapping[str, Any] | None = None,
        env: str = "",
        held_out: Mapping[str, Any] | None = None,
        limit: int = 0,
        python: str = "",
    ) -> None:
        row, _ = row_of(task.payload)
        self.index = int(row["index"])
        self.spec = _specs(taskset, config, env, held_out, limit)[row["split"]]
        self.python = python
        self.session = f"{task.task_id}/{next(_numbers)}"
        self._server: _Server | None = None

    def tools(self) -> Sequence[Mapping[str, Any]]:
        return ()

    async def reset(self, context: Context) -> Sequence[Message]:
        server = await _server(self.python)
        await server.loaded(self.spec)
        self._server = server
        answer = await self._server.ask("start", session=self.session, spec=self.spec, index=self.index)
        if "messages" not in answer:
            raise EnvironmentFailure(f"taskset {self.spec['taskset']}: the episode ended before the policy was asked anything")
        messages: list[Message] = answer["messages"]
        return messages

    async def step(self, action: Action) -> StepResult:
        assert self._server is not None
        answer = await self._server.ask("reply", session=self.session, text=action.text)
        if "messages" in answer:
            return StepResult(answer["messages"])
        info = {**answer["metrics"], **{f"reward/{name}": value for name, value in answer["rewards"].items()}}
        return StepResult(reward=answer["reward"], terminated=True, info=info)

    async def close(self) -> None:
        """End the session. A server that does not even answer that hangs, and is killed: its other episodes fail, typed, and the next one starts another."""
        server, self._server = self._server, None
        if server is None or not server.alive:
            return
        try:
            async with asyncio.timeout(CLOSE_S):
                await server.ask("close", session=self.session)
        except TimeoutError:
            server.kill(f"did not answer for {CLOSE_S:g} s and was ended; code of the taskset {self.spec['taskset']} blocks it")

    @classmethod
    async def shutdown(cls) -> None:
        """End the processes of this event loop."""
        for server in _servers.pop(asyncio.get_running_loop(), {}).values():
            await server.stop()

    @classmethod
    def check_args(
        cls,
        *,
        taskset: str,
        config: Mapping[str, Any] | None = None,
        env: str = "",
        held_out: Mapping[str, Any] | None = None,
        limit: int = 0,
        python: str = "",
    ) -> None:
        """Load the taskset once. Raises ConfigError when verifiers, the taskset or what it needs is not there, or a turn loop cannot play it."""
        _rows(python, json.dumps(list(_specs(taskset, config, env, held_out, limit).values())))

    @classmethod
    def own_rows(
        cls,
        split: str,
        *,
        taskset: str,
        config: Mapping[str, Any] | None = None,
        env: str = "",
        held_out: Mapping[str, Any] | None = None,
        limit: int = 0,
        python: str = "",
    ) -> TasksetRows:
        specs = _specs(taskset, config, env, held_out, limit)
        found = dict(zip(specs, _rows(python, json.dumps(list(specs.values()))), strict=True))
        return TasksetRows(split, found.get(split, ()))


class TasksetRows:
    """The tasks of one split as rows: a prompt to measure, and where the task is."""

    def __init__(self, split: str, found: Sequence[Mapping[str, Any]]) -> None:
        self.split, self._found = split, found

    def __len__(self) -> int:
        return len(self._found)

    def __getitem__(self, index: int) -> Row:
        row = self._found[index]
        return {"prompt": row["prompt"] or OPENS_ITSELF, "key": row["key"], "index": index, "split": self.split}

    def label(self, index: int) -> str:
        return f"task {index + 1}"


class _Server:
    """One process that plays, and the requests it has not answered."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process
        self.alive = True
        self._why = "ended"
        self._waiting: dict[int, asyncio.Future[Any]] = {}
        self._loads: dict[str, asyncio.Task[Any]] = {}
        self._reader = asyncio.create_task(self._read())

    async def ask(self, do: str, **what: Any) -> Any:
        """Raises EnvironmentFailure with what the taskset raised, or when the process is gone."""
        if not self.alive:
            raise self._gone()
        number = next(_numbers)
        answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._waiting[number] = answer
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(json.dumps({"id": number, "do": do, **what}).encode() + b"\n")
            await self.process.stdin.drain()
            return await answer
        except ConnectionError:
            raise self._gone() from None
        finally:
            self._waiting.pop(number, None)

    async def loaded(self, spec: Mapping[str, Any]) -> None:
        """Wait until a taskset is there. Loading goes on when an episode runs out of time over it, and the next one finds it done."""
        key = json.dumps(spec, sort_keys=True)
        if key not in self._loads:
            self._loads[key] = asyncio.create_task(self.ask("load", spec=spec))
        await asyncio.shield(self._loads[key])

    def kill(self, why: str) -> None:
        self._why, self.alive = why, False
        with contextlib.suppress(ProcessLookupError):
            self.process.kill()

    async def stop(self) -> None:
        self.kill("was stopped")
        await self.process.wait()
        await self._reader

    async def _read(self) -> None:
        while line := await self._line():
            try:
                answer = json.loads(line)
                waiting = self._waiting.get(answer["id"])
            except (ValueError, TypeError, KeyError):
                self.kill(f"said {line[:80]!r} in place of an answer and was ended")
                break
            if waiting is None or waiting.done():
                continue
            if "error" in answer:
                waiting.set_exception(EnvironmentFailure(f"verifiers: {answer['error']}"))
            else:
                waiting.set_result(answer["ok"])
        self.alive = False
        for waiting in self._waiting.values():
            if not waiting.done():
                waiting.set_exception(self._gone())

    async def _line(self) -> bytes:
        """What the process says next; nothing when it has ended."""
        assert self.process.stdout is not None
        try:
            return await self.process.stdout.readline()
        except ValueError:
            self.kill(f"gave an answer over {MOST_BYTES >> 20} MiB and was ended")
            return b""

    def _gone(self) -> EnvironmentFailure:
        return EnvironmentFailure(f"the process that plays verifiers tasksets {self._why}; the worker's log has what it printed")


_numbers = itertools.count()
_servers: WeakKeyDictionary[asyncio.AbstractEventLoop, dict[str, _Server]] = WeakKeyDictionary()
_starting: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Lock] = WeakKeyDictionary()


async def _server(python: str) -> _Server:
    """The process of this event loop that `python` runs, started at its first use and again when it is gone."""
    loop = asyncio.get_running_loop()
    servers = _servers.setdefault(loop, {})
    async with _starting.setdefault(loop, asyncio.Lock()):
        server = servers.get(python)
        if server is None or not server.alive:
            pipe = asyncio.subprocess.PIPE
            process = await asyncio.create_subprocess_exec(python or sys.executable, str(SERVER), stdin=pipe, stdout=pipe, limit=MOST_BYTES)
            server = servers[python] = _Server(process)
    return server


def _specs(taskset: str, config: Mapping[str, Any] | None, env: str, held_out: Mapping[str, Any] | None, limit: int) -> dict[str, dict[str, Any]]:
    """What each split plays."""
    own = dict(config or {})
    spec = {"taskset": taskset, "env": env, "limit": limit}
    return {"train": {**spec, "config": own}} | ({"held_out": {**spec, "config": {**own, **held_out}}} if held_out else {})


@functools.lru_cache(maxsize=8)
def _rows(python: str, specs: str) -> list[list[dict[str, Any]]]:
    """The rows of each spec, from a process of its own. Raises ConfigError."""
    request = json.dumps({"id": 0, "do": "rows", "specs": json.loads(specs)}) + "\n"
    runs = python or sys.executable
    try:
        done = subprocess.run([runs, str(SERVER)], input=request, capture_output=True, text=True, timeout=ROWS_S, check=False)
    except subprocess.TimeoutExpired:
        raise ConfigError(f"env=verifiers: the taskset did not load within {ROWS_S:g} s") from None
    except OSError as error:
        raise ConfigError(f"env.args.python={python} cannot be run ({error.strerror}); name an interpreter that has verifiers") from None
    if not done.stdout.strip():
        last = (done.stderr.strip().splitlines() or ["no output"])[-1]
        raise ConfigError(f"env=verifiers: the process that loads the taskset died ({last[:200]})")
    try:
        answer = json.loads(done.stdout)
    except ValueError:
        raise ConfigError(
            f"env=verifiers: {runs} printed {done.stdout.strip()[:80]!r} of its own; name an interpreter itself as env.args.python"
        ) from None
    if "error" not in answer:
        found: list[list[dict[str, Any]]] = answer["ok"]
        return found
    said = str(answer["error"])
    if "No module named 'verifiers'" in said:
        raise ConfigError(
            f"env=verifiers needs the package verifiers in {runs}; install `pip install verifiers==0.4.0`, beside vLLM in an environment of its own, "
            "and name that one's interpreter as env.args.python"
        )
    raise ConfigError(f"env.args.taskset={json.loads(specs)[0]['taskset']}: {said}")
