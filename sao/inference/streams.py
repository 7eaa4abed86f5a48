"""Chunks of a streamed generation put together again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from sao.errors import EngineFailure
from sao.inference.protocol import Generation


def join(chunks: Sequence[Generation]) -> Generation:
    """One Generation of all chunks' tokens; the last chunk must carry the finish reason."""
    if not chunks or chunks[-1].finish is None:
        raise EngineFailure("a generation ended without a finish reason")
    if len(chunks) == 1:
        return chunks[0]
    return replace(
        chunks[-1],
        token_ids=np.concatenate([c.token_ids for c in chunks]),
        logprobs=np.concatenate([c.logprobs for c in chunks]),
        versions=np.concatenate([c.versions for c in chunks]),
    )
