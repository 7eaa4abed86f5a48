"""Parts shared by the tests of sao.gateway: a served session over a scripted policy, and its ledger."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Sequence
from typing import Any

import numpy as np
from agents_kit import ScriptedGenerate, make_tokenizer

from sao.agents.limits import Limits
from sao.agents.renderer import load_renderer
from sao.config import GatewayConfig
from sao.environment import Task
from sao.gateway.server import Gateway
from sao.gateway.session import Session, Terms
from sao.trajectory import SamplingSpec, Segment

TASK = Task("t-1", "program", {})
RENDERER = load_renderer("chatml", make_tokenizer())
CALL = '<tool_call>{"name": "calculator", "arguments": {"a": 1, "b": 2}}</tool_call>'


def says(text: str, closed: bool = True) -> list[int]:
    """A turn as the policy would sample it."""
    ids = RENDERER.encode_turn({"role": "assistant", "content": text})
    return ids if closed else ids[:-1]


def terms(*, settings: str = "override", **limits: Any) -> Terms:
    bounds = {"max_turns": 100, "max_turn_tokens": 64, "max_tokens": 100_000, "time_limit_s": 30.0, **limits}
    return Terms("train-0.0", TASK, Limits(**bounds), SamplingSpec(stop=RENDERER.stop_ids), settings)


@contextlib.asynccontextmanager
async def served(replies: Sequence[Any] | Any, config: GatewayConfig | None = None, **options: Any) -> AsyncIterator[tuple[Session, dict[str, str]]]:
    """A session and what a program reads. replies: of a ScriptedGenerate, or a generate function."""
    generate = replies if callable(replies) else ScriptedGenerate(replies)
    gateway = Gateway(config or GatewayConfig(), RENDERER, generate)
    session, secret = await gateway.open(terms(**options))
    session.gateway, session.secret = gateway, secret  # type: ignore[attr-defined]
    try:
        yield session, gateway.variables(secret)
    finally:
        await gateway.end(secret)
        await gateway.close()


def rows(session: Session) -> tuple[Segment, ...]:
    """The training rows, checked: every sampled token in exactly one, with its own log-prob and version, and parents as the contract wants them."""
    segments = session.tree.segments(session.terms.sampling)
    trained = [str(token) for s in segments for token in zip(s.token_ids, s.logprobs, s.versions, strict=True) if token[2] >= 0]
    sampled = [str(token) for turn in session.tree.turns for token in zip(turn.ids, turn.logprobs, turn.versions, strict=True)]
    assert sorted(trained) == sorted(sampled)
    assert sum(segment.sampled_tokens for segment in segments) == session.tree.sampled_tokens
    leaves = sum(not turn.children for turn in session.tree.turns)
    assert len(segments) == leaves
    for index, segment in enumerate(segments):
        if segment.parent is not None:
            above, position = segment.parent
            assert above < index
            assert np.array_equal(segment.token_ids[: position + 1], segments[above].token_ids[: position + 1])
            assert not segment.action_mask[: position + 1].any()
    return segments
