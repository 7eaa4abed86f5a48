"""The parent's side of one reward worker process: started on demand, killed for certain when it overruns, started again at the next call.

The process is executed, never forked, so it inherits no thread, lock or tensor of this process; it leads its own process group, which is
what gets killed, so that programs the function starts go with it.
"""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

from sao.environment import Message
from sao.errors import RewardFailure
from sao.rewards.child import frame, receive

START_TIMEOUT_S = 60.0
# How often a wait for the answer looks whether the process still lives: a program started by the function may hold its socket open.
LIVENESS_S = 0.2
BOOTSTRAP = "import sys; argv, sys.path[:] = sys.argv[1:3], sys.argv[3:]; from sao.rewards.child import main; main(int(argv[0]), argv[1])"


class RewardProcess:
    """One worker process. `call` is used by one thread at a time; `close` may come from any other."""

    def __init__(self, function: str) -> None:
        self._function = function
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: socket.socket | None = None
        self._closed = False
        self._lock = threading.Lock()

    @property
    def pid(self) -> int | None:
        process = self._process
        return process.pid if process is not None and _alive(process) else None

    def call(self, completion: str, row: Mapping[str, Any], messages: Sequence[Message] | None, timeout_s: float) -> float:
        """Score one completion. Starting the process does not count against timeout_s. Raises RewardFailure of any kind."""
        name = f"reward.function={self._function}"
        request = pickle.dumps((completion, dict(row), None if messages is None else list(messages)), protocol=pickle.HIGHEST_PROTOCOL)
        if self.pid is None:
            self._start()
        answer = self._exchange(request, timeout_s, f"{name} did not answer within reward.timeout_s={timeout_s:g} and its process was killed")
        if "score" in answer:
            return float(answer["score"])
        raise RewardFailure(str(answer["message"]), str(answer["kind"]))

    def close(self) -> None:
        """Kill the process and refuse further calls. A call that is running fails with kind crashed."""
        with self._lock:
            self._closed = True
            self._kill()

    def _start(self) -> None:
        with self._lock:
            if self._closed:
                raise RewardFailure(f"the reward runner of {self._function} is closed", "crashed")
            self._kill()
            ours, theirs = socket.socketpair()
            with theirs:
                # The child finds what this process finds. Not by PYTHONPATH, which programs that the function starts would inherit.
                search = [entry or os.getcwd() for entry in sys.path]
                self._process = subprocess.Popen(
                    [sys.executable, "-c", BOOTSTRAP, str(theirs.fileno()), self._function, *search],
                    pass_fds=(theirs.fileno(),),
                    stdin=subprocess.DEVNULL,
                    env={"OMP_NUM_THREADS": "1", **os.environ},
                    start_new_session=True,
                )
            self._connection = ours
        answer = self._exchange(None, START_TIMEOUT_S, f"reward.function={self._function} took over {START_TIMEOUT_S:g} s to import")
        if "error" in answer:
            self._kill_locked()
            raise RewardFailure(str(answer["error"]), "raised")

    def _exchange(self, request: bytes | None, timeout_s: float, overrun: str) -> dict[str, Any]:
        connection, process = self._connection, self._process
        if connection is None or process is None:
            raise RewardFailure(f"the reward runner of {self._function} is closed", "crashed")
        try:
            if request is not None:
                connection.settimeout(timeout_s)
                connection.sendall(frame(request))
            self._wait(connection, process, time.monotonic() + timeout_s)
            body = receive(connection)
        except TimeoutError:
            self._kill_locked()
            raise RewardFailure(overrun, "timeout") from None
        except OSError:
            body = None
        if body is None:
            self._kill_locked()
            raise RewardFailure(f"the process of reward.function={self._function} died ({_cause(process)})", "crashed")
        answer: dict[str, Any] = json.loads(body)
        return answer

    def _wait(self, connection: socket.socket, process: subprocess.Popen[bytes], deadline: float) -> None:
        """Return when an answer or the end can be read. Raises TimeoutError at the deadline, OSError when the process is dead."""
        while True:
            dead = not _alive(process)
            left = deadline - time.monotonic()
            if left <= 0:
                raise TimeoutError
            connection.settimeout(min(LIVENESS_S, left))
            try:
                connection.recv(1, socket.MSG_PEEK)
            except TimeoutError:
                if dead:
                    raise ConnectionError("the process is dead and left no answer") from None
                continue
            connection.settimeout(max(left, LIVENESS_S))
            return

    def _kill_locked(self) -> None:
        with self._lock:
            self._kill()

    def _kill(self) -> None:
        process, self._process = self._process, None
        connection, self._connection = self._connection, None
        if process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        if connection is not None:
            connection.close()


def _alive(process: subprocess.Popen[bytes]) -> bool:
    """Whether it runs. Does not reap it: until its group is killed the process id must not be given to another."""
    try:
        return process.returncode is None and os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None
    except ChildProcessError:
        return False


def _cause(process: subprocess.Popen[bytes]) -> str:
    code = process.returncode
    if code is None:
        return "cause unknown"
    return f"exit code {code}" if code >= 0 else f"killed by {signal.Signals(-code).name}"
