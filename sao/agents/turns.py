"""The turn loop: one task, one environment, one episode, one trajectory.

    opening -> [ sample -> parse -> environment.step -> append the delta ]* -> Trajectory

The token log is the truth: prompt(t+1) = prompt(t) + sampled(t) + delta(t). What the loop answers itself: malformed tool calls (a tool
message with the error), and the close of a turn that the length limit cut off. Where the environment has no tools a turn is text, whatever it spells.

How an episode ends:

    terminal                     the environment said so
    truncated: turns             the turn limit, or the environment's own `truncated`; reward so far is kept
    truncated: tokens            no room for another token of the episode or of the context
    truncated: time              the deadline passed while sampling or in the environment; reward so far is kept
    failed: prompt_too_long      the opening leaves no room for a token (info["failure"] has the numbers); a retry cannot mend it
    failed: no_action_tokens     nothing trainable was sampled
    failed: time_limit           the deadline passed before the first token
                                 (of either, time in which no engine was there to ask does not count)
    raises SystemFailure         something broke: EngineFailure, EnvironmentFailure, RewardFailure, ...; `sampled_tokens` says what is lost
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeVar

from sao.agents.observations import check_messages, check_step, check_tools, cut_message, number_items
from sao.agents.renderer import Fork, Renderer
from sao.agents.token_log import TokenLog, place_turn_rewards
from sao.environment import Action, Context, Environment, Message, ParseError, StepResult, Task
from sao.errors import EngineFailure, EnvironmentFailure, SystemFailure, UserError
from sao.inference.protocol import GenerateRequest, Generation
from sao.timeouts import time_limit
from sao.trajectory import EpisodeId, FinishReason, Purpose, SamplingSpec, Trajectory, TurnTiming

Generate = Callable[[GenerateRequest], Awaitable[Generation]]
CLOSE_TIMEOUT_S = 10.0

_T = TypeVar("_T")
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Limits:
    """What bounds an episode.

    max_turns; max_turn_tokens sampled in one turn; max_tokens of the whole episode, prompt included; max_model_len of one segment (0: none);
    time_limit_s from start to end; observation_limit characters of one message of a step (0: none). answer_grace_s: how long after the deadline an
    engine, which ends the request then, may take to hand over what it sampled.
    """

    max_turns: int = 8
    max_turn_tokens: int = 256
    max_tokens: int = 2048
    max_model_len: int = 0
    time_limit_s: float = 60.0
    observation_limit: int = 4096
    answer_grace_s: float = 3.0


class _OutOfTime(Exception):
    """The episode's deadline passed."""


@dataclass
class _Turn:
    """One turn while it runs."""

    ids: list[int] = field(default_factory=list)
    at: int = 0  # position of its last token in its segment
    reward: float = 0.0
    queue_s: float = 0.0
    generate_s: float = 0.0
    environment_s: float = 0.0
    prompt_tokens: int = 0
    cached_tokens: int = 0

    def timing(self) -> TurnTiming:
        return TurnTiming(self.queue_s, self.generate_s, self.environment_s, self.prompt_tokens, self.cached_tokens, len(self.ids))


async def run_episode(
    task: Task,
    environment: Environment,
    renderer: Renderer,
    generate: Generate,
    *,
    episode_id: EpisodeId | tuple[int, int],
    admitted_version: int,
    sampling: SamplingSpec,
    limits: Limits,
    purpose: Purpose = "train",
    pinned_version: int | None = None,
    sandbox: Any = None,
    ask: Callable[..., Awaitable[str]] | None = None,
    outage_s: Callable[[], float] = lambda: 0.0,
) -> Trajectory:
    """Run one episode and close its environment, exactly once, whatever happens.

    `environment` is fresh, built for `task`. `sampling` gives the distribution; its `stop` joins the renderer's stop ids, its `max_tokens` gives
    way to `limits`, and its seed, if any, is varied per request. `sandbox` and `ask` reach the environment as Context.sandbox and Context.generate.
    `outage_s`: cumulative seconds in which there was no engine; while it grows, the episode's clock stands.
    Raises SystemFailure subclasses with `sampled_tokens` and `trajectory` set; UserError passes through; cancellation passes through after closing.
    """
    stop = tuple(dict.fromkeys([*renderer.stop_ids, *sampling.stop]))
    episode = _Episode(
        task=task,
        environment=environment,
        renderer=renderer,
        generate=generate,
        session=f"{purpose}-{EpisodeId(*episode_id)}",
        sampling=replace(sampling, stop=stop, max_tokens=limits.max_turn_tokens),
        limits=limits,
        purpose=purpose,
        pinned_version=pinned_version,
        outage_s=outage_s,
    )
    try:
        try:
            finish = await episode.play(sandbox, ask)
        finally:
            await episode.close()
    except SystemFailure as failure:
        failure.sampled_tokens = episode.log.sampled_tokens
        if episode.log.total:
            episode.failure = str(failure)
            failure.trajectory = episode.trajectory(EpisodeId(*episode_id), admitted_version, FinishReason.failed(failure.reason))
        raise
    return episode.trajectory(EpisodeId(*episode_id), admitted_version, finish)


@dataclass
class _Episode:
    task: Task
    environment: Environment
    renderer: Renderer
    generate: Generate
    session: str
    sampling: SamplingSpec
    limits: Limits
    purpose: Purpose
    pinned_version: int | None
    outage_s: Callable[[], float]
    log: TokenLog = field(default_factory=lambda: TokenLog(()))
    turns: list[_Turn] = field(default_factory=list)
    history: list[Message] = field(default_factory=list)
    tools: Sequence[Mapping[str, Any]] = ()
    counts: Counter[str] = field(default_factory=Counter)
    reported: dict[str, float] = field(default_factory=dict)
    failure: str = ""
    exhausted: bool = False
    requests: int = 0

    def __post_init__(self) -> None:
        self.name = type(self.environment).__name__
        self.deadline = time.monotonic() + self.limits.time_limit_s
        self.outage_before_s = self.outage_s()

    async def play(self, sandbox: Any, ask: Callable[..., Awaitable[str]] | None) -> FinishReason:
        context = Context(seed=self.task.seed, sandbox=sandbox, generate=ask, deadline=self.deadline)
        try:
            opening = await self._ask_environment("reset", lambda: self.environment.reset(context))
        except _OutOfTime:
            raise EnvironmentFailure(f"{self.name}.reset did not return within {self.limits.time_limit_s:g} s (rollout.time_limit_s)") from None
        messages = check_messages(opening, f"{self.name}.reset")
        if not messages:
            raise EnvironmentFailure(f"{self.name}.reset returned no message")
        try:
            tools = self.environment.tools()
        except (SystemFailure, UserError):
            raise
        except Exception as problem:
            raise self._raised("tools", problem) from problem
        self.tools = check_tools(tools, f"{self.name}.tools")
        self._remember(messages)
        prompt = self.renderer.open(self.history, self.tools)
        self.log = TokenLog(prompt)
        if self._room() <= 0:
            where = [f"rollout.max_tokens={self.limits.max_tokens}"]
            where += [f"engine.max_model_len={self.limits.max_model_len}"] if self.limits.max_model_len > 0 else []
            self.failure = f"the prompt of task {self.task.task_id} has {len(prompt)} tokens and leaves no room in {' and '.join(where)}"
            return FinishReason.failed("prompt_too_long")
        try:
            return await self._play_turns()
        except _OutOfTime:
            if self.log.sampled_tokens:
                return FinishReason.truncated("time")
            self.failure = f"no token was sampled within {self.limits.time_limit_s:g} s (rollout.time_limit_s)"
            return FinishReason.failed("time_limit")

    async def _play_turns(self) -> FinishReason:
        for index in range(self.limits.max_turns):
            turn = _Turn()
            self.turns.append(turn)
            try:
                cut = await self._sample(turn)
            finally:
                self.history.append({"role": "assistant", "content": self.renderer.text(turn.ids)})
            if cut and self._room() <= 0:
                return FinishReason.truncated("tokens")
            action = self.renderer.parse(turn.ids, self.tools) if self.tools else Action(text=self.renderer.text(turn.ids))
            result = await self._answer(turn, _never_execute(action) if cut else action, cut)
            if result.terminated:
                return FinishReason.terminal()
            if result.truncated:
                break
            if index + 1 < self.limits.max_turns and not self._extend(turn, result.observation):
                return FinishReason.truncated("tokens")
        return FinishReason.truncated("turns")

    async def _sample(self, turn: _Turn) -> bool:
        """Sample one turn, over several calls where the engine gives the request back; returns whether a length limit cut it off."""
        turn.at = self.log.position[1]
        budget = min(self.limits.max_turn_tokens, self._room())
        empty = 0
        while len(turn.ids) < budget:
            remaining = budget - len(turn.ids)
            generation = await self._ask_engine(turn, remaining)
            turn.ids += [int(token) for token in generation.token_ids]
            turn.at = self.log.position[1]
            if turn.ids and turn.ids[-1] in self.sampling.stop:
                return False
            if generation.finish == "time":
                raise _OutOfTime
            if generation.finish != "drained":
                if generation.finish == "length" and len(turn.ids) < budget:
                    # The engine's context is shorter than the limits say (max_model_len 0: not given): no more of it either.
                    self.exhausted = True
                return generation.finish == "length"
            empty = 0 if len(generation.token_ids) else empty + 1
            pause = min(0.01 * empty, 1.0)
            # An engine that keeps giving the request back untouched must not be asked in a busy loop; the deadline ends it.
            await self._within(partial(asyncio.sleep, pause))
        return True

    async def _ask_engine(self, turn: _Turn, remaining: int) -> Generation:
        seed = self.sampling.seed
        request = GenerateRequest(
            request_id=f"{self.session}/{len(self.turns) - 1}.{self.requests}",
            token_ids=self.log.prompt(),
            sampling=replace(self.sampling, max_tokens=remaining, seed=None if seed is None else (seed + self.requests * 1_000_003) % 2**31),
            session=self.session,
            workload=self.task.workload,
            purpose=self.purpose,
            pinned_version=self.pinned_version,
            time_limit_s=self._time_left(),
        )
        self.requests += 1
        began = time.monotonic()
        generation: Generation | None = None
        try:
            generation = await self._within(lambda: self.generate(request), self.limits.answer_grace_s)
        except (SystemFailure, UserError, _OutOfTime):
            raise
        except Exception as problem:
            raise EngineFailure(f"generate raised {type(problem).__name__}: {_short(problem)}") from problem
        finally:
            waited = time.monotonic() - began
            turn.queue_s += generation.queue_s if generation else 0.0
            turn.generate_s += (generation.generate_s if generation else 0.0) or waited - (generation.queue_s if generation else 0.0)
        _check_generation(generation, remaining)
        turn.prompt_tokens += generation.prompt_tokens or len(request.token_ids)
        turn.cached_tokens += generation.cached_tokens
        self.log.sampled(generation)
        return generation

    async def _answer(self, turn: _Turn, action: Action, cut: bool) -> StepResult:
        """The environment's answer with the loop's own: a turn of malformed calls alone does not reach the environment."""
        errors = [{"role": "tool", "name": error.name, "content": error.message} for error in action.parse_errors]
        self.counts.update(f"parse_errors/{error.kind}" for error in action.parse_errors)
        if errors and not action.tool_calls and not cut:
            result = StepResult()
        else:
            began = time.monotonic()
            try:
                answer = await self._ask_environment("step", lambda: self.environment.step(action))
            finally:
                turn.environment_s += time.monotonic() - began
            result = check_step(answer, f"{self.name}.step")
            self.counts["tool_calls"] += len(action.tool_calls)
            self.reported.update(number_items(result.info))
        turn.reward = result.reward
        messages = [cut_message(message, self.limits.observation_limit) for message in [*result.observation, *errors]]
        self.counts["observations_cut"] += sum(a is not b for a, b in zip(messages, [*result.observation, *errors], strict=True))
        self._remember(messages)
        return replace(result, observation=messages)

    def _extend(self, turn: _Turn, messages: Sequence[Message]) -> bool:
        """Append what follows a turn; false, and nothing appended, where it would leave no room to sample."""
        self.counts["forced_closes"] += not turn.ids or turn.ids[-1] not in self.renderer.stop_ids
        delta = self.renderer.delta(turn.ids, messages)
        if not isinstance(delta, Fork):
            if self._room() <= len(delta):
                return False
            self.log.context(delta)
            return True
        prompt = self.renderer.open(self.history, self.tools)
        if self._room(len(prompt) - self.log.shared(prompt), len(prompt)) <= 0:
            return False
        self.log.fork(prompt)
        self.counts["segments/forked"] += 1
        self.counts[f"segments/forked/{delta.reason}"] += 1
        return True

    def _room(self, more: int = 0, length: int | None = None) -> int:
        """Tokens that may still be added, after `more` new ones, in a segment of `length` (default: the one being written)."""
        if self.exhausted:
            return 0
        room = self.limits.max_tokens - self.log.total - more
        if self.limits.max_model_len > 0:
            room = min(room, self.limits.max_model_len - (len(self.log) if length is None else length))
        return room

    def _remember(self, messages: Sequence[Message]) -> None:
        self.history += messages
        self.counts["control_hits"] += self.renderer.count_markers(messages)

    async def _ask_environment(self, method: str, call: Callable[[], Awaitable[_T]]) -> _T:
        try:
            return await self._within(call)
        except _OutOfTime:
            if method == "step":
                # The policy has done its part: what its turn was worth is unknown, which is not the same as worth nothing.
                limit = f"rollout.time_limit_s={self.limits.time_limit_s:g}"
                raise EnvironmentFailure(
                    f"{self.name}.step had not answered task {self.task.task_id} when the episode's time was up ({limit})"
                ) from None
            raise
        except (SystemFailure, UserError):
            raise
        except Exception as problem:
            raise self._raised(method, problem) from problem

    def _raised(self, method: str, problem: BaseException) -> EnvironmentFailure:
        return EnvironmentFailure(f"{self.name}.{method} raised {type(problem).__name__} on task {self.task.task_id}: {_short(problem)}")

    def _time_left(self) -> float:
        left = self.deadline + self.outage_s() - self.outage_before_s - time.monotonic()
        if left <= 0:
            raise _OutOfTime
        return left

    async def _within(self, call: Callable[[], Awaitable[_T]], grace_s: float = 0.0) -> _T:
        """Await `call()` until the deadline (and `grace_s` more); a cancellation that nobody asked of this task is an error of the callee, not the end of the worker."""
        limit = time_limit(self._time_left() + grace_s, self.outage_s)
        try:
            async with limit as scope:
                return await call()
        except TimeoutError:
            if scope.expired():
                raise _OutOfTime from None
            raise
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            raise RuntimeError("it was cancelled from within") from None

    async def close(self) -> None:
        """Close the environment. A failing close costs a warning and a count, not the episode's data."""
        try:
            async with asyncio.timeout(CLOSE_TIMEOUT_S):
                await self.environment.close()
        except Exception as problem:  # noqa: BLE001 - the trajectory is whole; the log has the traceback
            self.counts["close_failed"] += 1
            _log.warning("%s.close of task %s raised %s", self.name, self.task.task_id, type(problem).__name__, exc_info=True)

    def trajectory(self, episode_id: EpisodeId, admitted_version: int, finish: FinishReason) -> Trajectory:
        segments = self.log.segments(self.sampling)
        if finish.kind != "failed" and not any(segment.action_tokens for segment in segments):
            finish = FinishReason.failed("no_action_tokens")
            self.failure = f"{self.log.sampled_tokens} tokens were sampled, none with a finite log-prob"
        rewards = [turn.reward for turn in self.turns]
        reward, turn_rewards = sum(rewards), None
        if finish.kind != "failed" and len(segments) == 1 and segments[0].action_tokens and any(rewards[:-1]):
            turn_rewards = place_turn_rewards(segments[0], [(turn.at, turn.reward) for turn in self.turns])
            reward = float(turn_rewards.sum())
        info: dict[str, Any] = {
            "messages": [{"role": message["role"], "content": message["content"]} for message in self.history],
            "parse_errors": {key.split("/")[1]: count for key, count in self.counts.items() if key.startswith("parse_errors/")},
            "control_hits": self.counts["control_hits"],
        }
        if self.failure:
            info["failure"] = self.failure
        metrics = {"turns": float(len(self.turns)), "tool_calls": float(self.counts["tool_calls"])}
        metrics |= {key: float(count) for key, count in self.counts.items() if count}
        metrics |= {"missing_logprobs": float(self.log.missing_logprobs)} if self.log.missing_logprobs else {}
        return Trajectory(
            episode_id=episode_id,
            task_id=self.task.task_id,
            environment=self.task.environment,
            segments=segments,
            reward=reward,
            finish=finish,
            admitted_version=admitted_version,
            workload=self.task.workload,
            turn_rewards=turn_rewards,
            timings=tuple(turn.timing() for turn in self.turns),
            metrics=metrics | {f"env/{key}": value for key, value in self.reported.items()},
            info=info,
        )


def _never_execute(action: Action) -> Action:
    """A turn cut off by length: its calls are answered as errors, none is executed."""
    message = "error: the turn was cut off by its length limit, so this call was not executed"
    cut = [ParseError("unclosed", message, call.name) for call in action.tool_calls]
    return Action(text=action.text, parse_errors=(*cut, *action.parse_errors))


def _check_generation(generation: Generation, remaining: int) -> None:
    count = len(generation.token_ids)
    if len(generation.logprobs) != count or len(generation.versions) != count:
        lengths = f"{len(generation.logprobs)} log-probs and {len(generation.versions)} versions"
        raise EngineFailure(f"engine {generation.engine} returned {count} tokens with {lengths}")
    if count > remaining:
        raise EngineFailure(f"engine {generation.engine} returned {count} tokens where {remaining} were left of the budget")
    if generation.finish is None:
        raise EngineFailure(f"engine {generation.engine} returned an answer without a finish reason")
    if count and (min(generation.versions) < 0 or min(generation.token_ids) < 0):
        raise EngineFailure(f"engine {generation.engine} returned a negative token id or version")


def _short(problem: BaseException) -> str:
    text = str(problem)
    return text if len(text) <= 300 else f"{text[:297]}..."
