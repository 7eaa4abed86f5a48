"""The turn loop: one task, one environment, one episode, one trajectory.

    opening -> [ sample -> parse -> environment.step -> append the delta, or compact ]* -> Trajectory

The token log is the truth: prompt(t+1) = prompt(t) + sampled(t) + delta(t). What the loop answers itself: malformed tool calls (a tool
message with the error), and the close of a turn that the length limit cut off. Where the environment has no tools a turn is text, whatever it spells.

How an episode ends:

    terminal                     the environment said so
    truncated: turns             the turn limit, or the environment's own `truncated`; reward so far is kept
    truncated: tokens            no room for another token of the episode or, compaction or not, of the context
    truncated: time              the deadline passed while sampling or in the environment; reward so far is kept
    failed: prompt_too_long      the opening leaves no room for a token (info["failure"] has the numbers); a retry cannot mend it
    failed: no_action_tokens     nothing trainable was sampled
    failed: time_limit           the deadline passed before the first token
                                 (of either, time in which no engine was there to ask does not count)
    raises SystemFailure         something broke: EngineFailure, EnvironmentFailure, RewardFailure, ...; `sampled_tokens` says what is lost

Compaction: when the next prompt is too long, the policy is asked for a summary in the segment it has, and goes on from that in a new one. The summary
is a turn like others, sampled and trained where it was sampled; only the environment never sees it.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from sao.agents.clock import Clock, OutOfTime
from sao.agents.conversation import Conversation, characters, summary_message, summary_text
from sao.agents.guarded import Guarded
from sao.agents.limits import Limits
from sao.agents.observations import Cut, number_items
from sao.agents.renderer import Fork, Renderer
from sao.agents.sampling import Generate, Sampler, Turn
from sao.agents.token_log import TokenLog, place_turn_rewards
from sao.environment import Action, Context, Environment, Message, ParseError, StepResult, Task
from sao.errors import SystemFailure
from sao.trajectory import EpisodeId, FinishReason, Purpose, SamplingSpec, Trajectory

# Text longer than this many characters a token of room is not encoded to see that it does not fit: five megabytes would hold the event loop for seconds.
CHARACTERS_PER_TOKEN = 16


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
    record: Callable[[str], None] = lambda method: None,
) -> Trajectory:
    """Run one episode and close its environment, exactly once, whatever happens.

    `environment` is fresh, built for `task`. `sampling` gives the distribution; its `stop` joins the renderer's stop ids, its `max_tokens` gives
    way to `limits`, and its seed, if any, is varied per request. `sandbox` and `ask` reach the environment as Context.sandbox and Context.generate.
    `outage_s`: cumulative seconds in which there was no engine; while it grows, the episode's clock stands. `record` hears which method of the
    environment runs ("Class.step"), and "" when none does.
    Raises SystemFailure subclasses with `sampled_tokens` and `trajectory` set; UserError passes through; cancellation passes through after closing.
    """
    stop = tuple(dict.fromkeys([*renderer.stop_ids, *sampling.stop]))
    spec = replace(sampling, stop=stop, max_tokens=limits.max_turn_tokens)
    clock = Clock(limits.time_limit_s, outage_s)
    session = f"{purpose}-{EpisodeId(*episode_id)}"
    episode = _Episode(
        task=task,
        environment=Guarded(environment, task, clock, record),
        renderer=renderer,
        sampler=Sampler(generate, clock, task, session, spec, purpose, pinned_version, limits.answer_grace_s),
        limits=limits,
        clock=clock,
    )
    try:
        try:
            finish = await episode.play(sandbox, ask)
        finally:
            episode.counts["close_failed"] += not await episode.environment.close()
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
    environment: Guarded
    renderer: Renderer
    sampler: Sampler
    limits: Limits
    clock: Clock
    log: TokenLog = field(default_factory=lambda: TokenLog(()))
    turns: list[Turn] = field(default_factory=list)  # summaries too
    counts: Counter[str] = field(default_factory=Counter)
    reported: dict[str, float] = field(default_factory=dict)
    failure: str = ""

    def __post_init__(self) -> None:
        self.talk = Conversation(self.renderer, [], [])
        limits = self.limits
        self.cut = Cut(limits.observation_limit, limits.observation_tokens, limits.observation_keep, self.renderer)
        self.request: Message = {"role": "user", "content": limits.compaction.prompt if limits.compaction else ""}
        self.asking = self._asking() if limits.compaction else 0

    async def play(self, sandbox: Any, ask: Callable[..., Awaitable[str]] | None) -> FinishReason:
        context = Context(seed=self.task.seed, sandbox=sandbox, generate=ask, deadline=self.clock.deadline)
        messages = await self.environment.reset(context)
        tools = self.environment.tools()
        long = characters(messages, tools)
        if long > CHARACTERS_PER_TOKEN * self._context():
            texts = ({"role": message["role"], "content": message["content"]} for message in messages)
            self.talk = Conversation(self.renderer, [self.cut.shortened(message) for message in texts], [])
            return self._prompt_too_long(f"{long} characters")
        self.talk = Conversation(self.renderer, messages, tools)
        self._count_markers(messages)
        self.log = TokenLog(self.talk.prompt())
        if self._room() <= 0:
            return self._prompt_too_long(f"{len(self.log)} tokens")
        try:
            return await self._play_turns()
        except OutOfTime:
            if self.log.sampled_tokens:
                return FinishReason.truncated("time")
            self.failure = f"no token was sampled within {self.limits.time_limit_s:g} s (rollout.time_limit_s)"
            return FinishReason.failed("time_limit")

    def _prompt_too_long(self, length: str) -> FinishReason:
        limits = {
            "rollout.max_tokens": self.limits.max_tokens,
            "engine.max_model_len": self.limits.max_model_len,
            "rollout.context_tokens": self.limits.context_tokens,
        }
        where = " and ".join(f"{key}={value}" for key, value in limits.items() if value > 0)
        self.failure = f"the prompt of task {self.task.task_id} has {length} and leaves no room in {where}"
        return FinishReason.failed("prompt_too_long")

    async def _play_turns(self) -> FinishReason:
        for index in range(self.limits.max_turns):
            turn = Turn()
            self.talk.window.append(turn)
            cut = await self._sample(turn, min(self.limits.max_turn_tokens, self._room()))
            if cut and self._room() <= 0:
                return FinishReason.truncated("tokens")
            action = self.renderer.parse(turn.ids, self.talk.tools) if self.talk.tools else Action(text=self.renderer.text(turn.ids))
            result = await self._answer(turn, _never_execute(action) if cut else action, cut)
            if result.terminated:
                return FinishReason.terminal()
            if result.truncated:
                break
            if index + 1 < self.limits.max_turns and not await self._extend(turn):
                return FinishReason.truncated("tokens")
        return FinishReason.truncated("turns")

    async def _sample(self, turn: Turn, budget: int) -> bool:
        self.turns.append(turn)
        try:
            return await self.sampler.sample(turn, self.log, budget)
        finally:
            turn.said = self.talk.add({"role": "assistant", "content": self.renderer.text(turn.ids)})

    async def _answer(self, turn: Turn, action: Action, cut: bool) -> StepResult:
        """The environment's answer with the loop's own: a turn of malformed calls alone does not reach the environment."""
        errors = [{"role": "tool", "name": error.name, "content": error.message} for error in action.parse_errors]
        self.counts.update(f"parse_errors/{error.kind}" for error in action.parse_errors)
        if errors and not action.tool_calls and not cut:
            result = StepResult()
        else:
            began = time.monotonic()
            try:
                result = await self.environment.step(action)
            finally:
                turn.environment_s += time.monotonic() - began
            self.counts["tool_calls"] += len(action.tool_calls)
            self.reported.update(number_items(result.info))
        turn.reward = result.reward
        whole = [*result.observation, *errors]
        messages = [self.cut.shortened(message) for message in whole]
        self.counts["observations"] += len(messages)
        self.counts["observations_cut"] += sum(a is not b for a, b in zip(messages, whole, strict=True))
        self._count_markers(messages)
        turn.answer = [self.talk.add(message, shown=False) for message in messages]
        return result

    async def _extend(self, turn: Turn) -> bool:
        """Append what follows a turn, after a compaction where it is time for one; false, and nothing appended, where that would leave no room to sample."""
        self.counts["forced_closes"] += not turn.ids or turn.ids[-1] not in self.renderer.stop_ids
        messages = self.talk.at(turn.answer)
        if characters(messages) > CHARACTERS_PER_TOKEN * self._context():
            return False
        delta = self.renderer.delta(turn.ids, messages)
        if isinstance(delta, Fork):
            prompt = self.talk.prompt(messages)
            length, added = len(prompt), len(prompt) - self.log.shared(prompt)
        else:
            prompt, length, added = [], len(self.log) + len(delta), len(delta)
        if self._is_time_to_compact(length) and (request := self._request_summary(turn)) is not None:
            return await self._compact(request)
        if self._room(added, length) <= 0:
            return False
        if isinstance(delta, Fork):
            self._fork(prompt, delta)
        else:
            self.log.context(delta)
        self.talk.show(turn.answer)
        return True

    def _fork(self, prompt: Sequence[int], fork: Fork) -> None:
        self.log.fork(prompt)
        self.talk.fork(fork.reason)
        self.counts["segments/forked"] += 1
        self.counts[f"segments/forked/{fork.reason}"] += 1

    # ------------------------------------------------------------------ compaction

    def _asking(self) -> int:
        """Tokens of the request for a summary."""
        request = self.renderer.delta((), [self.request])
        return len(self.renderer.open([self.request], ()) if isinstance(request, Fork) else request)

    def _reserve(self) -> int:
        """Tokens of the context to be kept for a summary and the request for it, beside those of a whole turn."""
        compaction = self.limits.compaction
        if compaction is None or self.counts["compactions"] >= compaction.most:
            return 0
        return compaction.summary_tokens + self.asking

    def _is_time_to_compact(self, length: int) -> bool:
        """Whether a prompt of so many tokens is too long, and something would be left out of the next one."""
        compaction, context = self.limits.compaction, self._context()
        if compaction is None or self.counts["compactions"] >= compaction.most or self.sampler.exhausted:
            return False
        full = length + self.limits.max_turn_tokens + self._reserve() > context
        return (full and len(self.talk.window) > 1) or (length > compaction.threshold(context) and len(self.talk.window) > compaction.keep)

    def _request_summary(self, turn: Turn) -> Sequence[int] | Fork | None:
        """What to append to ask for a summary, or the Fork this template makes of it; None where there is no room for that or for what must follow."""
        compaction = self.limits.compaction
        assert compaction is not None
        request = self.renderer.delta(turn.ids, [self.request])
        added = len(request) if not isinstance(request, Fork) else len(self.talk.prompt([self.request]))
        least = self.talk.compacted(1, summary_message(""))
        if self._room(added, added if isinstance(request, Fork) else len(self.log) + added) <= 0:
            return None
        after = added + compaction.summary_tokens + len(least) - self.log.shared(least)
        return request if self._room(after, len(least)) > 0 else None

    async def _compact(self, request: Sequence[int] | Fork) -> bool:
        """Sample a summary and begin the segment that goes on from it; false where that has no room."""
        compaction = self.limits.compaction
        assert compaction is not None
        if isinstance(request, Fork):
            self._fork(self.talk.prompt([self.request]), request)
        else:
            self.log.context(request)
        self.talk.add(self.request)
        begins, turn = len(self.log), Turn()
        self.counts["compactions"] += 1
        cut = await self._sample(turn, min(compaction.summary_tokens, self._room()))
        self.talk.parts[-1].summary = (begins, len(self.log))
        action = self.renderer.parse(turn.ids, self.talk.tools) if self.talk.tools else Action(text=self.renderer.text(turn.ids))
        text = summary_text(action.text)
        self.counts["summary_tokens"] += len(turn.ids)
        self.counts["summaries/cut"] += cut
        self.counts["summaries/empty"] += not text
        self.counts["summaries/tool_calls"] += bool(action.tool_calls or action.parse_errors)
        summary = summary_message(text)
        for keep in range(min(compaction.keep, len(self.talk.window) - 1), 0, -1):
            prompt = self.talk.compacted(keep, summary)
            more = len(prompt) - self.log.shared(prompt)
            room = self._room(more, len(prompt))
            if room >= self.limits.max_turn_tokens + self._reserve() or (keep == 1 and room > 0):
                self._count_markers([summary])
                self.log.fork(prompt)
                self.talk.compact(keep, summary)
                self.counts["segments/compacted"] += 1
                return True
        return False

    # ------------------------------------------------------------------ room

    def _context(self) -> int:
        """Most tokens of one segment."""
        return min(self.limits.max_tokens, self.limits.context or self.limits.max_tokens)

    def _room(self, more: int = 0, length: int | None = None) -> int:
        """Tokens that may still be added, after `more` new ones, in a segment of `length` (default: the one being written)."""
        if self.sampler.exhausted:
            return 0
        room = self.limits.max_tokens - self.log.total - more
        if self.limits.context > 0:
            room = min(room, self.limits.context - (len(self.log) if length is None else length))
        return room

    def _count_markers(self, messages: Sequence[Message]) -> None:
        self.counts["control_hits"] += self.renderer.count_markers(messages)

    # ------------------------------------------------------------------ the trajectory

    def trajectory(self, episode_id: EpisodeId, admitted_version: int, finish: FinishReason) -> Trajectory:
        segments = self.log.segments(self.sampler.sampling)
        if finish.kind != "failed" and not any(segment.action_tokens for segment in segments):
            finish = FinishReason.failed("no_action_tokens")
            self.failure = f"{self.log.sampled_tokens} tokens were sampled, none with a finite log-prob"
        rewards = [turn.reward for turn in self.turns]
        reward, turn_rewards = sum(rewards), None
        if finish.kind != "failed" and len(segments) == 1 and segments[0].action_tokens and any(rewards[:-1]):
            last = len(segments[0]) - 1  # of the only segment in which anything was sampled; later ones are left out
            turn_rewards = place_turn_rewards(segments[0], [(turn.at[1] if turn.at[0] == 0 else last, turn.reward) for turn in self.turns])
            reward = float(turn_rewards.sum())
        info: dict[str, Any] = {
            "messages": [{"role": message["role"], "content": message["content"]} for message in self.talk.messages],
            "parse_errors": {key.split("/")[1]: count for key, count in self.counts.items() if key.startswith("parse_errors/")},
            "control_hits": self.counts["control_hits"],
        }
        if len(segments) > 1 or self.counts["compactions"]:
            info["segments"] = self.talk.record(len(segments))
        if self.failure:
            info["failure"] = self.failure
        metrics = {"turns": float(len(self.turns)), "tool_calls": float(self.counts["tool_calls"])}
        metrics |= {key: float(count) for key, count in self.counts.items() if count}
        metrics |= {"missing_logprobs": float(self.log.missing_logprobs)} if self.log.missing_logprobs else {}
        if blocked := sum(self.environment.held.seconds.values()):
            metrics |= {"blocked_s": blocked, f"blocked_s/{self.task.environment}": blocked}
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
