"""A plain class whose public methods are tools: the convention of TRL's `environment_factory`.

    class Shop:
        def reset(self, **row) -> str | None: ...     # columns of the task's row; a text it returns ends the opening
        def buy(self, item: str, count: int = 1) -> str:
            \"\"\"Buy something.

            Args:
                item: what to buy
                count: how many
            \"\"\"

`env=tools env.args.cls=my_module:Shop data.path=tasks.jsonl`. Methods may be coroutines; others run in threads. The policy calls tools until a turn
without a call, which ends the episode, as does `done` when the object has it and it is true.

What a tool method raises: a ValueError (also a subclass), or an exception of a class called ToolError, is the tool's answer (`error: ...`); anything else is a
failure of the environment, typed and never a reward.

The reward is that of `reward.function` where one is named, given the last turn's text and the row; else the object's own `get_reward()`, `reward()` or
`reward`, read after each turn: a turn's reward is by how much it rose, so an episode that is cut off keeps what it had.
"""

from __future__ import annotations

import asyncio
import inspect
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from sao.environment import Action, Context, Message, StepResult, Task, ToolCall
from sao.environments.signatures import BadArgument, Method, convert, read_method
from sao.environments.text import as_json, plain, row_of, user
from sao.environments.threads import Lane
from sao.errors import ConfigError, EnvironmentFailure
from sao.rewards.function import as_score
from sao.rewards.preflight import reward_config
from sao.rewards.runner import close_shared, shared_runner
from sao.tasks.target import load_target

NOT_TOOLS = ("reset", "close", "reward", "get_reward")
REWARDS = ("get_reward", "reward")


class ToolsEnvironment:
    """One episode of an object of a plain class.

    cls: `module:Class`. kwargs: of its constructor. system: a system message to put first where the row brings none. reward: the run's reward group.
    """

    def __init__(
        self, task: Task, *, cls: str, kwargs: Mapping[str, Any] | None = None, system: str = "", reward: Mapping[str, Any] | None = None
    ) -> None:
        self.row, self.messages = row_of(task.payload)
        if system and (not self.messages or self.messages[0]["role"] not in ("system", "developer")):
            self.messages.insert(0, {"role": "system", "content": system})
        self.target = cls
        self.methods: dict[str, Method] = {}
        self.kwargs = dict(kwargs or {})
        self.object: Any = None
        self.calls = self.errors = 0
        self._runner = shared_runner(reward_config(dict(reward))) if reward else None
        self._rewarded = 0.0
        self._lane = Lane()

    def tools(self) -> Sequence[Mapping[str, Any]]:
        return [method.schema for method in self.methods.values()]

    async def reset(self, context: Context) -> Sequence[Message]:
        said = await self._lane.run(lambda: self._reset(context.seed))
        if inspect.isawaitable(said):
            said = await said
        if isinstance(said, list):
            self.messages += said
        elif said is not None:
            text = as_json(said)
            if self.messages and self.messages[-1]["role"] == "user":
                last = self.messages[-1]
                self.messages[-1] = {**last, "content": f"{last['content']}\n{text}"}
            else:
                self.messages.append(user(text))
        if self._runner is None and not any(hasattr(self.object, name) for name in REWARDS):
            raise EnvironmentFailure(
                f"{self._name} has no reward after reset: set self.reward, write get_reward(self), or name a reward=module:function"
            )
        if not any(message["role"] == "user" for message in self.messages):
            raise EnvironmentFailure(f"{self._name}.reset returned no text and the task has no prompt; one of them must say what to do")
        return self.messages

    async def step(self, action: Action) -> StepResult:
        observation: list[Message] = []
        for call in action.tool_calls:
            message: Message = {"role": "tool", "name": call.name, "content": await self._call(call)}
            observation.append({**message, "tool_call_id": call.call_id} if call.call_id else message)
        ended = not action.tool_calls or bool(getattr(self.object, "done", False))
        reward = await self._reward(action.text, ended)
        info = {"calls": self.calls, "errors": self.errors} | ({"abandoned_threads": n} if (n := self._lane.threads.abandoned) else {})
        return StepResult(observation, reward, terminated=ended, info=info)

    async def close(self) -> None:
        if inspect.iscoroutinefunction(getattr(self.object, "close", None)):
            await self.object.close()
        else:
            await self._lane.close(self._close)

    @classmethod
    async def shutdown(cls) -> None:
        await asyncio.to_thread(close_shared)

    @classmethod
    def check_args(cls_, *, cls: str, kwargs: Mapping[str, Any] | None = None, system: str = "", reward: Mapping[str, Any] | None = None) -> None:
        """Read the class. Raises ConfigError when it has no reset, no tool, a tool no schema can say, or a constructor that kwargs do not fit."""
        found = _load(cls)
        if not methods_of(found, f"env.args.cls={cls}"):
            raise ConfigError(f"env.args.cls={cls} has no public method beside {', '.join(NOT_TOOLS)}, so there is no tool; write one")
        try:
            inspect.signature(found).bind(**dict(kwargs or {}))
        except TypeError as error:
            raise ConfigError(f"env.args.kwargs do not fit {cls}: {error}") from None

    @classmethod
    def generate_payload(cls_, rng: random.Random, split: str, *, cls: str, **args: Any) -> dict[str, Any]:
        """The class's own tasks, from its `generate_payload(rng, split)`. Raises ConfigError when it has none."""
        generate = getattr(_load(cls), "generate_payload", None)
        if generate is None:
            raise ConfigError(
                f"env.args.cls={cls} makes no tasks of its own; set data.path (in a mixture env.data_path) or write generate_payload(rng, split)"
            )
        return dict(generate(rng, split))

    def _reset(self, seed: int) -> Any:
        made_of = _load(self.target)
        self.methods = {method.name: method for method in methods_of(made_of, f"env.args.cls={self.target}")}
        self.object = made_of(**self.kwargs)
        parameters = inspect.signature(self.object.reset).parameters
        takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
        columns = {name: value for name, value in self.row.items() if takes_any or name in parameters}
        if "seed" in parameters and "seed" not in columns:
            columns["seed"] = seed
        return self.object.reset(**columns)

    @property
    def _name(self) -> str:
        return self.target.rpartition(":")[2]

    def _close(self) -> None:
        ending = getattr(self.object, "close", None)
        if ending is not None:
            ending()

    async def _call(self, call: ToolCall) -> str:
        """One call's answer. Raises whatever a method raises that is not meant for the policy."""
        method = self.methods[call.name]
        self.calls += 1
        try:
            arguments = {name: convert(value, method.hints[name], name) for name, value in call.arguments.items() if name in method.hints}
            return as_json(await self._invoke(method, arguments))
        except BadArgument as problem:
            self.errors += 1
            return f"error: {call.name}: {problem}"
        except Exception as problem:
            if not _for_the_policy(problem):
                raise
            self.errors += 1
            return f"error: {problem}"

    async def _invoke(self, method: Method, arguments: Mapping[str, Any]) -> Any:
        bound: Callable[..., Any] = getattr(self.object, method.name)
        return await bound(**arguments) if method.is_async else await self._lane.run(lambda: bound(**arguments))

    async def _reward(self, text: str, ended: bool) -> float:
        if self._runner is not None:
            return await self._runner.score(text, self.row, messages=self.messages) if ended else 0.0
        value = next((found for name in REWARDS if (found := getattr(self.object, name, None)) is not None), None)
        if callable(value):
            function = value
            value = await function() if inspect.iscoroutinefunction(function) else await self._lane.run(function)
        if value is None:
            if ended:
                raise EnvironmentFailure(f"{self._name} has no reward at the end of the episode: set self.reward, or return it from get_reward()")
            return 0.0
        try:
            score = as_score(plain(value))
        except ValueError as error:
            raise EnvironmentFailure(f"the reward of {self._name} {error}") from None
        rise, self._rewarded = score - self._rewarded, score
        return rise


def methods_of(made_of: type, where: str) -> list[Method]:
    """The tools of a class: its public functions, inherited ones included, in the order they are written. Raises ConfigError for one no schema can say."""
    found: dict[str, Any] = {}
    for base in reversed(made_of.__mro__[:-1]):
        for name, value in vars(base).items():
            if name.startswith("_") or name in NOT_TOOLS:
                continue
            if inspect.isfunction(value):
                found[name] = value
            else:
                found.pop(name, None)
    return [read_method(name, function, where) for name, function in found.items()]


def _load(target: str) -> type:
    made_of = load_target(target, "env.args.cls")
    if not inspect.isclass(made_of):
        raise ConfigError(f"env.args.cls={target} is not a class; name the class whose public methods are the tools")
    if not callable(getattr(made_of, "reset", None)):
        raise ConfigError(f"env.args.cls={target} has no reset; write `def reset(self, **row)`, which starts an episode and may return a text")
    return made_of


def _for_the_policy(problem: Exception) -> bool:
    return isinstance(problem, ValueError) or any(kind.__name__ == "ToolError" for kind in type(problem).__mro__)
