"""Text to token ids with the control ids banned.

What an environment says is data. A tool result that spells `<|im_end|>\\n<|im_start|>assistant` must reach the model as those characters,
never as the ids that end a turn. A Hugging Face tokenizer matches every added token in any text, special or not, so text is encoded by a
copy of it that knows no added tokens, and the result is checked: models with whole-word lookup can still produce a control id.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from tokenizers import Tokenizer

from sao.errors import UserError


class Scaffold(str):
    """Text of a layout: the control tokens it spells become their ids."""

    __slots__ = ()


class Own(str):
    """Text of the policy: the tags it may write itself (tool calls, reasoning) become their ids, other control tokens do not."""

    __slots__ = ()


# A part of a prompt: text to encode with control ids banned, scaffold, text of the policy, or one id.
Piece = str | int


def well_formed(text: str) -> str:
    """The text with unpaired surrogates replaced: JSON can spell them, UTF-8 cannot hold them."""
    return text.encode("utf-8", "replace").decode("utf-8")


class TextEncoder:
    """Encodes text for one tokenizer; stateless after construction, so concurrent episodes share it.

    `control` maps the text of each control token to its id: every added token but whitespace and a pure unknown token, the tokenizer's
    named special tokens, and `markers` (tokens a renderer uses as scaffold wherever they live in the vocabulary). `own` are those of `tags` among them.
    """

    def __init__(self, tokenizer: Any, markers: Iterable[str] = (), tags: Iterable[str] = ()) -> None:
        backend = getattr(tokenizer, "backend_tokenizer", None)
        if not isinstance(backend, Tokenizer):
            raise UserError(
                f"the tokenizer {type(tokenizer).__name__} in model.path is not a fast one: save it there with a tokenizer.json (use_fast=True)"
            )
        self.backend: Tokenizer = backend
        self.control = _control_tokens(tokenizer, backend, markers)
        self.control_ids = frozenset(self.control.values())
        self.own = {tag: self.control[tag] for tag in tags if tag in self.control}
        self._plain = _without_added_tokens(backend, self.control)
        self._marker, self._tag = _any_of(self.control), _any_of(self.own)

    def encode(self, text: str) -> list[int]:
        """Ids of `text`, none of them a control id. Where the vocabulary has no other spelling of a one-character marker, it is left out."""
        return self._banned(well_formed(text)) if text else []

    def compose(self, pieces: Iterable[Piece]) -> list[int]:
        """Ids of the pieces; neighbouring text is encoded as one stretch, as a whole rendered prompt would be."""
        ids: list[int] = []
        stretch: list[str] = []
        for piece in pieces:
            for part in self.resolve(piece):
                if isinstance(part, str):
                    stretch.append(part)
                    continue
                ids += self.encode("".join(stretch))
                stretch.clear()
                ids.append(part)
        return ids + self.encode("".join(stretch))

    def resolve(self, piece: Piece) -> list[str | int]:
        """The piece as text without meaning and ids."""
        if not isinstance(piece, (Scaffold, Own)):
            return [piece]
        known, pattern = (self.control, self._marker) if isinstance(piece, Scaffold) else (self.own, self._tag)
        return [known.get(part, part) for part in pattern.split(piece) if part] if pattern else [str(piece)]

    def count_markers(self, text: str) -> int:
        """How often `text` spells a control token that encoding splits: attempts, or accidents. In the policy's own text its tags are none."""
        harmless = self.own if isinstance(text, Own) else {}
        return sum(found.group() not in harmless for found in self._marker.finditer(text)) if self._marker else 0

    def decode(self, ids: Sequence[int]) -> str:
        """The exact text of `ids`, control tokens spelled out."""
        return str(self.backend.decode([int(token) for token in ids], skip_special_tokens=False))

    def _banned(self, text: str) -> list[int]:
        encoding = self._plain.encode(text, add_special_tokens=False)
        if self.control_ids.isdisjoint(encoding.ids):
            return list(encoding.ids)
        parts: list[str] = []
        start = 0
        for token, (begin, end) in zip(encoding.ids, encoding.offsets, strict=True):
            if token not in self.control_ids or end <= begin:
                continue
            cut = begin + 1 if end - begin > 1 else begin
            parts.append(text[start:cut])
            start = cut if end - begin > 1 else end
        parts.append(text[start:])
        if parts == [text]:
            return [token for token in encoding.ids if token not in self.control_ids]
        return [token for part in parts if part for token in self._banned(part)]


def _any_of(tokens: Iterable[str]) -> re.Pattern[str] | None:
    """Matches any of the tokens, the longest first."""
    spelled = sorted(tokens, key=len, reverse=True)
    return re.compile(f"({'|'.join(map(re.escape, spelled))})") if spelled else None


def _control_tokens(tokenizer: Any, backend: Tokenizer, markers: Iterable[str]) -> dict[str, int]:
    named = {str(token) for name, token in tokenizer.special_tokens_map.items() if name != "unk_token" and isinstance(token, str)}
    wanted = named | set(markers)
    # An unknown token stands for characters the vocabulary lacks: banning it would ban those characters.
    unknown = {str(tokenizer.unk_token)} - wanted if tokenizer.unk_token else set()
    control = {
        token.content: index for index, token in backend.get_added_tokens_decoder().items() if token.content.strip() and token.content not in unknown
    }
    for text in wanted - control.keys():
        index = backend.token_to_id(text)
        if index is not None:
            control[text] = index
    return control


def _without_added_tokens(backend: Tokenizer, control: Mapping[str, int]) -> Tokenizer:
    """A copy that matches no control token in text; padding, truncation and the post-processor go too."""
    state = json.loads(backend.to_str())
    state.update(truncation=None, padding=None, post_processor=None)
    _never_first(state.get("pre_tokenizer"))
    kept = [token for token in state["added_tokens"] if token["content"] not in control]
    plain = Tokenizer.from_str(json.dumps(state | {"added_tokens": kept}))
    if any(plain.token_to_id(token["content"]) != token["id"] for token in kept):
        # Ids of added tokens follow their order, so leaving some out can move the rest: then plain spelling serves.
        plain = Tokenizer.from_str(json.dumps(state | {"added_tokens": []}))
    return plain


def _never_first(pre_tokenizer: dict[str, Any] | None) -> None:
    """Every stretch we encode follows a control token, so a prefix meant for the start of the text belongs to none of them."""
    if pre_tokenizer is None:
        return
    for part in pre_tokenizer.get("pretokenizers", ()):
        _never_first(part)
    if pre_tokenizer.get("prepend_scheme") == "first":
        pre_tokenizer["prepend_scheme"] = "never"
