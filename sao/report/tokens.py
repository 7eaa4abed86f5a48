"""Token ids as text for people to read: the run's own tokenizer where it can be found, the ids themselves where not."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sao.report.steps import numbered
from sao.trajectory import Segment

_WINDOW = 8  # tokens decoded before the one in question, enough to complete any character


class TokenText:
    """Decodes ids one by one so that the pieces join to the whole text. For display only; nothing here is ever encoded again."""

    def __init__(self, tokenizer: Any = None) -> None:
        self._tokenizer = tokenizer

    @classmethod
    def find(cls, candidates: Sequence[Path | str]) -> TokenText:
        """The first candidate directory with a tokenizer.json that loads; else plain ids."""
        for candidate in candidates:
            path = Path(candidate) / "tokenizer.json"
            if not str(candidate) or not path.is_file():
                continue
            from tokenizers import Tokenizer

            try:
                return cls(Tokenizer.from_file(str(path)))
            except Exception:  # noqa: BLE001 - the library raises plain Exception for a broken file; ids are shown instead
                continue
        return cls()

    @property
    def known(self) -> bool:
        return self._tokenizer is not None

    def pieces(self, ids: Sequence[int]) -> list[str]:
        """One piece of text per id; a token that ends inside a character gives an empty piece and the last one of it gives the character."""
        if self._tokenizer is None:
            return [f"{i} " for i in ids]
        out: list[str] = []
        start = 0  # of the window
        held = 0  # tokens at the end whose text is not complete
        for at in range(len(ids)):
            start = max(start, at - held - _WINDOW)
            before = self._decode(ids[start : at - held])
            text = self._decode(ids[start : at + 1])
            if text.endswith("\ufffd") and held < 3:
                out.append("")
                held += 1
            else:
                out.append(text[len(before) :])
                held = 0
        return out

    def _decode(self, ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode([int(i) for i in ids], skip_special_tokens=False))


def tokenizer_candidates(run_dir: Path, config: dict[str, Any], command: dict[str, Any]) -> list[Path | str]:
    """Where a run's tokenizer may lie, the surest place first."""
    model = config.get("model")
    configured = model.get("path", "") if isinstance(model, dict) else ""
    kept = [
        run_dir / "checkpoints" / "final",
        *reversed(numbered(run_dir / "checkpoints").values()),
    ]  # a run that was stopped or killed has no final one
    return [*(checkpoint / "policy" for checkpoint in kept), str(command.get("model") or ""), str(configured or "")]


def segment_title(index: int, segment: Segment) -> str:
    """What a segment is called, and where it branches off another."""
    if segment.parent is None:
        return f"segment {index}"
    above, position = segment.parent
    return f"segment {index}, which branches off segment {above} after {position + 1} tokens"


def makers(segment: Segment, pieces: Sequence[str], messages: Sequence[Mapping[str, Any]] = ()) -> NDArray[np.str_]:
    """Who made each token: `policy` (sampled), `prompt` and `environment` (a message's text, before and after the first sampled token), `earlier`
    (a turn of an earlier segment, read again), or `template` (what the chat template puts around them).

    messages: the episode's, with role and content, as `Trajectory.info` keeps them. The text of each is looked for in that of the segment; where none
    is found, everything before the first sampled token is `prompt` and everything after it that was not sampled is `environment`.
    """
    sampled = segment.versions >= 0
    before = np.cumsum(sampled) == 0
    lengths = np.array([len(piece) for piece in pieces], np.int64)
    ends = np.cumsum(lengths)
    begins = ends - lengths
    text, at = "".join(pieces), 0
    made = np.where(sampled, "policy", "template").astype("<U11")
    found = False
    for message in messages:
        content = str(message.get("content") or "")
        start = text.find(content, at) if content else -1
        if start < 0:
            continue
        at = start + len(content)
        inside = (ends > start) & (begins < at) & ~sampled
        if message.get("role") == "assistant":
            made[inside] = "earlier"
        else:
            made[inside] = np.where(before, "prompt", "environment")[inside]
            found |= bool(inside.any())
    return made if found else np.where(sampled, "policy", np.where(before, "prompt", "environment"))
