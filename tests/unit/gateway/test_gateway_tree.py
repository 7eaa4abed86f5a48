"""Whatever a client does with its conversation, every sampled token is in exactly one training row."""

from __future__ import annotations

import asyncio
import json
import random

import numpy as np
import pytest
from agents_kit import CALCULATOR
from gateway_kit import CALL, RENDERER, rows, says, terms
from hypothesis import given, settings
from hypothesis import strategies as st

from sao.gateway.messages import ChatRequest
from sao.gateway.session import Session
from sao.inference.protocol import Generation

SYSTEMS = ("be brief", "be long")


def user(text):
    return {"role": "user", "content": text}


def random_policy(rng):
    """Calls, plain words and arbitrary bytes, closed or cut off; each token with a log-prob and a version of its own."""

    async def generate(request):
        await asyncio.sleep(0)
        kind, budget = rng.random(), request.sampling.max_tokens
        ids = says(CALL) if kind < 0.3 else says(rng.choice(["yes", " no\n", "汉字 🙂"])) if kind < 0.8 else rng.choices(range(5, 420), k=budget)
        ids = ids[:budget]
        logprobs = [float("nan") if rng.random() < 0.05 else -rng.random() for _ in ids]
        versions = [rng.randrange(5)] * len(ids)
        finish = "stop" if ids[-1] in RENDERER.stop_ids else "length"
        return Generation(np.asarray(ids, np.int32), np.asarray(logprobs, np.float32), np.asarray(versions, np.int32), finish)

    return generate


def echo(answer, rng):
    """The answer as some client would send it back."""
    message = answer.message()
    if message["content"] is None and rng.random() < 0.5:
        message["content"] = ""
    for call in message.get("tool_calls", ()):
        call["id"] = f"own-{rng.randrange(10)}"
        call["function"]["arguments"] = json.dumps(
            json.loads(call["function"]["arguments"]), indent=rng.choice([None, 2]), sort_keys=rng.random() < 0.5
        )
    if message["content"] and rng.random() < 0.3:
        message["content"] = message["content"].strip()
    return message


def follow(answer, rng):
    calls = answer.message().get("tool_calls", ())
    return [{"role": "tool", "content": "3", "tool_call_id": call["id"]} for call in calls] or [user(rng.choice(["go on", "why?"]))]


class Player:
    """A client that keeps several conversations and does with them what it likes."""

    def __init__(self, session, rng):
        self.session, self.rng = session, rng
        self.conversations = []

    async def ask(self, messages, tools=(CALCULATOR,)):
        answer = await self.session.chat(ChatRequest(messages, list(tools)))
        self.conversations.append([*messages, echo(answer, self.rng), *follow(answer, self.rng)])

    async def step(self, kind):
        rng = self.rng
        if not self.conversations or kind == "new":
            return await self.ask([{"role": "system", "content": rng.choice(SYSTEMS)}, user("hello")])
        known = rng.choice(self.conversations)
        if kind == "continue":
            before = len(self.session.tree.turns)
            await self.ask(known)
            assert self.session.tree.turns[before].parent is not None, "an unedited history is extended"
        elif kind == "retry":
            await self.ask(known)
            await self.ask(known)
        elif kind == "at_once":
            await asyncio.gather(*(self.ask([*known, user(str(number % 2))]) for number in range(3)))
        elif kind == "edit":
            at = rng.randrange(1, len(known))
            await self.ask([*known[:at], {**known[at], "content": "edited"}, *known[at + 1 :]])
        elif kind == "tools":
            await self.ask(known, ())
        elif kind == "shorten":
            last = max(index for index, message in enumerate(known) if message["role"] != "assistant")
            await self.ask([*known[: rng.randrange(1, last + 1)], user("again")])


@settings(max_examples=60)
@given(
    st.lists(st.sampled_from(["new", "continue", "continue", "retry", "at_once", "edit", "tools", "shorten"]), min_size=1, max_size=12),
    st.integers(0, 2**32),
)
def test_every_sampled_token_trains_once_with_its_own_record(kinds, seed):
    rng = random.Random(seed)

    async def play():
        session = Session(terms(max_turns=1000, max_turn_tokens=48), RENDERER, random_policy(rng))
        player = Player(session, rng)
        for kind in kinds:
            await player.step(kind)
        return session

    session = asyncio.run(play())
    segments = rows(session)
    # Each token is counted once: what a row repeats of the one it branches off is not new.
    repeated = sum(segment.parent[1] + 1 for segment in segments if segment.parent is not None)
    assert session.tree.total <= sum(map(len, segments)) and session.tree.total >= sum(map(len, segments)) - repeated


def replay(replies, play, **limits):
    """A session over scripted replies after `play(ask)`; ask takes messages and returns the conversation with the answer in it."""
    from agents_kit import ScriptedGenerate

    session = Session(terms(**limits), RENDERER, ScriptedGenerate(replies))

    async def ask(messages, tools=(), **more):
        answer = await session.chat(ChatRequest(messages, list(tools), **more))
        return [*messages, answer.message()]

    asyncio.run(play(ask))
    return session


def test_a_retry_of_a_request_is_a_branch_beside_it_and_its_prompt_counts_once():
    async def play(ask):
        await ask([user("hello")])
        said = await ask([user("hello")])
        await ask([*said, user("more")])

    session = replay([says("a"), says("a"), says("b")], play)
    short, long = rows(session)
    prompt = RENDERER.open([user("hello")], ())
    assert long.parent == (0, len(prompt) - 1)
    assert long.sampled_tokens == 2 * len(says("a")) and short.sampled_tokens == len(says("a"))
    assert session.tree.total == len(long) + len(says("a"))


def test_sub_agents_that_go_on_from_one_turn_share_it_and_it_trains_in_the_first():
    async def play(ask):
        said = await ask([user("plan")])
        first = await ask([*said, user("do 1")])
        await ask([*said, user("do 2")])
        await ask([*first, user("report")])

    session = replay([says("plan"), says("one"), says("two"), says("report")], play)
    main, branch = rows(session)
    assert main.sampled_tokens == len(says("plan")) + len(says("one")) + len(says("report"))
    assert branch.sampled_tokens == len(says("two"))
    shared = branch.token_ids[: branch.parent[1] + 1]
    assert RENDERER.encoder.decode(shared.tolist()).endswith("plan<|im_end|>\n<|im_start|>user\ndo ")
    assert session.counts["gateway/branches"] == 1


@pytest.mark.parametrize("at_once", [False, True])
def test_two_that_were_answered_alike_go_on_as_two(at_once):
    async def play(ask):
        said = await ask([user("hello")])
        assert said == await ask([user("hello")])
        if at_once:
            await asyncio.gather(*(ask([*said, user(text)]) for text in "xy"))
        else:
            await ask([*said, user("x")])
            await ask([*said, user("y")])

    replies = [says("a"), says("a"), *([0.01, 0.01] if at_once else []), says("x"), says("y")]
    first, second = rows(replay(replies, play))
    assert first.sampled_tokens == second.sampled_tokens == 2 * len(says("a"))


def test_an_edited_answer_of_the_policy_is_context_of_a_new_root():
    async def play(ask):
        said = await ask([user("hello")])
        await ask([said[0], {"role": "assistant", "content": "changed"}, user("more")])

    session = replay([says("original"), says("again")], play)
    _, fork = rows(session)
    assert fork.sampled_tokens == len(says("again")) and session.counts["gateway/forks"] == 1
    assert "changed" in RENDERER.encoder.decode(fork.token_ids.tolist()) and fork.parent[0] == 0


@pytest.mark.parametrize("change", [{"tools": (CALCULATOR,)}, {"system": "other"}])
def test_another_tool_list_or_system_prompt_is_another_conversation(change):
    async def play(ask):
        said = await ask([{"role": "system", "content": "one"}, user("hello")])
        head = {"role": "system", "content": change.get("system", "one")}
        await ask([head, *said[1:], user("more")], change.get("tools", ()))

    first, second = rows(replay([says("a"), says("b")], play))
    assert first.parent is None and second.parent is None


def test_what_an_engine_gave_no_log_prob_for_is_context_and_counted():
    reply = Generation(np.asarray(says("ab"), np.int32), np.full(len(says("ab")), np.nan, np.float32), np.zeros(len(says("ab")), np.int32), "stop")

    async def play(ask):
        await ask([user("hello")])

    session = replay([reply], play)
    (row,) = rows(session)
    assert row.action_tokens == 0 and session.tree.missing_logprobs == len(says("ab"))


def test_a_stop_string_ends_the_turn_at_the_token_that_completes_it():
    async def play(ask):
        said = await ask([user("hello")], stop=("ok",))
        assert said[-1]["content"] == "hello "
        await ask([*said, user("more")])

    session = replay([says("hello ok and more of it"), says("b")], play)
    (row,) = rows(session)
    text = RENDERER.encoder.decode(row.token_ids.tolist())
    assert "hello ok<|im_end|>\n<|im_start|>user\nmore" in text
    assert session.counts["gateway/tokens_after_stop"] > 0
