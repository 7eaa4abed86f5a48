"""Gymnasium environments whose observations and actions can be said in text.

`env=gymnasium env.args.id=FrozenLake-v1` or `env.args.make=module:function`. The five values of `step` are ours as they are; `context.seed` seeds
`reset`; numbers of `info` become metrics. Gymnasium is synchronous, so `make`, `reset`, `step` and `close` run in threads. An answer that is no action of
the environment's is answered with what would be one, and the environment is not stepped.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from sao.environment import Action, Context, Message, StepResult, Task
from sao.environments.text import answer_of, as_json, as_text, opening, plain, row_of, user
from sao.environments.threads import Lane
from sao.errors import ConfigError, EnvironmentFailure
from sao.tasks.target import load_target, one_line

EXTRA = "env=gymnasium needs the package gymnasium; install it with `pip install 'sao-rl[gymnasium]'`"
_NUMBER = re.compile(r"-?\d{1,18}", re.ASCII)
ECHO_CHARS = 80


class NotAnAction(ValueError):
    """The answer names no action; the message is what the policy reads."""


class GymnasiumEnvironment:
    """One episode of a Gymnasium environment.

    id: a registered id (`module:id` imports the module first), or make: `module:function` that returns an environment; kwargs: for either.
    actions: names of a discrete space's actions, in the space's order; numbers are understood as well. system: a system message to put first.
    With kwargs.render_mode=ansi the policy sees what `render` draws, else the observation itself.
    A task row may bring opening messages, and `options` for `reset`.
    """

    def __init__(
        self,
        task: Task,
        *,
        id: str = "",
        make: str = "",
        kwargs: Mapping[str, Any] | None = None,
        actions: Sequence[str] = (),
        system: str = "",
    ) -> None:
        self.row, self.messages = row_of(task.payload)
        self.names = [str(name) for name in actions]
        self.system = system
        self.ill_formed = 0
        self._maker = _maker(id, make, dict(kwargs or {}))
        self._lane = Lane()
        self._env: Any = None

    def tools(self) -> Sequence[Mapping[str, Any]]:
        return ()

    async def reset(self, context: Context) -> Sequence[Message]:
        text = await self._lane.run(lambda: self._reset(context.seed))
        if self.messages:
            *before, last = self.messages
            return [*before, {**last, "content": f"{last['content']}\n{text}"}]
        return opening(self.system, text)

    async def step(self, action: Action) -> StepResult:
        try:
            chosen = read_action(answer_of(action.text), self._env.action_space, self.names)
        except NotAnAction as problem:
            self.ill_formed += 1
            return StepResult([user(f"error: {problem}")], info={"ill_formed": self.ill_formed})
        result = await self._lane.run(lambda: self._step(chosen))
        abandoned = self._lane.threads.abandoned
        info = {**result.info, "ill_formed": self.ill_formed} | ({"abandoned_threads": abandoned} if abandoned else {})
        return StepResult(result.observation, result.reward, result.terminated, result.truncated, info)

    async def close(self) -> None:
        await self._lane.close(self._close)

    @classmethod
    def check_args(
        cls, *, id: str = "", make: str = "", kwargs: Mapping[str, Any] | None = None, actions: Sequence[str] = (), system: str = ""
    ) -> None:
        """Make the environment once. Raises ConfigError when that fails, or when no text can name its actions."""
        env = _maker(id, make, dict(kwargs or {}))()
        try:
            describe(env.action_space, [str(name) for name in actions])
        finally:
            env.close()

    @classmethod
    def generate_payload(cls, rng: random.Random, split: str, **args: Any) -> dict[str, Any]:
        """A task is its seed and nothing else; the source draws those of the two splits apart."""
        return {}

    @classmethod
    def sample_answer(
        cls,
        rng: random.Random,
        *,
        id: str = "",
        make: str = "",
        kwargs: Mapping[str, Any] | None = None,
        actions: Sequence[str] = (),
        system: str = "",
    ) -> str:
        """An action at random, as an answer names it."""
        env = _maker(id, make, dict(kwargs or {}))()
        try:
            env.action_space.seed(rng.getrandbits(31))
            chosen = env.action_space.sample()
        finally:
            env.close()
        return str(actions[int(chosen) - int(env.action_space.start)]) if actions else as_json(chosen)

    def _reset(self, seed: int) -> str:
        try:
            self._env = self._maker()
        except ConfigError as error:  # it could be made before anything started
            raise EnvironmentFailure(str(error)) from error
        options = self.row.get("options")
        value = self._env.reset(seed=seed, options=options)
        if not isinstance(value, tuple) or len(value) != 2:
            raise EnvironmentFailure(f"{_name(self._env)}.reset must return an observation and an info, returned {_shape(value)}")
        return f"{self._seen(value[0])}\n{describe(self._env.action_space, self.names)}".rstrip("\n")

    def _step(self, chosen: Any) -> StepResult:
        value = self._env.step(chosen)
        if not isinstance(value, tuple) or len(value) != 5:
            raise EnvironmentFailure(f"{_name(self._env)}.step must return Gymnasium's five values, returned {_shape(value)}")
        observation, reward, terminated, truncated, info = value
        return StepResult(
            [user(self._seen(observation))], plain(reward), bool(terminated), bool(truncated), info if isinstance(info, Mapping) else {}
        )

    def _seen(self, observation: Any) -> str:
        if getattr(self._env, "render_mode", None) == "ansi":
            return uncoloured(as_text(self._env.render())).strip("\n")
        return as_text(observation)

    def _close(self) -> None:
        if self._env is not None:
            self._env.close()


def describe(space: Any, names: Sequence[str]) -> str:
    """What an answer should be, said to the policy; empty for a space of texts. Raises ConfigError where text can name no action, or the names do not fit."""
    kind = type(space).__name__
    if kind != "Discrete":
        if names:
            raise ConfigError(f"env.args.actions names the actions of a Discrete space, but the action space is {kind}; leave it out")
        if kind == "Text":
            return ""
        if kind in ("MultiDiscrete", "MultiBinary", "Box"):
            return f"Answer with a JSON list of the shape {list(space.shape)}."
        raise ConfigError(
            f"the action space of this Gymnasium environment is {kind}, which text does not name; wrap it, for instance in TransformAction"
        )
    start, count = int(space.start), int(space.n)
    if not names:
        return f"Answer with a number from {start} to {start + count - 1}."
    if len(names) != count or len(set(map(str.lower, names))) != count:
        raise ConfigError(f"env.args.actions has {len(names)} names, but the space has {count} actions; give each one its own name")
    return f"Answer with one of: {', '.join(names)}."


def read_action(text: str, space: Any, names: Sequence[str]) -> Any:
    """The action that `text`, or else its last line, names. Raises NotAnAction."""
    kind = type(space).__name__
    if kind == "Text":
        if not space.contains(text):
            raise NotAnAction(f"not a text of {space.min_length} to {space.max_length} of the allowed characters: {_clip(text)}")
        return text
    if kind == "Discrete":
        for said in (text, text.rsplit("\n", 1)[-1].strip()):
            chosen = _discrete(said.rstrip(".!"), space, names)
            if chosen is not None:
                return chosen
        raise NotAnAction(f"{_clip(text)} is no action. {describe(space, names)}")
    return _array(text, space)


def _discrete(said: str, space: Any, names: Sequence[str]) -> int | None:
    start = int(space.start)
    lowered = [name.lower() for name in names]
    if said.lower() in lowered:
        return start + lowered.index(said.lower())
    if _NUMBER.fullmatch(said) and start <= int(said) < start + int(space.n):
        return int(said)
    return None


def _array(text: str, space: Any) -> Any:
    import numpy as np

    try:
        value = np.asarray(json.loads(text), dtype=space.dtype)
    except (ValueError, TypeError, OverflowError, RecursionError):
        raise NotAnAction(f"{_clip(text)} is no list of numbers. {describe(space, ())}") from None
    if not space.contains(value):
        raise NotAnAction(f"{_clip(text)} lies outside {space}. {describe(space, ())}")
    return value


def uncoloured(text: str) -> str:
    """A drawing without its terminal colours, which mark what matters in toy-text: a highlighted character becomes [X], a coloured one (X)."""
    text = re.sub(r"\x1b\[4\d(?:;\d+)*m(.*?)\x1b\[0m", r"[\1]", text)
    text = re.sub(r"\x1b\[3\d(?:;\d+)*m(.*?)\x1b\[0m", r"(\1)", text)
    return re.sub(r"\x1b\[[\d;]*m", "", text)


def _maker(id: str, make: str, kwargs: dict[str, Any]) -> Callable[[], Any]:
    """What imports the package or the function and builds the environment. Raises ConfigError naming the key, as the callable does."""
    if bool(id) == bool(make):
        raise ConfigError("env=gymnasium needs env.args.id=ID of a registered environment, or env.args.make=module:function, one of them")
    return lambda: _made(id, make, kwargs)


def _made(id: str, make: str, kwargs: dict[str, Any]) -> Any:
    key = f"env.args.id={id}" if id else f"env.args.make={make}"
    if make:
        build = load_target(make, "env.args.make")
    else:
        try:
            import gymnasium
        except ImportError:
            raise ConfigError(EXTRA) from None
        build = partial(gymnasium.make, id)
    try:
        env = build(**kwargs)
    except Exception as error:
        raise ConfigError(f"{key} could not be made ({one_line(error)}); mend the id, env.args.kwargs, or install what it needs") from error
    missing = [name for name in ("reset", "step", "close", "action_space") if not hasattr(env, name)]
    if missing:
        raise ConfigError(f"{key} made a {type(env).__name__}, which is no Gymnasium environment: it has no {', '.join(missing)}")
    return env


def _name(env: Any) -> str:
    return type(getattr(env, "unwrapped", env)).__name__


def _shape(value: Any) -> str:
    return f"{len(value)} values" if isinstance(value, tuple) else type(value).__name__


def _clip(text: str) -> str:
    return repr(text if len(text) <= ECHO_CHARS else f"{text[: ECHO_CHARS - 3]}...")
