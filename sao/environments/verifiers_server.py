"""Plays tasks of verifiers 0.4 tasksets; the process that `sao.environments.verifiers` starts and talks to. Imports nothing of SAO.

It is run as a file, by whichever interpreter has verifiers: that package pins openai < 3 and mcp, so it may live in an environment of its own. In a process
of its own, on the main thread, it also blocks nobody, and math-verify's alarms work, which in a thread turn every score into 0 without a word.

One JSON object a line on stdin and stdout: {"id", "do", ...} is answered by {"id", "ok": ...} or {"id", "error": text}. What a taskset prints goes to stderr.

    rows   {specs}                 -> for each spec the list of {"prompt", "key"}
    load   {spec}                  -> how many tasks it has; a start of that spec then costs nothing
    start  {session, spec, index}  -> {"messages"} that open the episode
    reply  {session, text}         -> {"messages"} that follow, or {"reward", "rewards", "metrics"} at the end
    close  {session}               -> null

A spec is {"taskset", "env", "config", "limit"}. The seat of the environment's one agent is ours: `run` and `interaction` of verifiers' agent protocol, whose
model calls are answered by the turn loop on the other side. What needs a program, a tool server or a sandbox is refused by `playable`.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import functools
import inspect
import itertools
import json
import os
import signal
import sys
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any


class Refused(Exception):
    """The taskset cannot be played this way; the message says why."""


class Loaded:
    """An environment and its tasks."""

    def __init__(self, spec: dict[str, Any]) -> None:
        import verifiers.v1 as vf
        from verifiers.v1.configs.agent import agent_config_fields

        config = vf.resolve_env_config({"id": spec["env"], "taskset": {**spec["config"], "id": spec["taskset"]}})
        self.env = vf.load_environment(config)
        taskset = self.env.taskset
        if not taskset.bounded and not spec["limit"]:
            raise Refused(f"the taskset {spec['taskset']} has no end; set env.args.limit to the number of tasks to take")
        self.tasks = list(itertools.islice(taskset, spec["limit"] or None))
        self.seats = agent_config_fields(config)
        if not self.tasks:
            raise Refused(f"the taskset {spec['taskset']} has no tasks with this configuration")
        playable(vf, self)


@functools.cache
def load(spec: str) -> Loaded:
    return Loaded(json.loads(spec))


def playable(vf: Any, loaded: Loaded) -> None:
    """Refuse what a turn loop alone cannot play."""
    env, task = loaded.env, loaded.tasks[0]
    kind, name = type(task), type(env.taskset).__name__
    by_program = "which only its own program can play, not a turn loop"
    if len(loaded.seats) != 1:
        raise Refused(f"{type(env).__name__} has the agents {', '.join(loaded.seats)}; an episode here has one")
    if kind.NEEDS_CONTAINER:
        raise Refused(f"tasks of {name} need a container, {by_program}")
    if kind.toolsets(task.config) or type(env.taskset).toolsets(env.taskset.config):
        raise Refused(f"tasks of {name} come with tool servers, {by_program}")
    for hook in ("setup", "finalize"):
        if getattr(kind, hook) is not getattr(vf.Task, hook):
            raise Refused(f"{kind.__name__}.{hook} prepares a runtime, {by_program}")
    if type(env).start is not vf.Env.start:
        raise Refused(f"{type(env).__name__}.start brings up resources of a server, {by_program}")
    hooks = {attr: task.hooks(attr) for attr in ("stop", "metric", "reward")}
    if hooks["stop"]:
        raise Refused(f"{kind.__name__} stops at {hooks['stop'][0].__name__}, a hook into model calls, {by_program}")
    for function in (*hooks["metric"], *hooks["reward"]):
        parameter = inspect.signature(function).parameters.get("runtime")
        if parameter is not None and parameter.default is parameter.empty:
            raise Refused(f"{kind.__name__}.{function.__name__} scores a runtime, {by_program}")
    plain = type(env) is vf.SingleAgentEnv
    if plain and not hooks["reward"] and not task.config.judges:
        raise Refused(f"{kind.__name__} has no @vf.reward, so nothing would be learned")
    if plain and task.data.prompt is None:
        raise Refused(f"tasks of {name} have no prompt and its environment opens no conversation")


class Seat:
    """The agent of an episode, as verifiers' `Env.run` sees it: one conversation, whose replies come from outside."""

    def __init__(self, session: Session, name: str, config: Any) -> None:
        self.session, self.name, self.config = session, name, config
        self.trainable = True

    async def run(self, task: Any, **options: Any) -> Any:
        async with self.interaction(task, **options) as talk:
            await talk.turn()
        return talk.trace

    @contextlib.asynccontextmanager
    async def interaction(self, task: Any, **options: Any) -> AsyncIterator[Talk]:
        if self.session.talk is not None:
            raise Refused(f"{type(self.session.loaded.env).__name__} plays its agent more than once an episode")
        self.session.talk = talk = Talk(self, task)
        yield talk
        talk.trace.ok = True
        talk.trace.stop("user_closed")
        await task.score(talk.trace)


class Talk:
    """An interaction in verifiers' sense: `turn` sends the user's words and returns the agent's."""

    def __init__(self, seat: Seat, task: Any) -> None:
        import verifiers.v1 as vf
        from verifiers.v1.state import state_cls

        about = vf.TraceTask(type=type(task).__name__, data=task.data, key=task.key, hash=task.hash)
        agent = vf.AgentInfo(config=seat.config, name=seat.name, trainable=seat.trainable)
        self.trace: Any = vf.Trace(task=about, state=state_cls(type(task))(), agent=agent)
        self.session = seat.session

    async def turn(self, message: Any = None) -> Any:
        import verifiers.v1 as vf

        new = [*(self._opening() if not self.trace.nodes else []), *_typed(message)]
        if not new:
            raise ValueError("nothing to answer: after its opening an exchange needs the next user message")
        for item in new:
            self._add(item, sampled=False)
        reply = vf.AssistantMessage(content=await self.session.ask([_wire(item) for item in new]))
        self._add(reply, sampled=True)
        return vf.Segment(messages=[reply])

    def _opening(self) -> list[Any]:
        import verifiers.v1 as vf

        data = self.trace.task.data
        system = [vf.SystemMessage(content=data.system_prompt)] if data.system_prompt else []
        return [*system, *_typed(data.prompt)]

    def _add(self, message: Any, sampled: bool) -> None:
        import verifiers.v1 as vf

        parent = len(self.trace.nodes) - 1 if self.trace.nodes else None
        self.trace.nodes.append(vf.MessageNode(parent=parent, message=message, sampled=sampled))


class Session:
    """One episode: `Env.run` as a task, stopped wherever it waits for the agent's next words."""

    def __init__(self, loaded: Loaded, index: int) -> None:
        self.loaded, self.task = loaded, loaded.tasks[index]
        self.talk: Talk | None = None
        self._asked: asyncio.Future[list[dict[str, Any]]] | None = None
        self._replied: asyncio.Future[str] | None = None
        self._episode: asyncio.Task[None] | None = None

    async def start(self) -> dict[str, Any]:
        self._asked = asyncio.get_running_loop().create_future()
        self._episode = asyncio.create_task(self._play())
        return await self._next()

    async def reply(self, text: str) -> dict[str, Any]:
        if self._replied is None:
            raise Refused("the episode is over")
        self._asked = asyncio.get_running_loop().create_future()
        self._replied.set_result(text)
        self._replied = None
        return await self._next()

    async def ask(self, messages: list[dict[str, Any]]) -> str:
        if self._asked is None or self._asked.done():
            raise Refused("two conversations of one episode at once")
        self._replied = asyncio.get_running_loop().create_future()
        self._asked.set_result(messages)
        return await self._replied

    async def close(self) -> None:
        if self._episode is not None:
            self._episode.cancel()
            await asyncio.wait({self._episode})

    async def _next(self) -> dict[str, Any]:
        assert self._asked is not None and self._episode is not None
        both: set[asyncio.Future[Any]] = {self._asked, self._episode}
        await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
        if self._asked.done():
            return {"messages": self._asked.result()}
        self._episode.result()
        return self._outcome()

    async def _play(self) -> None:
        import verifiers.v1 as vf

        env, task = self.loaded.env, self.task
        about = vf.TraceTask(type=type(task).__name__, data=task.data, key=task.key, hash=task.hash)
        agents = SimpleNamespace(**{name: Seat(self, name, config) for name, config in self.loaded.seats.items()})
        await env.setup(agents)
        await env.run(task, agents)
        traces = [self.talk.trace] if self.talk is not None else []
        await env.finalize(task, vf.Episode(env=vf.EnvInfo(id=env.config.env_id), task=about, traces=traces))

    def _outcome(self) -> dict[str, Any]:
        trace = self.talk.trace if self.talk is not None else None
        if trace is None or not trace.rewards:
            raise Refused(f"{type(self.loaded.env).__name__} ended the episode without a reward")
        unscored = [name for name, reward in trace.rewards.items() if reward is None]
        if unscored:
            raise Refused(f"the reward {unscored[0]} was not given")
        metrics = {name: value for name, value in trace.metrics.items() if value is not None}
        return {"reward": trace.reward, "rewards": {name: reward.value for name, reward in trace.rewards.items()}, "metrics": metrics}


def _typed(message: Any) -> list[Any]:
    """A prompt or a turn's words as verifiers' message types."""
    import verifiers.v1 as vf
    from verifiers.v1.dialects import parse_message

    if message is None:
        return []
    if isinstance(message, str):
        return [vf.UserMessage(content=message)]
    return [parse_message(item) if isinstance(item, dict) else item for item in message]


def _wire(message: Any) -> dict[str, Any]:
    """A message in the OpenAI form; text alone."""
    content = message.content
    if isinstance(content, list):
        if any(part.type != "text" for part in content):
            raise Refused("a prompt holds an image, which this policy cannot see")
        content = "\n".join(part.text for part in content)
    return {"role": message.role, "content": content or ""}


def rows(specs: list[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    return [[{"prompt": task.data.prompt_text, "key": task.key} for task in load(_text(spec)).tasks] for spec in specs]


def _text(spec: dict[str, Any]) -> str:
    return json.dumps(spec, sort_keys=True)


class Server:
    def __init__(self, output: Any) -> None:
        self.output = output
        self.sessions: dict[str, Session] = {}
        self.running: set[asyncio.Task[None]] = set()
        self.loading = asyncio.Lock()

    async def serve(self) -> None:
        """Until stdin ends, which it does when whoever started this process is gone."""
        reader = asyncio.StreamReader(limit=2**26)
        await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
        while line := await reader.readline():
            task = asyncio.create_task(self.answer(json.loads(line)))
            self.running.add(task)
            task.add_done_callback(self.running.discard)
        if self.running:  # asked for by whoever has said all there is to say
            await asyncio.wait(self.running)

    async def answer(self, request: dict[str, Any]) -> None:
        try:
            said: dict[str, Any] = {"ok": await self.do(request)}
        except Refused as refused:
            said = {"error": str(refused)}
        except (Exception, SystemExit) as error:  # noqa: BLE001 - whatever the taskset raises is the answer
            said = {"error": " ".join(f"{type(error).__name__}: {error}".split())[:500]}
        self.output.write(json.dumps({"id": request["id"], **said}) + "\n")
        self.output.flush()

    async def do(self, request: dict[str, Any]) -> Any:
        match request["do"]:
            case "rows":
                return rows(request["specs"])
            case "load":
                async with self.loading:  # in a thread: episodes go on meanwhile
                    return len((await asyncio.to_thread(load, _text(request["spec"]))).tasks)
            case "start":
                session = self.sessions[request["session"]] = Session(load(_text(request["spec"])), request["index"])
                return await session.start()
            case "reply":
                return await self.sessions[request["session"]].reply(request["text"])
            case "close":
                ended = self.sessions.pop(request["session"], None)
                return await ended.close() if ended is not None else None
            case other:
                raise ValueError(f"unknown request {other}")


def main() -> None:
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: also where a taskset blocks and stdin is not read
    output = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    here = os.path.dirname(os.path.abspath(__file__))
    sys.path[:] = [path for path in sys.path if os.path.abspath(path or ".") != here]  # this folder's verifiers.py must not hide the package
    sys.path.append(os.getcwd())  # tasksets of the user's own
    asyncio.run(Server(output).serve())


if __name__ == "__main__":
    main()
