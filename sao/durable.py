"""Files that are whole or absent after a crash, a power cut included."""

from __future__ import annotations

import os
from pathlib import Path


def put_in_place(temporary: Path, path: Path) -> None:
    """Rename a file to the name it is read by, once its content is on the disk: a rename can survive a power cut that the content does not."""
    sync(temporary)
    os.replace(temporary, path)
    sync(path.parent)


def sync(path: Path) -> None:
    """Wait until a file's content, or a folder's list of names, is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
