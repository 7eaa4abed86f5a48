"""Kinds of engine failure that the pool tells apart."""

from __future__ import annotations

from sao.errors import EngineFailure


class RequestRefused(EngineFailure):
    """The engine is well, the request cannot be served: a budget of 0, a prompt beyond the context, another version than the pinned one."""


class GenerationLost(EngineFailure):
    """The engine ended a request it had begun; `tokens` were sampled and are gone."""

    def __init__(self, message: str, tokens: int = 0) -> None:
        super().__init__(message, tokens)
        self.tokens = tokens

    def __str__(self) -> str:
        return str(self.args[0])
