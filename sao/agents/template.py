"""The fallback renderer: any chat template, used so that it can only append.

The template is rendered with placeholders where the messages' text goes. What the template itself wrote is scaffold, its control tokens
become ids; the text goes in afterwards, encoded with control ids banned.

A delta is the difference between a fixed dummy conversation with and without the new messages, cut after the dummy assistant's text. Where
the new messages change what stands before the cut (a template that strips earlier reasoning, say), the answer is a Fork.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from jinja2 import TemplateError

from sao.agents.encoding import Own, Piece, Scaffold, TextEncoder
from sao.agents.renderer import Fork, Tools
from sao.agents.tool_calls import (
    CLOSE_TAG,
    OPEN_TAG,
    THINK,
    THINK_END,
    after_reasoning,
    parse_items,
    structured_calls,
    tagged_calls,
    turn_items,
)
from sao.environment import Action, Message
from sao.errors import ConfigError, UserError

_SLOT = re.compile(r"SLOTq(\d+)z")
_TURN = "SLOTq0z"
_DUMMY: tuple[Message, ...] = ({"role": "user", "content": "u"}, {"role": "assistant", "content": _TURN})


class _Slots:
    """Placeholders for text. Slot 0 is the dummy assistant's turn; `own` are texts of assistants, `droppable` reasoning and fields beside the text."""

    def __init__(self) -> None:
        self.texts: list[str] = [""]
        self.own: set[int] = set()
        self.droppable: set[int] = set()

    def put(self, text: str, own: bool = False, droppable: bool = False) -> str:
        """The placeholder, with the whitespace around the text left outside: a template may trim it."""
        core = text.strip()
        if not core:
            return text
        number = len(self.texts)
        self.texts.append(core)
        if own:
            self.own.add(number)
        if droppable:
            self.droppable.add(number)
        start = text.index(core)
        return f"{text[:start]}SLOTq{number}z{text[start + len(core) :]}"


class TemplateRenderer:
    """See `sao.agents.renderer.Renderer`. Needs a chat template; raises UserError without one.

    Stop ids: the first control token the template writes after an assistant's text, the tokenizer's eos, and those given. An assistant's text
    may hold tool and reasoning tags as ids; all other text has control ids banned.
    """

    def __init__(self, tokenizer: Any, reasoning: str = "keep", thinking: bool = True, extra_stop_ids: Sequence[int] = ()) -> None:
        if not getattr(tokenizer, "chat_template", None):
            raise UserError(
                "model.renderer=template needs a chat template, and the tokenizer in model.path has none: add one, or use model.renderer=chatml"
            )
        self.name, self.why = "template", ""
        self.tokenizer = tokenizer
        self.encoder = TextEncoder(tokenizer, tags=(OPEN_TAG, CLOSE_TAG, THINK, THINK_END))
        self.reasoning = reasoning
        self._tags = (OPEN_TAG, CLOSE_TAG, THINK_END) if THINK_END in self.encoder.own else (OPEN_TAG, CLOSE_TAG)
        self._options = {} if thinking else {"enable_thinking": False}
        spelled = sorted(self.encoder.control, key=len, reverse=True)
        self._control = re.compile(f"({'|'.join(map(re.escape, spelled))})")
        eos = getattr(tokenizer, "eos_token_id", None)
        closing = self._closing_ids()
        self.stop_ids: tuple[int, ...] = tuple(dict.fromkeys([*closing, *([] if eos is None else [int(eos)]), *extra_stop_ids]))
        if not self.stop_ids:
            raise UserError("the chat template in model.path closes a turn with no control token and the tokenizer has no eos: set eos_token")
        if not thinking and self._render(_DUMMY, None) == self._render(_DUMMY, None, enable_thinking=True):
            raise ConfigError("model.thinking=false does nothing with the chat template in model.path, which has no such switch: use true")

    def open(self, messages: Sequence[Message], tools: Tools) -> list[int]:
        """Ids of the whole conversation, ending with the generation prompt."""
        slots = _Slots()
        rendered = self._render([self._slotted(message, slots) for message in messages], self._shield(list(tools), slots))
        return self.encoder.compose(self._fill(rendered, slots, "the opening"))

    def delta(self, turn_ids: Sequence[int], messages: Sequence[Message]) -> list[int] | Fork:
        """Ids after a sampled turn, or a Fork where this template cannot append these messages."""
        if self.reasoning == "template" and any(message["role"] == "user" for message in messages):
            return Fork("reasoning")
        slots = _Slots()
        try:
            before = self._render(_DUMMY, None, generation=False)
            after = self._render([*_DUMMY, *(self._slotted(message, slots) for message in messages)], None)
        except UserError:
            return Fork("template_error")
        head, found, _ = before.partition(_TURN)
        if not found or not after.startswith(head + _TURN) or after.count(_TURN) != 1:
            return Fork("prefix_changed")
        try:
            pieces = self._fill(after[len(head) + len(_TURN) :], slots, "the new messages")
        except UserError:
            return Fork("text_changed")
        if len(turn_ids) > 0 and int(turn_ids[-1]) in self.stop_ids:
            pieces = _after_close(pieces, self.stop_ids)
        return self.encoder.compose(pieces)

    def generation(self) -> list[int]:
        """Ids of the generation prompt: what the template writes more when it is asked for one."""
        without, prompted = self._render(_DUMMY[:1], None, generation=False), self._render(_DUMMY[:1], None)
        if not prompted.startswith(without):
            raise UserError("the chat template in model.path changes the messages before its generation prompt: use another template")
        return self.encoder.compose([Scaffold(prompted[len(without) :])])

    def parse(self, turn_ids: Sequence[int], tools: Tools) -> Action:
        """Text and typed tool calls of a sampled turn."""
        items = turn_items(self.encoder, self._tags, self._body(turn_ids))
        return after_reasoning(items, lambda said: parse_items(said, tools))

    def text(self, turn_ids: Sequence[int]) -> str:
        """Exact text of a sampled turn without its stop id."""
        return self.encoder.decode(self._body(turn_ids))

    def encode_turn(self, message: Message) -> list[int]:
        """An assistant message as the policy would sample it, closed by the template's own token."""
        text = str(message.get("content") or "")
        return [*self.encoder.compose([Own(text), *tagged_calls(structured_calls(message), bool(text))]), self.stop_ids[0]]

    def count_markers(self, messages: Sequence[Message]) -> int:
        """Control tokens spelled in the messages' text."""
        texts = ((message["role"], str(message.get("content") or "")) for message in messages)
        return sum(self.encoder.count_markers(Own(text) if role == "assistant" else text) for role, text in texts)

    def _body(self, turn_ids: Sequence[int]) -> list[int]:
        ids = [int(token) for token in turn_ids]
        return ids[:-1] if ids and ids[-1] in self.stop_ids else ids

    def _closing_ids(self) -> list[int]:
        rendered = self._render(_DUMMY, None, generation=False)
        tail = rendered.partition(_TURN)[2]
        match = self._control.search(tail)
        return [self.encoder.control[match.group()]] if match else []

    def _slotted(self, message: Message, slots: _Slots) -> Message:
        """The message with its text as slots; reasoning tags stay outside them, so that a template that strips reasoning sees it."""
        assistant = message["role"] == "assistant"
        text = message.get("content") or ""
        slotted = self._shield({key: value for key, value in message.items() if key != "content"}, slots)
        if assistant and THINK_END in text:
            thought, _, answer = text.rpartition(THINK_END)
            before, tag, inside = thought.partition(THINK) if THINK in thought else ("", "", thought)
            thought = slots.put(before, own=True, droppable=True) + tag + slots.put(inside, own=True, droppable=True)
            content = thought + THINK_END + slots.put(answer, own=True)
        else:
            content = slots.put(text, own=assistant)
        return {**slotted, "content": content}

    def _shield(self, value: Any, slots: _Slots) -> Any:
        """A structure whose strings that spell a control token (or a slot) are slots, JSON-escaped, since templates write structures as JSON."""
        if isinstance(value, str):
            risky = self.encoder.count_markers(value) or _SLOT.search(value)
            return slots.put(json.dumps(value, ensure_ascii=False)[1:-1], droppable=True) if risky else value
        if isinstance(value, Mapping):
            return {self._shield(key, slots): self._shield(item, slots) for key, item in value.items()}
        if isinstance(value, (list, tuple)):
            return [self._shield(item, slots) for item in value]
        return value

    def _render(self, messages: Sequence[Message], tools: Any, generation: bool = True, **options: bool) -> str:
        settings = {"tokenize": False, "add_generation_prompt": generation, **self._options, **options}
        try:
            return str(self.tokenizer.apply_chat_template(list(messages), tools=tools or None, **settings))
        except (TemplateError, TypeError, ValueError, KeyError, AttributeError) as problem:
            roles = ", ".join(str(message["role"]) for message in messages)
            mend = "use model.renderer=chatml or another template"
            raise UserError(f"the chat template in model.path refused messages with the roles {roles} ({problem}): {mend}") from None

    def _fill(self, rendered: str, slots: _Slots, what: str) -> list[Piece]:
        """Scaffold and text as pieces. The template may drop an assistant's reasoning, nothing else, and double nothing."""
        seen: list[int] = []
        pieces: list[Piece] = []
        for index, part in enumerate(_SLOT.split(rendered)):
            if index % 2 == 0:
                pieces += self.encoder.resolve(Scaffold(part))
                continue
            number = int(part)
            seen.append(number)
            pieces.append(Own(slots.texts[number]) if number in slots.own else slots.texts[number])
        required = set(range(1, len(slots.texts))) - slots.droppable
        counted = [number for number in seen if number in required | slots.own]
        if len(counted) != len(set(counted)) or not required <= set(counted):
            raise UserError(f"the chat template in model.path drops, doubles or rewrites the text of {what}: use model.renderer=chatml")
        return pieces


def _after_close(pieces: list[Piece], stop_ids: Sequence[int]) -> list[Piece]:
    """The delta without the template's own close, for a turn that sampled one."""
    for index, piece in enumerate(pieces):
        if isinstance(piece, int):
            return pieces[index + 1 :] if piece in stop_ids else pieces
    return pieces
