"""Ending what a command left running where no PID namespace does it: by its uid if it has one, else by descent and by the mark it was started with."""

from __future__ import annotations

import contextlib
import os
import signal

from sao.sandbox.box import Box

ROUNDS = 20  # a process may start another while it is looked for


def end_stragglers(pid: int, box: Box, known: set[int]) -> None:
    """Kill everything of the box's command `pid`, itself included. known: the daemon's own children, which orphans of a command join."""
    for _ in range(ROUNDS):
        found = _of_uid(box.uid) if box.uid is not None else _of_descent(pid, box.box_id, known)
        if not found:
            return
        for process in found:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(process, signal.SIGKILL)


def _pids() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def _of_uid(uid: int) -> list[int]:
    found = []
    for pid in _pids():
        with contextlib.suppress(OSError):
            if os.stat(f"/proc/{pid}").st_uid == uid and _state(pid)[0] != "Z":
                found.append(pid)
    return found


def _of_descent(pid: int, box_id: str, known: set[int]) -> list[int]:
    """What descends from `pid`, and orphans unless they carry the mark of another sandbox; a command may have cleared its own."""
    parents = {}
    for process in _pids():
        with contextlib.suppress(OSError):
            state, parent = _state(process)
            if state != "Z":
                parents[process] = parent
    orphans = {p for p, parent in parents.items() if parent == os.getpid() and p not in known and _mark(p) in (box_id, "")}
    wanted = orphans | ({pid} & set(parents))
    while True:
        more = {p for p, parent in parents.items() if parent in wanted} - wanted
        if not more:
            return sorted(wanted)
        wanted |= more


def _state(pid: int) -> tuple[str, int]:
    with open(f"/proc/{pid}/stat") as file:
        fields = file.read().rpartition(")")[2].split()
    return fields[0], int(fields[1])


def _mark(pid: int) -> str:
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            marks = [entry[12:].decode() for entry in file.read().split(b"\0") if entry.startswith(b"SAO_SANDBOX=")]
    except OSError:
        return ""
    return marks[0] if marks else ""
