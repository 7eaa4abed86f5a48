"""Whose code a worker's process runs at this moment, kept where a crash cannot take it, and watched by a thread that a loop held up cannot stop.

A worker holds many episodes at once, and its death implicates all of them. But it has one thread for them: a crash, an exit or an endless loop in an
environment happens while one episode runs and the others wait, so the one that runs is named in a small file, mapped into memory, with the method of
its environment and the time since when. What a process wrote there is the kernel's, whatever ends the process. Code that an environment runs in threads
or tasks of its own is not seen.
"""

from __future__ import annotations

import logging
import mmap
import sys
import threading
import time
import traceback
from collections.abc import Callable, Coroutine
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from sao.agents.held import BLOCKED_S, watched

SIZE = 256  # bytes of the file, filled up with zeros
LOOK_S = 0.25
SAY_AGAIN = 4.0  # a hold is told of after BLOCKED_S, and whenever it has become so many times longer
OURS = ("/asyncio/", "/sao/agents/", "/sao/rollout/")  # parts of a path at which the culprit is not

T = TypeVar("T")
log = logging.getLogger(__name__)


class Words(NamedTuple):
    """What ran: an episode's name, the method of its environment (empty: code of ours), and for how many seconds it had run without letting go."""

    episode: str = ""
    method: str = ""
    seconds: float = 0.0

    def __str__(self) -> str:
        if not self.episode:
            return ""
        return f"it was running {self.method or 'code'} of episode {self.episode}, for {self.seconds:.1f} s"


def path_of(logs: Path, worker: str) -> Path:
    return logs / f"{worker}.running"


class Recorder:
    """Called with the name of the episode that runs from now on and the method of its environment, or with nothing."""

    def __init__(self, path: Path) -> None:
        path.unlink(missing_ok=True)  # never cut short what an earlier process may still have mapped
        path.write_bytes(bytes(SIZE))
        with open(path, "r+b") as file:
            self._map = mmap.mmap(file.fileno(), SIZE)
        self.running: tuple[str, str, float, int] = ("", "", 0.0, 0)  # episode, method, since, thread

    def __call__(self, name: str = "", method: str = "") -> None:
        self.running = (name, method, time.monotonic(), threading.get_ident())
        words = f"{name} {time.time():.2f} {method}" if name else ""
        self._map[:] = words.encode()[:SIZE].ljust(SIZE, b"\0")


def last_words(path: Path) -> Words:
    """What ran when the process ended, or runs; empty when nothing did, or when the file is not to be had (a worker on another host)."""
    try:
        name, since, method = path.read_bytes().rstrip(b"\0").decode(errors="replace").split(" ", 2)
        return Words(name, method, max(time.time() - float(since), 0.0))
    except (OSError, ValueError):
        return Words()


async def named(work: Coroutine[Any, Any, T], name: str, record: Callable[[str], None]) -> T:
    """Await `work`, recording `name` while its own code runs and "" while it waits."""
    return await watched(work, partial(record, name), partial(record, ""))


class Watch(threading.Thread):
    """Says in the log which code holds the event loop, and at which line, while it still does: an endless loop never comes to say so itself.

    It cannot when that code holds the interpreter as well (a regular expression that runs away); then the driver finds the worker silent and says who.
    """

    def __init__(self, recorder: Recorder) -> None:
        super().__init__(name="watch", daemon=True)
        self.recorder = recorder
        self.stopped = threading.Event()

    def run(self) -> None:
        told, after = 0.0, BLOCKED_S
        while not self.stopped.wait(LOOK_S):
            name, method, since, thread = self.recorder.running
            held = time.monotonic() - since
            after = after if since == told else BLOCKED_S
            if name and held > after:
                told, after = since, held * SAY_AGAIN
                log.warning("%s of episode %s has held the event loop for %.1f s%s", method or "code", name, held, _line(thread))


def _line(thread: int) -> str:
    """Where a thread is: its innermost line that is not ours; empty when it is gone."""
    frame = sys._current_frames().get(thread)
    stack = traceback.extract_stack(frame) if frame is not None else []
    theirs = [at for at in stack if not any(part in at.filename for part in OURS)]
    return f", at {theirs[-1].filename}:{theirs[-1].lineno} in {theirs[-1].name}" if theirs else ""
