"""Which engine of a pool serves a request."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from sao.inference.protocol import GenerateRequest


@dataclass(frozen=True)
class EngineLoad:
    """What a router sees of an engine: requests this pool has there now, and the tokens they may still sample."""

    name: str
    requests: int
    tokens: int


class Router(Protocol):
    """Which engine serves a request: a decision over a snapshot, free of I/O."""

    def choose(self, request: GenerateRequest, loads: Sequence[EngineLoad]) -> str:
        """Name one of `loads` (never empty)."""
        ...

    def forget(self, engine: str) -> None:
        """The engine left."""
        ...


class StickyLeastLoaded:
    """A session stays on the engine that holds its prefix; a new one goes to the engine with the fewest requests (then the first by name)."""

    def __init__(self, sessions: int = 65536) -> None:
        self._sessions = sessions
        self._home: OrderedDict[str, str] = OrderedDict()

    def choose(self, request: GenerateRequest, loads: Sequence[EngineLoad]) -> str:
        home = self._home.pop(request.session, None)
        if home is None or all(load.name != home for load in loads):
            home = min(loads, key=lambda load: (load.requests, load.name)).name
        self._home[request.session] = home
        if len(self._home) > self._sessions:
            self._home.popitem(last=False)
        return home

    def forget(self, engine: str) -> None:
        for session in [s for s, home in self._home.items() if home == engine]:
            del self._home[session]
