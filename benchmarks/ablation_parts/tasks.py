"""Three tasks of different structure, as batched environments, with demonstrations of mixed quality for the warm start.

    chain    single-turn reasoning. `a op b op c op d =`, operands modulo 7, evaluated from the left; the policy may write intermediate results and ends
             with STOP. Reward 1 when the last digit it wrote is the result.
    lookup   multi-turn tool use. A hidden table of 8 keys, drawn for each episode. `QUERY k`; `ASK k` shows two entries of the table, one of them k's, in
             random order (5 observation tokens, mask 0); at most 3 questions; `SAY v` ends. Reward 1 when v is the entry of the entry of k: two hops.
    dial     long sparse credit. `GO s k1 k2 k3`; then 18 decisions, the t-th right one being the previous plus k[t mod 3] modulo 6. Reward 1 at the end
             when ALL were right, else 0: one slip costs everything, and nothing says where it was.

An episode is a row of a payload, int64 [R, columns]; payloads are drawn per copy and laid end to end. chain and dial hold out a fifth of their payloads by
a hash; lookup's table space (8^8) is too large to meet twice. Token 0 is PAD. `Episodes` is the protocol of examples/reference_sao.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ablation_parts.stack import reference

PAD, POLICY = reference.PAD, reference.POLICY


def _heldout(payload: Tensor) -> Tensor:
    """bool [R]: a fifth of all payloads, whatever their order."""
    mixed = torch.zeros(len(payload), dtype=torch.long)
    for column in payload.T:
        mixed = (mixed * 31 + column + 7) * 2654435761 % 2147483647
    return mixed % 5 == 0


def draw(task: type[Task], count: int, generator: torch.Generator, *, heldout: bool) -> Tensor:
    """`count` payloads, [count, columns], all of the training split or all held out."""
    if not task.splits:
        return task.payloads(count, generator)
    kept = torch.zeros(0, 0)
    found: list[Tensor] = []
    while sum(len(part) for part in found) < count:
        some = task.payloads(max(count, 64) * (6 if heldout else 2), generator)
        kept = some[_heldout(some) == heldout]
        found.append(kept)
    return torch.cat(found)[:count]


@dataclass(eq=False)
class Task:
    """R episodes. `name`, `vocabulary`, `max_tokens` and `splits` describe the task; `warm_steps` is the length of its supervised start."""

    payload: Tensor
    name: ClassVar[str]
    vocabulary: ClassVar[int]
    max_tokens: ClassVar[int]
    warm_steps: ClassVar[int]
    splits: ClassVar[bool] = True

    @staticmethod
    def payloads(count: int, generator: torch.Generator) -> Tensor:
        raise NotImplementedError

    @property
    def prompt(self) -> Tensor:
        raise NotImplementedError

    def next(self, ids_BN: Tensor) -> Tensor:
        raise NotImplementedError

    def rewards(self, ids_BT: Tensor) -> Tensor:
        raise NotImplementedError

    def demonstrations(self, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """(ids [R, T], mask [R, T - 1]) of full episodes, some of them wrong."""
        raise NotImplementedError

    def _played(self, choose: object, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Episodes in which `choose(ids, generator) -> [R]` moves for the policy."""
        ids, mask = self.prompt, [torch.zeros(len(self.payload), self.prompt.shape[1] - 1, dtype=torch.bool)]
        while ids.shape[1] < self.max_tokens:
            forced = self.next(ids)
            acts = forced == POLICY
            token = torch.where(acts, choose(ids, generator), forced)  # type: ignore[operator]
            ids = torch.cat([ids, token[:, None]], 1)
            mask.append(acts[:, None])
        return ids, torch.cat(mask, 1)


def _slip(right: Tensor, low: int, count: int, share: float, generator: torch.Generator) -> Tensor:
    """`right`, with `share` of the entries replaced by a random token of low .. low + count - 1."""
    wrong = torch.rand(right.shape, generator=generator) < share
    return torch.where(wrong, torch.randint(low, low + count, right.shape, generator=generator), right)


class Chain(Task):
    name, vocabulary, max_tokens, warm_steps = "chain", 13, 14, 900
    STOP, EQUALS, PLUS, TIMES, MINUS, DIGITS, BASE = 1, 2, 3, 4, 5, 6, 7

    @staticmethod
    def payloads(count: int, generator: torch.Generator) -> Tensor:
        numbers = torch.randint(Chain.BASE, (count, 4), generator=generator)
        return torch.cat([numbers, torch.randint(3, (count, 3), generator=generator)], 1)

    @property
    def prompt(self) -> Tensor:
        number, sign = self.DIGITS + self.payload[:, :4], self.PLUS + self.payload[:, 4:]
        equals = torch.full_like(number[:, 0], self.EQUALS)
        return torch.stack([number[:, 0], sign[:, 0], number[:, 1], sign[:, 1], number[:, 2], sign[:, 2], number[:, 3], equals], 1)

    def partial(self) -> Tensor:
        """[R, 3]: results after each operator."""
        values = [self.payload[:, 0]]
        for i in range(3):
            left, right, sign = values[-1], self.payload[:, i + 1], self.payload[:, 4 + i]
            values.append(torch.where(sign == 0, left + right, torch.where(sign == 1, left * right, left - right)) % self.BASE)
        return torch.stack(values[1:], 1)

    def next(self, ids_BN: Tensor) -> Tensor:
        over = (ids_BN[:, 8:] == self.STOP).any(1) | (ids_BN[:, 8:] == PAD).any(1)
        return torch.where(over, PAD, POLICY)

    def rewards(self, ids_BT: Tensor) -> Tensor:
        """The last digit written before STOP (or before the room ended)."""
        written = ids_BT[:, 8:]
        digit = written >= self.DIGITS
        place = torch.where(digit, torch.arange(1, written.shape[1] + 1), 0).amax(1)
        last = written.gather(1, (place - 1).clamp_min(0)[:, None])[:, 0]
        return ((place > 0) & (last == self.DIGITS + self.partial()[:, -1])).float()

    def demonstrations(self, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Three partial results and STOP; each is a guess in 6 % of the cases, and a fifth of the episodes gives the result without any working."""
        steps = _slip(self.DIGITS + self.partial(), self.DIGITS, self.BASE, 0.06, generator)
        stop, pad = (torch.full_like(steps[:, :1], token) for token in (self.STOP, PAD))
        full = torch.cat([steps, stop, pad, pad], 1)
        short = torch.cat([steps[:, 2:], stop, pad, pad, pad, pad], 1)
        answer = torch.where(torch.rand(len(steps), 1, generator=generator) < 0.2, short, full)
        ids = torch.cat([self.prompt, answer], 1)
        return ids, torch.cat([torch.zeros(len(ids), 7, dtype=torch.bool), answer != PAD], 1)


class Lookup(Task):
    name, vocabulary, max_tokens, warm_steps, splits = "lookup", 13, 25, 320, False
    QUERY, ASK, SAY, OBS, DIGITS, KEYS, QUESTIONS = 1, 2, 3, 4, 5, 8, 3

    @staticmethod
    def payloads(count: int, generator: torch.Generator) -> Tensor:
        """key, table[8], then for each question another key to show and the order."""
        return torch.cat(
            [
                torch.randint(Lookup.KEYS, (count, 1 + Lookup.KEYS), generator=generator),
                torch.randint(1, Lookup.KEYS, (count, Lookup.QUESTIONS), generator=generator),
                torch.randint(2, (count, Lookup.QUESTIONS), generator=generator),
            ],
            1,
        )

    @property
    def prompt(self) -> Tensor:
        return torch.stack([torch.full_like(self.payload[:, 0], self.QUERY), self.DIGITS + self.payload[:, 0]], 1)

    @property
    def table(self) -> Tensor:
        return self.payload[:, 1 : 1 + self.KEYS]

    def entry(self, key: Tensor) -> Tensor:
        return self.table.gather(1, key[:, None])[:, 0]

    def next(self, ids_BN: Tensor) -> Tensor:
        """Turns start at columns 2, 9 and 16: two tokens of the policy, five of the environment; the last turn, at 23, has no answer."""
        at = ids_BN.shape[1] - 2
        turn, place = divmod(at, 7)
        forced = torch.full_like(ids_BN[:, 0], POLICY)
        if place >= 2:
            forced = self._shown(turn, ids_BN[:, 2 + 7 * turn + 1] - self.DIGITS)[:, place - 2]
        asked = torch.ones(len(ids_BN), dtype=torch.bool)
        for t in range(turn + (place >= 1)):
            first = ids_BN[:, 2 + 7 * t]
            asked &= first == self.ASK
        for t in range(turn + (place >= 2)):
            asked &= ids_BN[:, 3 + 7 * t] >= self.DIGITS
        if place == 1:  # a turn of SAY goes on for its second token
            opened = torch.ones_like(asked)
            for t in range(turn):
                opened &= (ids_BN[:, 2 + 7 * t] == self.ASK) & (ids_BN[:, 3 + 7 * t] >= self.DIGITS)
            asked = asked | opened & (ids_BN[:, 2 + 7 * turn] == self.SAY)
        return torch.where(asked, forced, PAD)

    def _shown(self, turn: int, key: Tensor) -> Tensor:
        key = key.clamp(0, self.KEYS - 1)
        other = (key + self.payload[:, 1 + self.KEYS + turn]) % self.KEYS
        flipped = self.payload[:, 1 + self.KEYS + self.QUESTIONS + turn] == 1
        first, second = torch.where(flipped, other, key), torch.where(flipped, key, other)
        obs = torch.full_like(key, self.OBS)
        return torch.stack([obs, *(self.DIGITS + x for x in (first, self.entry(first), second, self.entry(second)))], 1)

    def rewards(self, ids_BT: Tensor) -> Tensor:
        right = self.DIGITS + self.entry(self.entry(self.payload[:, 0]))
        won = torch.zeros(len(ids_BT), dtype=torch.bool)
        playing = torch.ones_like(won)
        for start in range(2, ids_BT.shape[1] - 1, 7):
            won |= playing & (ids_BT[:, start] == self.SAY) & (ids_BT[:, start + 1] == right)
            playing &= (ids_BT[:, start] == self.ASK) & (ids_BT[:, start + 1] >= self.DIGITS)
        return won.float()

    def demonstrations(self, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Ask k, ask its entry, say the entry's entry; each key or value is a guess in 6 % of the cases, and a fifth answers after one question."""
        hasty = torch.rand(len(self.payload), generator=generator) < 0.2
        once = self.entry(self.payload[:, 0])
        keys = [self.payload[:, 0], once, self.entry(once)]

        def choose(ids: Tensor, generator: torch.Generator) -> Tensor:
            turn, place = divmod(ids.shape[1] - 2, 7)
            says = hasty if turn == 1 else torch.full_like(hasty, turn >= 2)
            if place == 0:
                return torch.where(says, self.SAY, self.ASK)
            return _slip(self.DIGITS + keys[min(turn, 2)], self.DIGITS, self.KEYS, 0.06, generator)

        return self._played(choose, generator)


class Dial(Task):
    name, vocabulary, max_tokens, warm_steps = "dial", 8, 23, 500
    GO, DIGITS, BASE, DECISIONS = 1, 2, 6, 18

    @staticmethod
    def payloads(count: int, generator: torch.Generator) -> Tensor:
        return torch.randint(Dial.BASE, (count, 4), generator=generator)

    @property
    def prompt(self) -> Tensor:
        return torch.cat([torch.full_like(self.payload[:, :1], self.GO), self.DIGITS + self.payload], 1)

    def right(self) -> Tensor:
        """[R, 18]"""
        moves = self.payload[:, 1:].repeat(1, self.DECISIONS // 3).cumsum(1)
        return self.DIGITS + (self.payload[:, :1] + moves) % self.BASE

    def next(self, ids_BN: Tensor) -> Tensor:
        return torch.full_like(ids_BN[:, 0], POLICY)

    def rewards(self, ids_BT: Tensor) -> Tensor:
        return (ids_BT[:, 5:] == self.right()[:, : ids_BT.shape[1] - 5]).all(1).float()

    def demonstrations(self, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Right after whatever came before, with a random slip in 3 % of the decisions."""

        def choose(ids: Tensor, generator: torch.Generator) -> Tensor:
            at = ids.shape[1] - 5
            before = self.payload[:, 0] if at == 0 else ids[:, -1] - self.DIGITS
            return _slip(self.DIGITS + (before + self.payload[:, 1 + at % 3]) % self.BASE, self.DIGITS, self.BASE, 0.03, generator)

        return self._played(choose, generator)


TASKS: dict[str, type[Task]] = {task.name: task for task in (Chain, Lookup, Dial)}
