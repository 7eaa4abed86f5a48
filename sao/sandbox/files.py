"""Reading and writing a sandbox's files from outside, where every name may be a trap.

Paths are walked one component at a time from the workspace's own descriptor, never through a link; a file is opened without waiting (a FIFO would hang
its reader) and must be regular and of the workspace's own file system.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import stat
from collections.abc import Iterator

from sao.sandbox.protocol import WORKSPACE, Entry, FileAccess

MOST_ENTRIES = 10_000
DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
CREATE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


def components(path: str) -> list[str]:
    """The names below the workspace. Raises FileAccess for a path that leaves it."""
    if path.startswith("/"):
        if path != WORKSPACE and not path.startswith(WORKSPACE + "/"):
            raise FileAccess(f"{path} is outside {WORKSPACE}")
        path = path[len(WORKSPACE) :]
    names = [name for name in path.split("/") if name not in ("", ".")]
    if ".." in names or "\0" in path:
        raise FileAccess(f"{path!r} is not a path below {WORKSPACE}")
    return names


def read(root: str, path: str, limit: int) -> bytes:
    """At most `limit` bytes of a regular file below `root`."""
    names = components(path)
    if not names:
        raise FileAccess(f"{path} is not a regular file")
    with _errors(path), _directory(root, names[:-1]) as parent:
        descriptor = os.open(names[-1], READ, dir_fd=parent)
        with open(descriptor, "rb") as file:
            found = os.fstat(descriptor)
            if not stat.S_ISREG(found.st_mode) or found.st_dev != os.fstat(parent).st_dev:
                raise FileAccess(f"{path} is not a regular file")
            return file.read(limit)


def write(root: str, path: str, data: bytes, *, owner: int | None, executable: bool = False) -> None:
    """Put a new file in place of whatever has that name. owner: uid and gid of the file and of directories made; None: ours."""
    names = components(path)
    if not names:
        raise FileAccess(f"{path} is not a file")
    with _errors(path), _directory(root, names[:-1], make=True, owner=owner) as parent:
        temporary = f".{secrets.token_hex(8)}"
        descriptor = os.open(temporary, CREATE, 0o755 if executable else 0o644, dir_fd=parent)
        try:
            with open(descriptor, "wb") as file:
                if owner is not None:
                    os.fchown(descriptor, owner, owner)
                file.write(data)
            os.rename(temporary, names[-1], src_dir_fd=parent, dst_dir_fd=parent)
        except OSError:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(temporary, dir_fd=parent)
            raise


def listing(root: str, path: str) -> list[Entry]:
    """The entries of a directory below `root` by name, at most MOST_ENTRIES."""
    found: list[Entry] = []
    with _errors(path), _directory(root, components(path)) as descriptor, os.scandir(descriptor) as entries:
        for entry in entries:
            if len(found) == MOST_ENTRIES:
                break
            about = entry.stat(follow_symlinks=False)
            kinds = {stat.S_IFREG: "file", stat.S_IFDIR: "directory", stat.S_IFLNK: "symlink"}
            found.append(Entry(entry.name, kinds.get(stat.S_IFMT(about.st_mode), "other"), about.st_size))
    return sorted(found, key=lambda entry: entry.name)


@contextlib.contextmanager
def _errors(path: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise FileAccess(f"{path}: {error.strerror}") from error


@contextlib.contextmanager
def _directory(root: str, names: list[str], *, make: bool = False, owner: int | None = None) -> Iterator[int]:
    """A descriptor of the directory `names` below `root`."""
    here = os.open(root, DIRECTORY)
    try:
        for name in names:
            if make:
                with contextlib.suppress(FileExistsError):
                    os.mkdir(name, 0o755, dir_fd=here)
                    if owner is not None:
                        os.chown(name, owner, owner, dir_fd=here, follow_symlinks=False)
            below = os.open(name, DIRECTORY, dir_fd=here)
            os.close(here)
            here = below
        yield here
    finally:
        os.close(here)
