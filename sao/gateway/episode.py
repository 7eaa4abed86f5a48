"""An episode of an agent program: the counterpart of the turn loop where the agent asks and we answer.

How an episode ends:

    terminal                     the program ended well and was scored
    truncated: turns | tokens    a limit had refused its last request; scored if the program ended well all the same, else what it is worth is 0
    truncated: time              the deadline passed and the program was ended; worth 0 (of it, time without an engine does not count)
    failed: prompt_too_long      its first request left no room for a token; a retry cannot mend it
    failed: no_action_tokens     it ended without a turn that can be trained
    raises SystemFailure         something broke: the engine, the gateway, the program (`environment`), its reward; `sampled_tokens` says what is lost
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from sao.agents.observations import check_step, number_items
from sao.environment import AgentProgram, Message, StepResult
from sao.errors import EnvironmentFailure, SystemFailure, UserError
from sao.gateway.server import Gateway
from sao.gateway.session import Session, Terms
from sao.rollout.last_words import named
from sao.tasks.target import one_line
from sao.timeouts import time_limit
from sao.trajectory import AFTER_STOP, EpisodeId, FinishReason, Trajectory

CLOSE_TIMEOUT_S = 10.0

_T = TypeVar("_T")
_log = logging.getLogger(__name__)


class _OutOfTime(Exception):
    """The episode's deadline passed."""


async def run_program(
    terms: Terms,
    program: AgentProgram,
    gateway: Gateway,
    *,
    episode_id: EpisodeId,
    admitted_version: int,
    record: Callable[[str], None] = lambda name: None,
) -> Trajectory:
    """Run one episode and close its program, exactly once, whatever happens.

    record: hears which episode's code runs (`sao.rollout.last_words`); the program's runs in a task of its own.
    Raises SystemFailure subclasses with `sampled_tokens` and `trajectory` set; UserError passes through; cancellation passes through after closing.
    """
    episode = _Episode(terms, program, gateway, record)
    try:
        try:
            await episode.attempt("prepare", program.prepare)
            finish = await episode.play()
        finally:
            await episode.close()
    except SystemFailure as failure:
        if episode.session is not None:
            failure.sampled_tokens = episode.session.tree.sampled_tokens + episode.session.counts[AFTER_STOP]
            if episode.session.tree.turns:
                episode.why = str(failure)
                failure.trajectory = episode.trajectory(episode_id, admitted_version, FinishReason.failed(failure.reason))
        raise
    return episode.trajectory(episode_id, admitted_version, finish)


class _Episode:
    def __init__(self, terms: Terms, program: AgentProgram, gateway: Gateway, record: Callable[[str], None]) -> None:
        self.terms, self.program, self.gateway, self.record = terms, program, gateway, record
        self.name = type(program).__name__
        self.session: Session | None = None
        self.result = StepResult()
        self.why = ""
        self.close_failed = 0

    async def play(self) -> FinishReason:
        session, secret = await self.gateway.open(self.terms)
        self.session = session
        problem: EnvironmentFailure | None = None
        output: Any = None
        late = False
        try:
            variables = self.gateway.variables(secret)
            output = await self._while_served(session, lambda: self.program.run(variables))
        except EnvironmentFailure as failure:
            problem = failure
        except _OutOfTime:
            late = True
        finally:
            await self.gateway.end(secret)
        if session.failure is not None:
            raise session.failure
        if late or session.cut == "time":
            if session.tree.turns:
                return FinishReason.truncated("time")
            self.why = f"no token was sampled within {self.terms.limits.time_limit_s:g} s (rollout.time_limit_s)"
            return FinishReason.failed("time_limit")
        if session.cut == "tokens" and not session.tree.turns:
            self.why = f"the first request of task {self.terms.task.task_id} leaves no room for a token: {session.refused}"
            return FinishReason.failed("prompt_too_long")
        if problem is not None and not session.cut:
            raise problem
        if problem is None and session.tree.turns:
            self.result = await self._score(session.messages(), output)
        if session.cut:
            return FinishReason.truncated(session.cut)
        if not session.tree.turns:
            self.why = f"{self.name} ended without a request to the policy"
            return FinishReason.failed("no_action_tokens")
        return FinishReason.truncated("turns") if self.result.truncated else FinishReason.terminal()

    async def _while_served(self, session: Session, call: Callable[[], Awaitable[_T]]) -> _T:
        """Await the program's own code until its time is up or the session is lost, whichever comes first; then it is cancelled."""
        running = asyncio.ensure_future(_settled(named(self.attempt("run", call), self.terms.name, self.record)))
        lost = asyncio.ensure_future(session.broken.wait())
        limit = time_limit(max(session.time_left(), 0.0), session.outage_s)
        try:
            async with limit as scope:
                await asyncio.wait((running, lost), return_when=asyncio.FIRST_COMPLETED)
                if running.done():
                    return running.result()
                assert session.failure is not None
                raise session.failure
        except TimeoutError:
            if scope.expired():
                raise _OutOfTime from None
            raise
        finally:
            lost.cancel()
            if not running.done():
                running.cancel()
                await asyncio.wait((running,), timeout=CLOSE_TIMEOUT_S)
            if running.done() and not running.cancelled():
                running.exception()  # looked at, so that nobody reports it as forgotten

    async def _score(self, messages: Sequence[Message], output: Any) -> StepResult:
        limit = self.terms.limits.time_limit_s
        scope = asyncio.timeout(limit)
        try:
            async with scope:
                answer = await self.attempt("score", lambda: self.program.score(messages, output))
        except TimeoutError:
            raise EnvironmentFailure(f"{self.name}.score had not answered for task {self.terms.task.task_id} after {limit:g} s") from None
        return check_step(answer, f"{self.name}.score")

    async def attempt(self, method: str, call: Callable[[], Awaitable[_T]]) -> _T:
        """Await the program's own code; whatever it raises is a typed failure."""
        try:
            return await call()
        except (SystemFailure, UserError):
            raise
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            raise EnvironmentFailure(f"{self.name}.{method} was cancelled from within on task {self.terms.task.task_id}") from None
        except Exception as problem:
            raise EnvironmentFailure(f"{self.name}.{method} failed on task {self.terms.task.task_id}: {one_line(problem)}") from problem

    async def close(self) -> None:
        """Close the program. A failing close costs a warning and a count, not the episode's data."""
        try:
            async with asyncio.timeout(CLOSE_TIMEOUT_S):
                await self.program.close()
        except Exception as problem:  # noqa: BLE001 - the trajectory is whole; the log has the traceback
            self.close_failed = 1
            _log.warning("%s.close of task %s raised %s", self.name, self.terms.task.task_id, type(problem).__name__, exc_info=True)

    def trajectory(self, episode_id: EpisodeId, admitted_version: int, finish: FinishReason) -> Trajectory:
        session = self.session
        assert session is not None
        terms, tree = session.terms, session.tree
        segments = tree.segments(replace(terms.sampling, max_tokens=terms.limits.max_turn_tokens))
        if finish.kind != "failed" and not any(segment.action_tokens for segment in segments):
            finish = FinishReason.failed("no_action_tokens")
            self.why = f"{tree.sampled_tokens} tokens were sampled, none with a finite log-prob"
        counts = session.counts
        info: dict[str, Any] = {
            "messages": [{"role": message["role"], "content": message.get("content") or ""} for message in session.messages()],
            "parse_errors": {key.split("/")[1]: count for key, count in counts.items() if key.startswith("parse_errors/") and count},
            "control_hits": counts["control_hits"],
        }
        if self.why:
            info["failure"] = self.why
        metrics = {"turns": float(len(tree.turns)), "tool_calls": float(counts["tool_calls"]), "gateway/requests": float(session.requests)}
        metrics |= {key: float(count) for key, count in counts.items() if count}
        metrics |= {"missing_logprobs": float(tree.missing_logprobs)} if tree.missing_logprobs else {}
        metrics |= {"close_failed": 1.0} if self.close_failed else {}
        return Trajectory(
            episode_id=episode_id,
            task_id=terms.task.task_id,
            environment=terms.task.environment,
            segments=segments,
            reward=self.result.reward,
            finish=finish,
            admitted_version=admitted_version,
            workload=terms.task.workload,
            timings=tuple(session.timings),
            metrics=metrics | {f"env/{key}": value for key, value in number_items(self.result.info).items()},
            info=info,
        )


async def _settled(work: Awaitable[_T]) -> _T:
    """An awaitable as the coroutine that a task is made of."""
    return await work
