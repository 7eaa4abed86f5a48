"""Whose code a worker's process runs at this moment, kept where a crash cannot take it.

A worker holds many episodes at once, and its death implicates all of them. But it has one thread for them: a crash, an exit or an endless loop in an
environment happens while one episode runs and the others wait, so the one that runs is named in a small file, mapped into memory. What a process wrote
there is the kernel's, whatever ends the process. Code that an environment runs in threads or tasks of its own is not seen.
"""

from __future__ import annotations

import mmap
import types
from collections.abc import Callable, Coroutine, Generator
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

SIZE = 256  # bytes of the file: one name, filled up with zeros

T = TypeVar("T")


def path_of(logs: Path, worker: str) -> Path:
    return logs / f"{worker}.running"


class Recorder:
    """Called with the name of what runs from now on, or with nothing."""

    def __init__(self, path: Path) -> None:
        path.unlink(missing_ok=True)  # never cut short what an earlier process may still have mapped
        path.write_bytes(bytes(SIZE))
        with open(path, "r+b") as file:
            self._map = mmap.mmap(file.fileno(), SIZE)

    def __call__(self, name: str = "") -> None:
        self._map[:] = name.encode()[:SIZE].ljust(SIZE, b"\0")


def last_words(path: Path) -> str:
    """What ran when the process ended; empty when nothing did, or when the file is not to be had (a worker on another host)."""
    try:
        return path.read_bytes().rstrip(b"\0").decode(errors="replace")
    except OSError:
        return ""


@types.coroutine
def named(work: Coroutine[Any, Any, T], name: str, record: Callable[[str], None]) -> Generator[Any, Any, T]:
    """Await `work`, recording `name` while its own code runs and "" while it waits."""
    resume = partial(work.send, None)
    while True:
        record(name)
        try:
            awaited = resume()
        except StopIteration as done:
            return done.value
        finally:
            record("")
        try:
            resume = partial(work.send, (yield awaited))
        except BaseException as error:  # noqa: BLE001 - a cancellation, or what was awaited has failed: its business
            resume = partial(work.throw, error)
