"""The few calls of Linux that Python has no name for: namespaces, mounts, prctl, Landlock."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

CLONE_NEWNS, CLONE_NEWUSER = 0x20000, 0x10000000
MS_NOSUID, MS_NODEV, MS_REC, MS_PRIVATE, MNT_DETACH = 2, 4, 0x4000, 1 << 18, 2
PR_SET_CHILD_SUBREAPER = 36
SYS_LANDLOCK_CREATE_RULESET = 444

_libc = ctypes.CDLL(None, use_errno=True)


def _check(result: int, what: str) -> int:
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, f"{what}: {os.strerror(code)}")
    return result


def become_subreaper() -> None:
    """Orphans among our descendants become our children, so that no zombie counts against a process limit."""
    _check(_libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0), "prctl(PR_SET_CHILD_SUBREAPER)")


def own_mounts() -> None:
    """A mount namespace of our own, whose mounts end with its last process. Without privileges, inside a user namespace. Raises OSError.

    The process must have a single thread.
    """
    uid, gid = os.getuid(), os.getgid()
    flags = CLONE_NEWNS if uid == 0 else CLONE_NEWNS | CLONE_NEWUSER
    _check(_libc.unshare(flags), "unshare")
    if flags & CLONE_NEWUSER:
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"{uid} {uid} 1")
        Path("/proc/self/gid_map").write_text(f"{gid} {gid} 1")
    _check(_libc.mount(b"none", b"/", None, MS_REC | MS_PRIVATE, None), "mount")


def mount_tmpfs(path: str, megabytes: int, inodes: int) -> None:
    options = f"size={megabytes}m,nr_inodes={inodes},mode=0711".encode()
    _check(_libc.mount(b"tmpfs", path.encode(), b"tmpfs", MS_NOSUID | MS_NODEV, options), f"mount of a tmpfs at {path}")


def unmount(path: str) -> None:
    _check(_libc.umount2(path.encode(), MNT_DETACH), f"umount of {path}")


def landlock_abi() -> int:
    """The version of Landlock this kernel speaks; 0: none."""
    return max(0, _libc.syscall(SYS_LANDLOCK_CREATE_RULESET, None, 0, 1))
