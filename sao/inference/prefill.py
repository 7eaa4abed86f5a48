"""How many prompt tokens an engine reads again only because its weights changed."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class _Seen:
    salt: str
    tokens: int
    digest: int


class SessionPrefill:
    """Remembers, per session, what the prefix cache could have served to its next turn.

    A turn's request repeats the session's history. Had the cache salt stayed the same, the history's whole blocks would have been hits; the
    blocks missing although the token ids match are counted as read again. Bounded: the longest-idle sessions are forgotten.
    """

    def __init__(self, block: int, sessions: int = 65536) -> None:
        self.block = block
        self.tokens = 0
        self._sessions = sessions
        self._seen: OrderedDict[str, _Seen] = OrderedDict()

    def observe(self, session: str, salt: str, prompt: NDArray[np.int32], sampled: NDArray[np.int32], cached: int) -> int:
        """Record a finished request (int32 token ids, `cached` prompt tokens served from the cache); return its tokens read again."""
        again = 0
        before = self._seen.pop(session, None)
        # An engine computes the last prompt token even when it is cached: a hit never covers the whole prompt.
        if before is not None and before.salt != salt and before.tokens < len(prompt) and _digest(prompt[: before.tokens]) == before.digest:
            again = max(0, before.tokens - cached)
        history = np.concatenate([prompt, sampled])
        # The last sampled token's KV is never computed, so it cannot complete a block.
        tokens = max(0, len(history) - 1) // self.block * self.block
        self._seen[session] = _Seen(salt, tokens, _digest(history[:tokens]))
        if len(self._seen) > self._sessions:
            self._seen.popitem(last=False)
        self.tokens += again
        return again


def _digest(tokens: NDArray[np.int32]) -> int:
    return hash(np.ascontiguousarray(tokens, np.int32).tobytes())
