"""One episode of an agent we did not write, as the gateway sees it: its requests, answered one by one or at once, and what they sampled.

A request continues the longest conversation that ends with a turn of ours: what follows is appended to that turn's own tokens. Where no turn of
ours leads up to it (a first request, another system prompt or tool list, an edited history) everything is rendered once, as context of a new root.

Generation is finished once it has begun, whether or not the client is still there: what was sampled is a turn of the tree, trains like any other and is
counted. A client that asks again gets another turn beside it.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sao.agents.conversation import characters
from sao.agents.guarded import short
from sao.agents.limits import Limits
from sao.agents.renderer import Fork, Renderer
from sao.agents.sampling import Generate, check_generation
from sao.agents.turns import CHARACTERS_PER_TOKEN
from sao.environment import Action, Message, Task, ToolCall
from sao.errors import EngineFailure, GatewayFailure, SystemFailure
from sao.gateway.messages import Answer, ChatRequest, Refusal, chain, family_key, leaves_out_reasoning, next_key
from sao.gateway.tree import Ids, Tree, Turn
from sao.inference.protocol import GenerateRequest, Generation
from sao.timeouts import time_limit
from sao.trajectory import AFTER_STOP, Purpose, SamplingSpec, TurnTiming

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Terms:
    """What a session is opened with. sampling: of every turn, its `stop` with the renderer's. settings: override | reject what a client asks otherwise."""

    name: str
    task: Task
    limits: Limits
    sampling: SamplingSpec
    settings: str = "override"
    purpose: Purpose = "train"
    pinned_version: int | None = None


@dataclass(frozen=True)
class _Place:
    """Where a turn will stand, and what is written before it."""

    parent: Turn | None
    context: Ids
    family: bytes
    messages: Sequence[Message] = ()

    def prompt(self) -> Ids:
        return self.context if self.parent is None else np.concatenate([self.parent.tokens(), self.context])


class Session:
    """Serves any number of requests at once, on one event loop.

    cut: `turns`, `tokens` or `time` once a limit has refused a request, until another is served. failure: what broke; the session then answers nothing more,
    and `broken` is set.
    """

    def __init__(self, terms: Terms, renderer: Renderer, generate: Generate, outage_s: Callable[[], float] = lambda: 0.0) -> None:
        self.terms, self.renderer, self.generate, self.outage_s = terms, renderer, generate, outage_s
        self.tree = Tree()
        self.counts: Counter[str] = Counter()
        self.timings: list[TurnTiming] = []
        self.cut = ""
        self.refused = ""  # what the last limit said
        self.requests = 0
        self.failure: SystemFailure | None = None
        self.broken = asyncio.Event()
        self.ended = False
        self.context_limit = terms.limits.context
        self.deadline = time.monotonic() + terms.limits.time_limit_s
        self._outage_before_s = outage_s()
        self._turns: dict[bytes, list[Turn]] = {}  # by the conversation that ends with them, as their client spells it
        self._reserved = 0
        self._running = 0
        self._returned = asyncio.Condition()
        self._idle_since = time.monotonic()

    # -- what a client asks -----------------------------------------------------------------------------------------------------------

    async def chat(self, request: ChatRequest) -> Answer:
        """One more turn of a conversation. Raises Refusal."""
        self._check_open()
        self._settle(request.asked)
        self._check_size(request)
        keys, bare = (chain(request.tools, request.messages, reasoning=reasoning) for reasoning in (True, False))
        place = self._place(request, keys, bare)
        turn, generation = await self._sample(place, request.max_tokens, request.stop)
        answer = self._answer(request, turn, generation)
        said = answer.message()
        for key in {next_key(keys[-1], said), next_key(bare[-1], said, reasoning=False)}:
            self._turns.setdefault(key, []).append(turn)
        return answer

    async def continue_tokens(self, token_ids: Sequence[int], max_tokens: int | None, asked: Mapping[str, Any]) -> tuple[Turn, Generation]:
        """One more turn after exactly these tokens. Raises Refusal."""
        self._check_open()
        self._settle(asked)
        ids = np.asarray(token_ids, np.int32)
        parent = self._longest_prefix(ids)
        if parent is not None:
            parent.followed += 1
        place = _Place(parent, ids[0 if parent is None else parent.end :], b"tokens")
        if not len(place.context) and parent is None:
            raise Refusal(400, "token_ids is empty: there is nothing to continue", param="token_ids")
        return await self._sample(place, max_tokens, ())

    def gone(self) -> None:
        """A client had left when its answer was there."""
        self.counts["gateway/disconnects"] += 1

    # -- what the episode asks --------------------------------------------------------------------------------------------------------

    async def end(self) -> None:
        """Answer nothing more. Returns when what was being sampled is in the tree, at the latest a little after the session's time is up."""
        self.ended = True
        grace = self.terms.limits.answer_grace_s
        try:
            async with time_limit(max(self.time_left(), 0.0) + 2 * grace, self.outage_s), self._returned:
                await self._returned.wait_for(lambda: self._running == 0)
        except TimeoutError:
            self.counts["gateway/unfinished"] += self._running

    def time_left(self) -> float:
        """Seconds; time without an engine does not count."""
        return self.deadline + self.outage_s() - self._outage_before_s - time.monotonic()

    def messages(self) -> list[Message]:
        """The conversation that ends with the turn sampled last; empty before the first."""
        return self.tree.turns[-1].history() if self.tree.turns else []

    # -- where a request belongs ------------------------------------------------------------------------------------------------------

    def _place(self, request: ChatRequest, keys: Sequence[bytes], bare: Sequence[bytes]) -> _Place:
        messages, family = list(request.messages), family_key(request.messages, request.tools)
        turn, after = self._matched(messages, keys, bare)
        new = messages[after:]
        if turn is not None:
            self.counts["control_hits"] += self.renderer.count_markers(new)
            delta = self.renderer.delta(turn.ids.tolist(), new)
            if not isinstance(delta, Fork):
                self.counts["forced_closes"] += int(turn.ids[-1]) not in self.renderer.stop_ids
                self.counts["gateway/branches"] += turn.followed > 0
                turn.followed += 1
                return _Place(turn, np.asarray(delta, np.int32), family, new)
            self.counts["segments/forked"] += 1
            self.counts[f"segments/forked/{delta.reason}"] += 1
            messages = [*turn.history(), *new]
        else:
            self.counts["control_hits"] += self.renderer.count_markers(messages)
            self.counts["gateway/forks"] += any(other.family == family for other in self.tree.turns)
        return _Place(None, np.asarray(self.renderer.open(messages, request.tools), np.int32), family, messages)

    def _check_size(self, request: ChatRequest) -> None:
        """Refuse what cannot fit before it is encoded, which would hold every other session for seconds."""
        most, length = self.context_limit or self.terms.limits.max_tokens, characters(request.messages, request.tools)
        if length > CHARACTERS_PER_TOKEN * most:
            self.cut = "tokens"
            self.refused = (
                f"This model's maximum context length is {most} tokens; the request's {length} characters come to more ({self._context_key(most)})"
            )
            raise Refusal(400, self.refused, code="context_length_exceeded", param="messages")

    def _matched(self, messages: Sequence[Message], keys: Sequence[bytes], bare: Sequence[bytes]) -> tuple[Turn | None, int]:
        """The turn that the longest known beginning ends with, and how many messages that is. Of equal turns, one that the fewest requests follow.

        bare: the keys without reasoning, for a client that leaves out that of some turns; a turn whose reasoning it sends otherwise is an edited one.
        """
        for index in range(len(messages) - 1, -1, -1):
            if messages[index]["role"] != "assistant":
                continue
            turns = self._turns.get(keys[index + 1])
            if not turns:
                turns = [turn for turn in self._turns.get(bare[index + 1], ()) if leaves_out_reasoning(messages, turn.history())]
            if turns:
                return min(reversed(turns), key=lambda turn: turn.followed), index + 1
        return None, 0

    def _longest_prefix(self, ids: NDArray[np.int32]) -> Turn | None:
        fitting = [turn for turn in self.tree.turns if turn.end <= len(ids) and np.array_equal(turn.tokens(), ids[: turn.end])]
        return max(fitting, key=lambda turn: (turn.end, -turn.followed), default=None)

    # -- sampling ---------------------------------------------------------------------------------------------------------------------

    async def _sample(self, place: _Place, max_tokens: int | None, stop: Sequence[str]) -> tuple[Turn, Generation]:
        limits = self.terms.limits
        self.requests += 1
        if self.requests > limits.max_turns:
            self.cut = "turns"
            raise Refusal(403, f"this session has had its {limits.max_turns} requests (rollout.max_turns)", code="turn_limit_reached")
        prompt = place.prompt()
        # Counted as running from here, so that the end of the session waits for it.
        self._running += 1
        idle = time.monotonic() - self._idle_since if self._running == 1 else 0.0
        reserved = 0
        try:
            budget, reserved = await self._reserve(place, len(prompt), max_tokens)
            began = time.monotonic()
            generation = await self._ask_engine(prompt, budget)
            turn = self._keep(place, generation, stop)
            waited = time.monotonic() - began
            self.timings.append(
                TurnTiming(
                    queue_s=generation.queue_s,
                    generate_s=generation.generate_s or waited - generation.queue_s,
                    environment_s=idle,
                    prompt_tokens=generation.prompt_tokens or len(prompt),
                    cached_tokens=generation.cached_tokens,
                    output_tokens=len(turn.ids),
                )
            )
        except Refusal:
            raise
        except SystemFailure as failure:
            self.fail(failure)
            raise self._failed() from failure
        finally:
            self._reserved -= reserved
            self._running -= 1
            self._idle_since = time.monotonic()
            async with self._returned:
                self._returned.notify_all()
        self.cut = ""
        if generation.finish == "time":
            self.cut = "time"
        elif generation.finish == "length" and len(generation.token_ids) < budget:
            self.context_limit = len(prompt) + len(
                generation.token_ids
            )  # the engine's context is shorter than the limits say (max_model_len 0: not given)
        return turn, generation

    async def _reserve(self, place: _Place, length: int, max_tokens: int | None) -> tuple[int, int]:
        """Tokens that may be sampled, and what to hold back for this turn. Raises Refusal where no token fits.

        Requests at once share the episode's tokens: one that would find too few waits for what the others leave over.
        """
        limits = self.terms.limits
        wanted = limits.max_turn_tokens if max_tokens is None else min(max_tokens, limits.max_turn_tokens)
        if self.context_limit > 0:
            self._check_room(self.context_limit - length, length, self._context_key(self.context_limit), self.context_limit)
            wanted = min(wanted, self.context_limit - length)
        while True:
            new = len(place.context) - self.tree.overlap(place.parent, place.context, place.family)[1]
            room = limits.max_tokens - self.tree.total - self._reserved - new
            if room >= wanted or self._reserved == 0:
                break
            async with self._returned:
                await self._returned.wait()
        self._check_room(
            room, length, f"rollout.max_tokens={limits.max_tokens} of the episode, of which {self.tree.total} are used", limits.max_tokens
        )
        budget = min(wanted, room)
        self._reserved += new + budget
        return budget, new + budget

    def _context_key(self, limit: int) -> str:
        """The setting that bounds a conversation at `limit` tokens."""
        own = {"rollout.context_tokens": self.terms.limits.context_tokens, "rollout.max_tokens": self.terms.limits.max_tokens}
        key = next((key for key, value in own.items() if value == limit), "engine.max_model_len")
        return f"{key}={limit}"

    def _check_room(self, room: int, length: int, limit: str, most: int) -> None:
        if room > 0:
            return
        self.cut = "tokens"
        self.refused = (
            f"This model's maximum context length is {most} tokens; the request's come to {length} and leave no room for an answer ({limit})"
        )
        raise Refusal(400, self.refused, code="context_length_exceeded", param="messages")

    async def _ask_engine(self, prompt: Ids, budget: int) -> Generation:
        terms, left = self.terms, self.time_left()
        if left <= 0:
            self.cut = "time"
            raise self._over()
        request = GenerateRequest(
            request_id=f"{terms.name}/{self.requests - 1}",
            token_ids=prompt,
            sampling=replace(terms.sampling, max_tokens=budget),
            session=terms.name,
            workload=terms.task.workload,
            purpose=terms.purpose,
            pinned_version=terms.pinned_version,
            time_limit_s=left,
        )
        limit = time_limit(left + terms.limits.answer_grace_s, self.outage_s)
        try:
            async with limit as scope:
                generation = await self.generate(request)
        except SystemFailure:
            raise
        except TimeoutError as problem:
            if scope.expired():
                self.cut = "time"
                raise self._over() from None
            raise EngineFailure(f"generate raised TimeoutError: {problem}") from problem
        except Exception as problem:
            raise EngineFailure(f"generate raised {type(problem).__name__}: {short(problem)}") from problem
        check_generation(generation, budget)
        if not len(generation.token_ids):
            if generation.finish == "time":
                self.cut = "time"
                raise self._over()
            raise EngineFailure(f"engine {generation.engine} returned no token (finish {generation.finish})")
        return generation

    def _keep(self, place: _Place, generation: Generation, stop: Sequence[str]) -> Turn:
        """The turn as it stays in the tree: up to the token that completes a stop string, where there is one. What follows it was sampled for nothing."""
        ids = np.asarray(generation.token_ids, np.int32)
        count = self._stopped_at(ids, stop) if stop else len(ids)
        self.counts[AFTER_STOP] += len(ids) - count
        logprobs = np.asarray(generation.logprobs, np.float32)[:count].copy()
        logprobs[~np.isfinite(logprobs)] = math.nan
        turn = Turn(
            parent=place.parent,
            context=place.context,
            ids=ids[:count],
            logprobs=logprobs,
            versions=np.asarray(generation.versions, np.int32)[:count],
            family=place.family,
            messages=place.messages,
            answer={"role": "assistant", "content": self.renderer.text(ids[:count].tolist())},
        )
        self.tree.add(turn)
        return turn

    def _stopped_at(self, ids: Ids, stop: Sequence[str]) -> int:
        """How many tokens it takes until the text holds one of the strings; all of them where it never does."""
        tokens = ids.tolist()
        if not any(text in self.renderer.text(tokens) for text in stop):
            return len(tokens)
        low, high = 1, len(tokens)
        while low < high:
            middle = (low + high) // 2
            found = any(text in self.renderer.text(tokens[:middle]) for text in stop)
            low, high = (low, middle) if found else (middle + 1, high)
        return low

    # -- answers ----------------------------------------------------------------------------------------------------------------------

    def _answer(self, request: ChatRequest, turn: Turn, generation: Generation) -> Answer:
        ids = turn.ids.tolist()
        whole = self.renderer.text(ids)
        text, found = _cut_at(whole, request.stop)
        calls: Sequence[ToolCall] = ()
        finish = "stop_string" if found else "length" if generation.finish in ("length", "time") else "stop"
        if finish == "stop" and request.tools and not request.speaks_only:
            action = self.renderer.parse(ids, request.tools)
            self.counts.update(f"parse_errors/{error.kind}" for error in action.parse_errors)
            text, calls, finish = self._spoken(action, whole)
        self.counts["tool_calls"] += len(calls)
        return Answer(
            answer_id=f"{self.terms.name}-{len(self.tree.turns)}",
            text=text,
            tool_calls=calls,
            finish=finish,
            prompt_tokens=turn.end - len(turn.ids),
            output_tokens=len(ids),
            cached_tokens=generation.cached_tokens,
            stop_string=found,
        )

    def _spoken(self, action: Action, whole: str) -> tuple[str, Sequence[ToolCall], str]:
        """A turn with no call that can be executed is its exact text, so that the client sees what was tried."""
        if not action.tool_calls:
            return (whole if action.parse_errors else action.text), (), "stop"
        number = len(self.tree.turns)
        calls = [replace(call, call_id=f"call_{number}_{index}") for index, call in enumerate(action.tool_calls)]
        return action.text, calls, "tool_calls"

    # -- refusals ---------------------------------------------------------------------------------------------------------------------

    def fail(self, failure: SystemFailure) -> None:
        """Something broke: the episode cannot be scored any more. The first failure stays."""
        self.failure = self.failure or failure
        self.broken.set()

    def broke(self, problem: Exception) -> None:
        """An exception that nobody foresaw while a request was served."""
        self.fail(GatewayFailure(f"the gateway broke on a request of {self.terms.name}: {type(problem).__name__}: {short(problem)}"))

    def _check_open(self) -> None:
        if self.failure is not None:
            raise self._failed()
        if self.ended:
            raise Refusal(410, "this session has ended; its key is no longer good for anything", code="session_ended")
        if self.time_left() <= 0:
            self.cut = "time"
            raise self._over()

    def _over(self) -> Refusal:
        return Refusal(410, f"this session's {self.terms.limits.time_limit_s:g} s are up (rollout.time_limit_s)", code="session_ended")

    def _failed(self) -> Refusal:
        return Refusal(503, f"the model cannot be reached, this session is lost: {self.failure}", code="engine_unavailable")

    def _settle(self, asked: Mapping[str, Any]) -> None:
        """Refuse or count what a client would have sampled otherwise."""
        own = self.terms.sampling
        same = {"temperature": own.temperature, "top_p": own.top_p, "top_k": own.top_k, "min_p": own.min_p}
        other = {name: value for name, value in asked.items() if not (name in same and value == same[name])}
        if other and self.terms.settings == "reject":
            name, value = next(iter(other.items()))
            raise Refusal(400, f"{name}={value!r} is refused: this run samples by its own settings (gateway.sampling=reject)", param=name)
        for name, value in other.items():
            if not self.counts[f"gateway/overridden/{name}"]:
                log.info("%s asks for %s=%.100r; the run's own setting is used (gateway.sampling=override)", self.terms.name, name, value)
            self.counts[f"gateway/overridden/{name}"] += 1


def _cut_at(text: str, stop: Sequence[str]) -> tuple[str, str]:
    """The text before the first of the stop strings, and that string; the whole text and nothing where none occurs."""
    found = [(at, word) for word in stop if (at := text.find(word)) >= 0]
    if not found:
        return text, ""
    at, word = min(found)
    return text[:at], word
