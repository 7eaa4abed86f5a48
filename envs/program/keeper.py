"""Starts one agent program and ends everything it started, daemons included: run as `python keeper.py COMMAND...`.

A program's children may leave its session and its process group; what they cannot leave is the subtree of a subreaper. So each program has a keeper of its
own, which the kernel makes the parent of every orphan below it. When the program ends, or the keeper's standard input is closed (its worker has died, or
wants an end of it), the keeper kills whatever is left below it and exits with the program's code (128 + n after signal n).

Nothing but the standard library: one of these is started for every episode.
"""

import contextlib
import ctypes
import os
import select
import signal
import sys
import time

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
NOT_STARTED = 127


def descendants(root: int) -> list[int]:
    """Pids below `root`, from one look at /proc."""
    children: dict[int, list[int]] = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                with open(f"/proc/{name}/stat", "rb") as file:
                    parent = int(file.read().rpartition(b")")[2].split()[1])
            except (OSError, IndexError):
                continue
            children.setdefault(parent, []).append(int(name))
    found, waiting = [], [root]
    while waiting:
        below = children.get(waiting.pop(), [])
        found += below
        waiting += below
    return found


def reap(codes: dict[int, int]) -> bool:
    """Collect every child that has ended; False when there is none left at all."""
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return False
        if pid == 0:
            return True
        codes[pid] = os.waitstatus_to_exitcode(status)


def end_all(codes: dict[int, int]) -> None:
    """Kill until nothing is left: what forks meanwhile is met at the next look."""
    while reap(codes):
        for pid in descendants(os.getpid()):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.002)


def start(command: list[str], libc: ctypes.CDLL) -> int:
    pid = os.fork()
    if pid:
        return pid
    try:
        os.setsid()
        libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)  # should the keeper itself be killed
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        os.execvp(command[0], command)
    except OSError as problem:
        os.write(2, f"{command[0]} cannot be started: {problem.strerror}\n".encode())
    os._exit(NOT_STARTED)


def main() -> None:
    libc = ctypes.CDLL(None)
    libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    woken, wake = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.signal(signal.SIGCHLD, lambda number, frame: None)
    signal.set_wakeup_fd(wake)
    codes: dict[int, int] = {}
    program = start(sys.argv[1:], libc)
    while program not in codes:
        ready, _, _ = select.select([0, woken], [], [])
        if 0 in ready and not os.read(0, 4096):
            break
        if woken in ready:
            os.read(woken, 4096)
        reap(codes)
    end_all(codes)
    code = codes.get(program, -signal.SIGKILL)
    os._exit(code if code >= 0 else 128 - code)


if __name__ == "__main__":
    main()
