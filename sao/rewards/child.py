"""The worker process of a synchronous reward function: imports it once, then answers one request at a time.

Started by `sao.rewards.process`. Frames in both directions are a length (8 bytes, big-endian) and a body: requests are
pickles, answers are JSON, so that nothing the function's code leaves behind is unpickled by the parent.
"""

from __future__ import annotations

import json
import os
import pickle
import socket
import struct
from typing import Any

from sao.errors import ConfigError
from sao.rewards.function import RewardFunction, as_score, load_reward, raised
from sao.runtime.processes import die_with_parent

HEADER = struct.Struct(">Q")


def receive(connection: socket.socket) -> bytes | None:
    """One frame's body, or None when the other end is closed. Raises TimeoutError as the socket's timeout says."""
    header = _exactly(connection, HEADER.size)
    return None if header is None else _exactly(connection, HEADER.unpack(header)[0])


def _exactly(connection: socket.socket, size: int) -> bytes | None:
    parts = bytearray()
    while len(parts) < size:
        part = connection.recv(min(size - len(parts), 1 << 20))
        if not part:
            return None
        parts += part
    return bytes(parts)


def frame(body: bytes) -> bytes:
    return HEADER.pack(len(body)) + body


def answer(function: RewardFunction, request: tuple[str, dict[str, Any], list[dict[str, Any]] | None]) -> dict[str, Any]:
    """`{"score": float}`, or `{"kind", "message"}` of a RewardFailure."""
    completion, row, messages = request
    try:
        value = function(completion, row, messages)
        if hasattr(value, "__await__"):
            import asyncio

            async def settle() -> Any:
                return await value

            value = asyncio.run(settle())
    except BaseException as error:  # noqa: BLE001 - sys.exit and KeyboardInterrupt of the function are its failures too
        failure = raised(function.name, error)
        return {"kind": "raised", "message": str(failure)}
    try:
        return {"score": as_score(value, function.style)}
    except ValueError as error:
        return {"kind": "not_a_number", "message": f"reward.function={function.name} {error}"}


def main(descriptor: int, target: str) -> None:
    die_with_parent()  # a function that loops in C never looks at its socket
    os.set_inheritable(descriptor, False)
    connection = socket.socket(fileno=descriptor)
    try:
        function = load_reward(target)
    except ConfigError as error:
        connection.sendall(frame(json.dumps({"error": str(error)}).encode()))
        return
    connection.sendall(frame(b'{"ready": true}'))
    process = os.getpid()
    while (body := receive(connection)) is not None:
        reply = answer(function, pickle.loads(body))
        if os.getpid() != process:
            os._exit(0)  # a fork that the function left behind; a second answer would pass for the next request's
        connection.sendall(frame(json.dumps(reply).encode()))
