"""`sao env try`: one episode by hand, by the turn loop itself.

The loop that trains plays here, too, with a person for the engine: "tokens" are characters, so nothing is loaded, and every check it makes of an
environment, every malformed call it answers and every limit is the same. While a person thinks, the episode's clock stands.

A turn is one line: what the policy would say. `/NAME key=value ...` or `/NAME {json}` is a call of the tool NAME.
"""

from __future__ import annotations

import json
import random
import re
import shlex
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from sao.agents.limits import Limits
from sao.agents.tool_calls import CLOSE_TAG, OPEN_TAG, call_body, parse_items
from sao.agents.turns import run_episode
from sao.config import Config
from sao.environment import Action, Context, Environment, Message, StepResult, Task
from sao.environments.threads import SHARED
from sao.errors import UserError
from sao.inference.protocol import GenerateRequest, Generation
from sao.tasks.source import environment_args, load_environment
from sao.trajectory import SamplingSpec, Trajectory

STOP = 0  # the id that ends a turn; every other id is a character
PLENTY = 10_000_000  # characters: limits in tokens have no meaning here
_TAGS = re.compile(f"({re.escape(OPEN_TAG)}|{re.escape(CLOSE_TAG)})")
_CALL = re.compile(r"/(\w[\w.-]*)\s*(.*)", re.DOTALL)
Answer = Callable[[Sequence[Mapping[str, Any]]], str | None]


class NoMoreAnswers(UserError):
    """Whoever plays has stopped."""


async def play(config: Config, task: Task, answer: Answer) -> Trajectory | None:
    """Play `task` with answers from `answer(tools)`, printing everything; None when it gives None before the end.

    Raises SystemFailure for whatever the environment does that would fail an episode.
    """
    kind = load_environment(config.env.target)
    environment: Environment = kind(task, **environment_args(config.env, config.reward))
    player = _Player(answer)
    shown = _Shown(environment, player)
    limits = Limits(
        max_turns=config.rollout.max_turns,
        max_turn_tokens=PLENTY // 2,
        max_tokens=PLENTY,
        time_limit_s=config.rollout.time_limit_s,
        observation_limit=config.rollout.observation_limit,
    )
    try:
        return await run_episode(
            task,
            shown,
            _Characters(),
            player.generate,
            episode_id=(0, 0),
            admitted_version=0,
            sampling=SamplingSpec(stop=(STOP,)),
            limits=limits,
            outage_s=player.thinking_s,
        )
    except NoMoreAnswers:
        return None
    finally:
        shutdown = getattr(kind, "shutdown", None)
        if shutdown is not None:
            await shutdown()


def by_hand(tools: Sequence[Mapping[str, Any]]) -> str | None:
    """A line of stdin; None at its end. The prompt is shown on a terminal, the line itself where it came from a pipe."""
    if sys.stdin.isatty():
        try:
            return input("> ")
        except EOFError:
            return None
    line = sys.stdin.readline()
    if not line:
        return None
    print(f"> {line.rstrip()}")
    return line.rstrip("\r\n")


def at_random(environment: type, args: Mapping[str, Any], seed: int) -> Answer:
    """Random calls of random tools; where there are none, what `environment.sample_answer(rng, **args)` gives, else a number or a letter."""
    rng = random.Random(seed)
    sample = getattr(environment, "sample_answer", None)

    def answer(tools: Sequence[Mapping[str, Any]]) -> str:
        if tools and rng.random() < 0.8:
            function = rng.choice(tools).get("function", {})
            properties = function.get("parameters", {}).get("properties", {})
            said = f"/{function['name']} {json.dumps({name: _value(rng, schema) for name, schema in properties.items()})}"
        elif sample is not None:
            said = str(sample(rng, **args))
        else:
            said = rng.choice([str(rng.randint(0, 9)), rng.choice("abcxyz")])
        print(f"> {said}")
        return said

    return answer


def spell_call(line: str) -> str:
    """A line as the policy would say it: `/NAME ...` becomes a call, anything else stays."""
    found = _CALL.fullmatch(line.strip())
    if found is None:
        return line
    name, rest = found.groups()
    if rest.startswith("{"):
        return f'{OPEN_TAG}{{"name": {json.dumps(name)}, "arguments": {rest}}}{CLOSE_TAG}'
    try:
        pairs = [part.partition("=") for part in shlex.split(rest)]
    except ValueError as error:
        raise UserError(f"{line!r} cannot be read ({error}); write /{name} key=value, with quotes around spaces") from None
    return OPEN_TAG + call_body(name, {key: _json(value) for key, _, value in pairs}) + CLOSE_TAG


class _Player:
    """The engine's place, taken by whoever answers."""

    def __init__(self, answer: Answer) -> None:
        self.answer = answer
        self.tools: Sequence[Mapping[str, Any]] = ()
        self._thought_s = 0.0
        self._since: float | None = None

    def thinking_s(self) -> float:
        return self._thought_s + (time.monotonic() - self._since if self._since is not None else 0.0)

    async def generate(self, request: GenerateRequest) -> Generation:
        self._since = time.monotonic()
        try:
            said = await SHARED.run(self._say)
        finally:
            self._thought_s, self._since = self.thinking_s(), None
        if said is None:
            raise NoMoreAnswers("no more answers")
        ids = [*map(ord, said.replace("\0", "")), STOP]
        most = request.sampling.max_tokens
        kept = np.array(ids[:most], np.int32)
        return Generation(kept, np.zeros(len(kept), np.float32), np.zeros(len(kept), np.int32), "stop" if len(ids) <= most else "length")

    def _say(self) -> str | None:
        """The next line that can be read; what cannot is told, and another one asked for."""
        while (line := self.answer(self.tools)) is not None:
            try:
                return spell_call(line)
            except UserError as error:
                print(error)
        return None


class _Characters:
    """A renderer over characters, which prints what it is given to render."""

    name, why = "characters", ""
    stop_ids: tuple[int, ...] = (STOP,)

    def open(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]) -> list[int]:
        for tool in tools:
            function = tool.get("function", tool)
            print(f"tool       {_signature(function)}")
        return self._said(messages)

    def delta(self, turn_ids: Sequence[int], messages: Sequence[Message]) -> list[int]:
        return self._said(messages)

    def generation(self) -> list[int]:
        return []

    def parse(self, turn_ids: Sequence[int], tools: Sequence[Mapping[str, Any]]) -> Action:
        return parse_items([part for part in _TAGS.split(self.text(turn_ids)) if part], tools)

    def text(self, turn_ids: Sequence[int]) -> str:
        return "".join(chr(token) for token in turn_ids if token != STOP)

    def encode_turn(self, message: Message) -> list[int]:
        return [*map(ord, str(message["content"])), STOP]

    def count_markers(self, messages: Sequence[Message]) -> int:
        return 0

    def _said(self, messages: Sequence[Message]) -> list[int]:
        for message in messages:
            print(_indented(message["role"], message["content"]))
        return [1, *(ord(character) for message in messages for character in message["content"])]


class _Shown:
    """The environment, its results printed."""

    def __init__(self, environment: Environment, player: _Player) -> None:
        self.environment, self.player = environment, player
        self.__class__ = type(type(environment).__name__, (_Shown,), {})  # failures name the class of the user

    async def reset(self, context: Context) -> Sequence[Message]:
        return await self.environment.reset(context)

    async def step(self, action: Action) -> StepResult:
        result = await self.environment.step(action)
        if isinstance(result, StepResult):
            state = "the end" if result.terminated else "cut off" if result.truncated else "goes on"
            info = f"  {dict(result.info)}" if result.info else ""
            print(f"reward     {result.reward:g}, {state}{info}" if isinstance(result.reward, (int, float)) else f"reward     {result.reward!r}")
            if result.terminated or result.truncated:
                _Characters()._said([message for message in result.observation if isinstance(message, Mapping) and "content" in message])
        return result

    def tools(self) -> Sequence[Mapping[str, Any]]:
        self.player.tools = self.environment.tools()
        return self.player.tools

    async def close(self) -> None:
        await self.environment.close()


def _signature(function: Mapping[str, Any]) -> str:
    parameters = function.get("parameters") or {}
    required = parameters.get("required") or ()
    arguments = [
        f"{name}{'' if name in required else '?'}: {schema.get('type', 'any')}" for name, schema in (parameters.get("properties") or {}).items()
    ]
    about = str(function.get("description") or "").splitlines()
    return f"{function.get('name')}({', '.join(arguments)})" + (f"  {about[0]}" if about else "")


def _indented(role: str, text: str) -> str:
    first, *rest = text.split("\n")
    return "\n".join([f"{role:<10} {first}", *(f"{'':<10} {line}" for line in rest)])


def _value(rng: random.Random, schema: Mapping[str, Any]) -> Any:
    if "enum" in schema:
        return rng.choice(schema["enum"])
    kind = schema.get("type", "string")
    kind = kind if isinstance(kind, str) else kind[0]
    simple = {"integer": rng.randint(0, 9), "number": rng.random(), "boolean": rng.random() < 0.5, "array": [], "object": {}, "null": None}
    return simple.get(kind, rng.choice(["a", "1+1", "x y"]))


def _json(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text
