"""One request and one answer per connection: a JSON object, then as many bytes as it says. Both ends trust each other; the socket's directory is private."""

from __future__ import annotations

import asyncio
import json
import struct
from typing import Any

LENGTH = struct.Struct("<I")


def pack(head: dict[str, Any], blob: bytes = b"") -> bytes:
    text = json.dumps({**head, "bytes": len(blob)}).encode()
    return LENGTH.pack(len(text)) + text + blob


async def receive(reader: asyncio.StreamReader) -> tuple[dict[str, Any], bytes]:
    """Raises asyncio.IncompleteReadError when the other end is gone."""
    (length,) = LENGTH.unpack(await reader.readexactly(LENGTH.size))
    head: dict[str, Any] = json.loads(await reader.readexactly(length))
    return head, await reader.readexactly(head.pop("bytes"))
