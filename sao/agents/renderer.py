"""The renderer interface: how messages become token ids and a sampled turn becomes an action.

The token log is the truth. A renderer renders the opening once, then only ever says what to append after a sampled turn; it never renders a
sampled turn again. All methods are pure, so one renderer serves every concurrent episode of a worker.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Protocol

from sao.environment import Action, Message
from sao.errors import ConfigError, UserError

Tools = Sequence[Mapping[str, Any]]
RENDERERS = ("auto", "chatml", "qwen3", "llama3", "glm45", "template")


@dataclass(frozen=True)
class Fork:
    """Said instead of a delta: this template cannot append; the conversation goes on in a new segment. `reason` is counted."""

    reason: str


class Renderer(Protocol):
    """`stop_ids` end a turn; they are sampled tokens, given to the engine as stop ids. `name` is one of RENDERERS, never `auto`; `why` says why `auto` chose it."""

    name: str
    why: str
    stop_ids: tuple[int, ...]

    def open(self, messages: Sequence[Message], tools: Tools) -> list[int]:
        """Ids of the whole opening prompt, ending with the generation prompt."""
        ...

    def delta(self, turn_ids: Sequence[int], messages: Sequence[Message]) -> list[int] | Fork:
        """Ids to append after a sampled turn: its close where it does not end with a stop id, the separator, the messages, the generation prompt."""
        ...

    def generation(self) -> list[int]:
        """Ids of the generation prompt, with which every opening and delta ends."""
        ...

    def parse(self, turn_ids: Sequence[int], tools: Tools) -> Action:
        """Text and typed tool calls of a sampled turn."""
        ...

    def text(self, turn_ids: Sequence[int]) -> str:
        """The exact text of a sampled turn, without the stop id at its end."""
        ...

    def encode_turn(self, message: Message) -> list[int]:
        """An assistant message as the policy would sample it, stop id included; tool tags become their ids. For demonstrations."""
        ...

    def count_markers(self, messages: Sequence[Message]) -> int:
        """How often the messages' text spells a control token (it is encoded as plain text all the same)."""
        ...


def load_renderer(name: str, tokenizer: Any, *, reasoning: str = "keep", thinking: bool = True, extra_stop_ids: Sequence[int] = ()) -> Renderer:
    """The renderer `model.renderer` names, for a Hugging Face fast tokenizer; `auto` chooses (see `sao.agents.families.choose`).

    reasoning: `keep` appends, so earlier turns keep their reasoning; `template` lets the family strip it, with a new segment per user turn.
    thinking: false prompts the model not to reason, where the family has such a switch. extra_stop_ids: further end-of-turn ids, see
    `generation_stop_ids`. Raises ConfigError or UserError when they do not fit.
    """
    from sao.agents.families import FAMILIES, choose
    from sao.agents.layout import LayoutRenderer
    from sao.agents.template import TemplateRenderer

    if reasoning not in ("keep", "template"):
        raise ConfigError(f"model.reasoning={reasoning!r}: use keep or template")
    if name not in RENDERERS:
        near = get_close_matches(name, RENDERERS, n=1)
        raise ConfigError(f"model.renderer={name!r} is not a renderer: use {' or '.join(near or RENDERERS)}")
    name, why = choose(tokenizer) if name == "auto" else (name, "")
    renderer: Renderer
    if name == "template":
        renderer = TemplateRenderer(tokenizer, reasoning, thinking, extra_stop_ids)
    else:
        renderer = LayoutRenderer(FAMILIES[name](thinking), tokenizer, reasoning, extra_stop_ids)
    renderer.why = why
    return renderer


def generation_stop_ids(model_dir: str) -> tuple[int, ...]:
    """End-of-turn ids of a model directory's generation_config.json; empty where there is none."""
    path = Path(model_dir) / "generation_config.json"
    if not path.is_file():
        return ()
    try:
        eos = json.loads(path.read_text(encoding="utf-8")).get("eos_token_id")
    except (ValueError, AttributeError) as problem:
        raise UserError(f"{path} is not a JSON object ({problem}): mend or remove it") from None
    return tuple(int(token) for token in (eos if isinstance(eos, list) else [eos]) if token is not None)


def demonstration_tokens(renderer: Renderer, messages: Sequence[Message], tools: Tools) -> tuple[list[int], list[bool]]:
    """A complete conversation as the turn loop would log it: token ids, and a mask that is true on assistant turns, stop id included.

    `messages` starts with the opening (system, user) and ends with an assistant message. Raises UserError otherwise.
    """
    turns = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
    if not turns or turns[0] == 0 or turns[-1] != len(messages) - 1:
        raise UserError("a demonstration must open with other messages and end with an assistant's: mend the environment's demonstration()")
    ids = renderer.open(messages[: turns[0]], tools)
    mask = [False] * len(ids)
    for index, following in zip(turns, [*turns[1:], None], strict=True):
        turn = renderer.encode_turn(messages[index])
        ids += turn
        mask += [True] * len(turn)
        if following is not None:
            delta = renderer.delta(turn, messages[index + 1 : following])
            if isinstance(delta, Fork):
                raise UserError(f"this chat template cannot append turns ({delta.reason}): use model.renderer=chatml for demonstrations")
            ids += delta
            mask += [False] * len(delta)
    return ids, mask
