"""Run as a script between sandboxd and a command of the levels without bwrap: limits, another uid, Landlock, the filter, then the command.

It imports nothing but the standard library and starts with `-I -S`, since it runs once a command. What it cannot do it says on stderr and ends before
the command begins; that the command begins it says on STATUS_FD.
"""

import ctypes
import json
import os
import resource
import struct
import sys

STATUS_FD, SECCOMP_FD = 4, 3
PR_SET_NO_NEW_PRIVS, PR_SET_SECCOMP, SECCOMP_MODE_FILTER = 38, 22, 2
CREATE_RULESET, ADD_RULE, RESTRICT_SELF = 444, 445, 446
RULE_PATH_BENEATH = 1

# linux/landlock.h: bits of access rights, and with which version they came
EXECUTE, WRITE_FILE, READ_FILE, READ_DIR = 1, 2, 4, 8
FS_OF_ABI = {1: (1 << 13) - 1, 2: (1 << 14) - 1, 3: (1 << 15) - 1, 5: (1 << 16) - 1}  # + REFER, + TRUNCATE, + IOCTL_DEV
OF_FILES = EXECUTE | WRITE_FILE | READ_FILE | 1 << 14 | 1 << 15
TCP = 3  # bind and connect, version 4
SCOPES = 3  # abstract sockets and signals, version 6

libc = ctypes.CDLL(None, use_errno=True)


def checked(result: int, what: str) -> int:
    if result < 0:
        raise OSError(ctypes.get_errno(), f"{what}: {os.strerror(ctypes.get_errno())}")
    return result


def set_limits(limits: dict[str, list[int]]) -> None:
    for name, (soft, hard) in limits.items():
        resource.setrlimit(getattr(resource, f"RLIMIT_{name}"), (soft, hard))


def take_uid(uid: int) -> None:
    os.setgroups([])
    os.setresgid(uid, uid, uid)
    os.setresuid(uid, uid, uid)


def restrict(abi: int, readable: list[str], writable: list[str], devices: list[str], tcp: bool) -> None:
    """Landlock: nothing of the file system but this; no TCP unless `tcp`; no signals to processes outside."""
    handled = max(FS_OF_ABI[version] for version in FS_OF_ABI if version <= abi)
    attributes = struct.pack("<QQQ", handled, TCP if abi >= 4 and not tcp else 0, SCOPES if abi >= 6 else 0)
    size = 24 if abi >= 6 else 16 if abi >= 4 else 8
    ruleset = checked(libc.syscall(CREATE_RULESET, attributes, size, 0), "landlock_create_ruleset")
    for paths, access in (
        (readable, EXECUTE | READ_FILE | READ_DIR),
        (writable, handled),
        (devices, READ_FILE | WRITE_FILE | 1 << 15),
    ):
        for path in paths:
            try:
                beneath = os.open(path, os.O_PATH | os.O_CLOEXEC)
            except (FileNotFoundError, PermissionError):  # not there, or not for this uid
                continue
            allowed = access & handled & (-1 if os.path.isdir(path) else OF_FILES)
            checked(libc.syscall(ADD_RULE, ruleset, RULE_PATH_BENEATH, struct.pack("<Qi", allowed, beneath), 0), f"landlock_add_rule {path}")
            os.close(beneath)
    checked(libc.syscall(RESTRICT_SELF, ruleset, 0), "landlock_restrict_self")
    os.close(ruleset)


class Program(ctypes.Structure):
    """struct sock_fprog"""

    _fields_ = [("length", ctypes.c_ushort), ("code", ctypes.c_char_p)]


def load_filter() -> None:
    code = os.read(SECCOMP_FD, 1 << 16)
    program = Program(len(code) // 8, code)
    checked(libc.prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, ctypes.byref(program), 0, 0), "prctl(PR_SET_SECCOMP)")


def main() -> None:
    given = json.loads(sys.argv[1])
    argv = sys.argv[2:]
    os.chdir(given["directory"])
    if given["uid"] is not None:
        take_uid(given["uid"])
    set_limits(given["limits"])
    checked(libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "prctl(PR_SET_NO_NEW_PRIVS)")
    if given["landlock"]:
        restrict(**given["landlock"])
        load_filter()
        os.close(SECCOMP_FD)
    os.write(STATUS_FD, b"begun")
    os.set_inheritable(STATUS_FD, False)
    try:
        os.execvpe(argv[0], argv, given["environment"])
    except OSError as error:
        print(f"{argv[0]}: {error.strerror}", file=sys.stderr, flush=True)
        os._exit(127 if isinstance(error, FileNotFoundError) else 126)


if __name__ == "__main__":
    try:
        main()
    except (OSError, ValueError) as error:
        print(f"confine: {error}", file=sys.stderr, flush=True)
        os._exit(1)
