"""actions=edit: a few numbered lines, and one of them to be changed. What is shown, and what a right and a wrong turn look like."""

from __future__ import annotations

import random
import zlib
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path

from sao.environment import Message
from sao.swe.mutations import Mutation, mutations
from sao.swe.repo import SOURCES, SweTask
from sao.swe.workspace import published

SWAPS = ("==", "!="), ("<", ">="), (">", "<="), ("and", "or"), ("+", "-"), ("not", ""), ("in", "not in"), ("is", "is not"), ("*", "//")


def opening(data: bytes, task: SweTask, context: int, statement: bool) -> list[Message]:
    """The lines around the bug of a task; `data` is the file with the bug."""
    shown = listing(data, int(task.mutation["line"]), context, zlib.crc32(task.instance_id.encode()))
    return [{"role": "user", "content": f"{task.statement}\n{task.mutation['path']}:\n{shown}" if statement else shown}]


def listing(data: bytes, line: int, context: int, place: int) -> str:
    """2 * context + 1 lines with their numbers, `line` somewhere among them: `place` says where. A single line loses its indentation."""
    lines = data.decode("utf-8", "replace").splitlines()
    size = 2 * context + 1
    first = max(1, line - place % size)
    shown = range(first, min(first + size - 1, len(lines)) + 1)
    return "\n".join(f"{number}: {lines[number - 1] if context else lines[number - 1].strip()}" for number in shown)


def right_edit(line: int, wrong: str, right: str) -> str:
    """The shortest swap of whole words that makes `right` of `wrong`; else the whole line."""
    old, new = difference(wrong, right)
    if old and new and wrong.replace(old, new, 1) == right:
        return f"in line {line}: {old} => {new}"
    return f"replace line {line}: {right.strip()}"


def difference(before: str, after: str) -> tuple[str, str]:
    """The parts in which two lines differ, widened to the spaces around them."""
    shorter = min(len(before), len(after))
    start = next((i for i in range(shorter) if before[i] != after[i]), shorter)
    end = 0
    while end < shorter - start and before[-1 - end] == after[-1 - end]:
        end += 1
    start = before.rfind(" ", 0, start) + 1
    end -= len(before[len(before) - end :].split(" ", 1)[0]) if end else 0
    return before[start : len(before) - end].strip(), after[start : len(after) - end].strip()


def wrong_edit(line: int, wrong: str, rng: random.Random) -> str:
    """A swap of something that is in the line, or of nothing that is."""
    words = [word for word in wrong.split() if "=>" not in word] or ["pass"]
    old = rng.choice(words)
    pairs = [pair for pair in (*SWAPS, *((b, a) for a, b in SWAPS)) if pair[0] and pair[0] in wrong.split()]
    swap = rng.choice(pairs) if pairs and rng.random() < 0.5 else (old, rng.choice(words))
    return f"in line {line}: {swap[0]} => {swap[1] or 'pass'}"


def demonstration(
    repo: Path, files: Sequence[tuple[str, str]], kinds: Sequence[str], context: int, rng: random.Random, *, right: bool
) -> list[Message]:
    """A line of one of the files broken by a mutation, and a turn. files: (source archive, path)."""
    while True:
        source, path = rng.choice(files)
        data = published(repo / SOURCES / source, path)
        found = _by_kind(data)
        kind = rng.choice([kind for kind in kinds if found.get(kind)] or [""])
        if kind:
            break
    mutation = rng.choice(found[kind])
    broken = mutation.apply(data)
    was, now = (text.splitlines()[mutation.line - 1].decode("utf-8", "replace") for text in (data, broken))
    said = right_edit(mutation.line, now, was) if right else wrong_edit(mutation.line, now, rng)
    question = listing(broken, mutation.line, context, rng.randrange(2 * context + 1))
    return [{"role": "user", "content": question}, {"role": "assistant", "content": said}]


@lru_cache(maxsize=512)
def _by_kind(data: bytes) -> dict[str, list[Mutation]]:
    found: dict[str, list[Mutation]] = {}
    for mutation in mutations(data):
        found.setdefault(mutation.kind, []).append(mutation)
    return found
