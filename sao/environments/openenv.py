"""An environment of somebody else's OpenEnv server (openenv-core 0.3), over its own wire: `GET /schema`, and one WebSocket `/ws` per episode.

`env=openenv env.args.url=http://host:8000`. The messages are those of `openenv.core.env_client` (reset, step, state, close); they are spoken here with
aiohttp, because openenv-core brings packages that do not live beside vLLM. Each connection is a session of its own on the server, which allows so many at
once (`max_concurrent_envs`); `at_once` keeps a worker below that.

How an answer becomes an action: where the action has one field, the text fills it; else the policy calls the tool `act`, whose parameters are the action's
schema. What the server refuses as an invalid action is answered to the policy. Anything else that fails is a typed failure.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Mapping, Sequence
from typing import Any
from weakref import WeakKeyDictionary

from sao.environment import Action, Context, Message, StepResult, Task
from sao.environments.text import answer_of, as_json, opening, row_of, user
from sao.errors import ConfigError, EnvironmentFailure
from sao.tasks.target import one_line

TOOL = "act"
CHECK_S = 5.0
CLOSE_S = 2.0  # for the server to say goodbye; the socket is dropped then
MOST_BYTES = 16 * 2**20  # of one message of the server
OWN_FIELDS = ("metadata", "done", "reward")  # of OpenEnv's own base classes

_slots: WeakKeyDictionary[asyncio.AbstractEventLoop, dict[str, asyncio.Semaphore]] = WeakKeyDictionary()


class OpenEnvEnvironment:
    """One session of an OpenEnv server.

    url: of the server. at_once: sessions of one worker at a time; the others wait in reset. timeout_s: for one answer of the server. observation: which field
    of an observation the policy sees; empty: the only one, else all as JSON. system: a system message to put first. reset: further arguments of the server's
    reset, which gets the episode's seed and the row's columns as well. goal: text before the first observation.
    """

    def __init__(
        self,
        task: Task,
        *,
        url: str,
        at_once: int = 8,
        timeout_s: float = 60.0,
        observation: str = "",
        system: str = "",
        goal: str = "",
        reset: Mapping[str, Any] | None = None,
    ) -> None:
        self.row, self.messages = row_of(task.payload)
        self.row.pop("prompt", None)
        self.task_id = task.task_id
        self.url = url.rstrip("/")
        self.at_once, self.timeout_s, self.field, self.system, self.goal = at_once, timeout_s, observation, system, goal
        self.arguments = dict(reset or {})
        self.schema: Mapping[str, Any] = {}
        self.refused = 0
        self._session: Any = None
        self._socket: Any = None
        self._slot: asyncio.Semaphore | None = None

    def tools(self) -> Sequence[Mapping[str, Any]]:
        if _only_field(self.schema):
            return ()
        about = str(self.schema.get("description") or "Act in the environment.")
        return ({"type": "function", "function": {"name": TOOL, "description": about, "parameters": self.schema}},)

    async def reset(self, context: Context) -> Sequence[Message]:
        import aiohttp

        slot = _slot(self.url, self.at_once)
        await slot.acquire()
        self._slot = slot
        self._session = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=self.timeout_s))
        try:
            async with self._session.get(f"{self.url}/schema") as answer:
                answer.raise_for_status()
                self.schema = _action_schema(await answer.json())
            self._socket = await self._session.ws_connect(
                f"{_ws(self.url)}/ws", max_msg_size=MOST_BYTES, timeout=aiohttp.ClientWSTimeout(ws_close=CLOSE_S)
            )
        except (aiohttp.ClientError, TimeoutError, ValueError) as error:
            raise EnvironmentFailure(f"the OpenEnv server {self.url} did not open a session ({one_line(error)})") from error
        data = await self._ask("reset", {**self.row, **self.arguments, "seed": context.seed, "episode_id": self.task_id[:255]})
        if data is None or data.get("done"):
            raise EnvironmentFailure(f"the OpenEnv server {self.url} reset to an episode that is over already")
        text = "\n".join(part for part in (self.goal, self._seen(data)) if part)
        if self.messages and self.messages[-1]["role"] == "user":
            *before, last = self.messages
            return [*before, {**last, "content": f"{last['content']}\n{text}"}]
        return opening(self.system, text)

    async def step(self, action: Action) -> StepResult:
        field = _only_field(self.schema)
        if field:
            return await self._step(_field_value(answer_of(action.text), self.schema["properties"][field], field), None)
        if not action.tool_calls:
            return StepResult([user(f"error: act by calling the tool {TOOL}")], info={"refused": self._refuse()})
        first, *others = action.tool_calls
        result = await self._step(dict(first.arguments), first.call_id)
        said = [_tool_message("error: one action a turn; this one was not done", call.call_id) for call in others]
        return StepResult([*result.observation, *said], result.reward, result.terminated, result.truncated, result.info)

    async def close(self) -> None:
        """End the session, whatever the server says to that; free the slot."""
        slot, self._slot = self._slot, None
        socket, self._socket = self._socket, None
        session, self._session = self._session, None
        try:
            if socket is not None:
                await socket.close()
        finally:
            try:
                if session is not None:
                    await session.close()
            finally:
                if slot is not None:
                    slot.release()

    async def state(self) -> dict[str, Any]:
        """The server's account of the session."""
        return await self._ask("state", None) or {}

    @classmethod
    def check_args(cls, *, url: str, at_once: int = 8, timeout_s: float = 60.0, **args: Any) -> None:
        """Ask the server for its schema. Raises ConfigError when it is not there, is none, or a bound makes no sense."""
        if not url.startswith(("http://", "https://")):
            raise ConfigError(f"env.args.url={url} is not the address of an OpenEnv server; write http://host:port")
        if at_once < 1 or timeout_s <= 0:
            raise ConfigError(f"env.args.at_once={at_once} must be at least 1 and env.args.timeout_s={timeout_s} above 0")
        asyncio.run(_check(url.rstrip("/")))

    @classmethod
    def generate_payload(cls, rng: random.Random, split: str, **args: Any) -> dict[str, Any]:
        """A task is its seed and nothing else; the source draws those of the two splits apart."""
        return {}

    async def _step(self, fields: Mapping[str, Any], call_id: str | None) -> StepResult:
        data = await self._ask("step", fields)
        if data is None:
            said = f"error: the environment did not accept this action: {as_json(fields)[:200]}"
            return StepResult([user(said) if call_id is None else _tool_message(said, call_id)], info={"refused": self._refuse()})
        text, reward = self._seen(data), data.get("reward")
        message = user(text) if call_id is None else _tool_message(text, call_id)
        return StepResult([message], 0.0 if reward is None else reward, terminated=bool(data.get("done")), info={"refused": self.refused})

    def _refuse(self) -> int:
        self.refused += 1
        return self.refused

    async def _ask(self, kind: str, data: Mapping[str, Any] | None) -> dict[str, Any] | None:
        """One message and its answer's data; None where the server calls the message invalid. Raises EnvironmentFailure for every other error."""
        import aiohttp

        where = f"the OpenEnv server {self.url}"
        message = {"type": kind} if data is None else {"type": kind, "data": data}
        try:
            await self._socket.send_str(json.dumps(message))
            answer = await self._socket.receive(timeout=self.timeout_s)
        except TimeoutError:
            raise EnvironmentFailure(f"{where} did not answer {kind} within env.args.timeout_s={self.timeout_s:g}") from None
        except (aiohttp.ClientError, ConnectionError) as error:
            raise EnvironmentFailure(f"{where} is gone ({one_line(error)})") from error
        if answer.type is not aiohttp.WSMsgType.TEXT:
            raise EnvironmentFailure(f"{where} ended the session while {kind} was asked ({answer.type.name.lower()})")
        try:
            found = json.loads(answer.data)
            kind_of, content = found["type"], found["data"]
        except (ValueError, TypeError, KeyError) as error:
            raise EnvironmentFailure(f"{where} answered {kind} with something else than OpenEnv's messages ({one_line(error, 80)})") from None
        if kind_of != "error":
            return dict(content)
        if kind == "step" and content.get("code") == "VALIDATION_ERROR":
            return None
        raise EnvironmentFailure(f"{where} could not {kind}: {content.get('message')} ({content.get('code')})")

    def _seen(self, data: Mapping[str, Any]) -> str:
        fields = {key: value for key, value in (data.get("observation") or {}).items() if key not in OWN_FIELDS}
        if self.field:
            if self.field not in fields:
                raise EnvironmentFailure(
                    f"an observation of {self.url} has no field {self.field!r} (env.args.observation); it has {', '.join(fields) or 'none'}"
                )
            return as_json(fields[self.field])
        return as_json(next(iter(fields.values())) if len(fields) == 1 else fields)


async def _check(url: str) -> None:
    import aiohttp

    try:
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=CHECK_S)) as session, session.get(f"{url}/schema") as answer:
            answer.raise_for_status()
            _action_schema(await answer.json())
    except (aiohttp.ClientError, TimeoutError) as error:
        raise ConfigError(
            f"env.args.url={url}: no OpenEnv server answers there ({one_line(error)}); start it first, it runs beside the training"
        ) from None
    except ValueError as error:
        raise ConfigError(f"env.args.url={url} answers, but not as an OpenEnv server: {error}") from None


def _slot(url: str, at_once: int) -> asyncio.Semaphore:
    """Who may have a session, one count per server and event loop."""
    return _slots.setdefault(asyncio.get_running_loop(), {}).setdefault(url, asyncio.Semaphore(at_once))


def _ws(url: str) -> str:
    return "ws" + url.removeprefix("http")


def _action_schema(schemas: Any) -> dict[str, Any]:
    """The action's own fields, as a JSON schema. Raises ValueError when there is none."""
    schema = schemas.get("action") if isinstance(schemas, Mapping) else None
    if not isinstance(schema, Mapping) or not isinstance(schema.get("properties"), Mapping):
        raise ValueError("/schema names no action")
    properties = {name: value for name, value in schema["properties"].items() if name not in OWN_FIELDS}
    if not properties:
        raise ValueError("its action has no field of its own (a server of MCP tools alone is not supported)")
    required = [name for name in schema.get("required", ()) if name in properties]
    kept = {key: schema[key] for key in ("description", "$defs") if key in schema}
    return {"type": "object", **kept, "properties": properties, "required": required}


def _only_field(schema: Mapping[str, Any]) -> str:
    names = list(schema.get("properties", ()))
    return str(names[0]) if len(names) == 1 else ""


def _field_value(text: str, schema: Mapping[str, Any], field: str) -> dict[str, Any]:
    """The text, read as JSON where the field is no string; the server judges what that is worth."""
    if schema.get("type", "string") == "string":
        return {field: text}
    try:
        return {field: json.loads(text)}
    except (ValueError, RecursionError):
        return {field: text}


def _tool_message(text: str, call_id: str) -> Message:
    message: Message = {"role": "tool", "name": TOOL, "content": text}
    return {**message, "tool_call_id": call_id} if call_id else message
