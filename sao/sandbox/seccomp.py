"""The system calls a sandboxed program is refused, as the BPF program the kernel runs (seccomp(2); struct sock_filter of linux/filter.h).

A deny list: what reaches around a namespace, what reads another process, what loads code into the kernel, and what holds memory that no limit counts.
Everything else is allowed, so that ordinary programs run. Numbers are those of arch/x86/entry/syscalls/syscall_64.tbl and asm-generic/unistd.h.
"""

from __future__ import annotations

import errno
import platform
import struct
from dataclasses import dataclass
from functools import cache

from sao.errors import SystemFailure

# name: number on x86_64, on aarch64; None where it has none
DENIED: dict[str, tuple[int | None, int | None]] = {
    # namespaces and mounts
    "unshare": (272, 97), "setns": (308, 268), "mount": (165, 40), "umount2": (166, 39), "pivot_root": (155, 41), "chroot": (161, 51),
    "mount_setattr": (442, 442), "move_mount": (429, 429), "open_tree": (428, 428), "fsopen": (430, 430), "fsconfig": (431, 431),
    "fsmount": (432, 432), "fspick": (433, 433), "name_to_handle_at": (303, 264), "open_by_handle_at": (304, 265),
    # other processes
    "ptrace": (101, 117), "process_vm_readv": (310, 270), "process_vm_writev": (311, 271), "process_madvise": (440, 440), "pidfd_getfd": (438, 438),
    "kcmp": (312, 272), "perf_event_open": (298, 241), "migrate_pages": (256, 238), "move_pages": (279, 239),
    # the kernel itself
    "bpf": (321, 280), "userfaultfd": (323, 282), "init_module": (175, 105), "finit_module": (313, 273), "delete_module": (176, 106),
    "kexec_load": (246, 104), "kexec_file_load": (320, 294), "reboot": (169, 142), "swapon": (167, 224), "swapoff": (168, 225), "syslog": (103, 116),
    "acct": (163, 89), "quotactl": (179, 60), "quotactl_fd": (443, 443), "settimeofday": (164, 170), "clock_settime": (227, 112),
    "clock_adjtime": (305, 266), "adjtimex": (159, 171), "iopl": (172, None), "ioperm": (173, None), "modify_ldt": (154, None), "uselib": (134, None),
    "lookup_dcookie": (212, 18), "nfsservctl": (180, 42), "vhangup": (153, 58), "fanotify_init": (300, 262), "vmsplice": (278, 75),
    # keys of the user that runs the trainer
    "keyctl": (250, 219), "add_key": (248, 217), "request_key": (249, 218),
    # memory that belongs to no process, so that neither an address space nor a resident set bounds it
    "shmget": (29, 194), "msgget": (68, 186), "semget": (64, 190),
}  # fmt: skip
# Refused as if the kernel did not have them, so that callers fall back to what is filtered or bounded.
ABSENT: dict[str, tuple[int | None, int | None]] = {
    "clone3": (435, 435),  # its flags lie in memory, where a filter cannot look
    "io_uring_setup": (425, 425), "io_uring_enter": (426, 426), "io_uring_register": (427, 427),
    "memfd_create": (319, 279), "memfd_secret": (447, 447),
}  # fmt: skip
CLONE = (56, 220)
SOCKET = (41, 198)
IOCTL = (16, 29)

NEW_NAMESPACE = 0x7E020080  # CLONE_NEWNS | NEWCGROUP | NEWUTS | NEWIPC | NEWUSER | NEWPID | NEWNET | NEWTIME
AF_UNIX, AF_INET, AF_INET6, AF_NETLINK = 1, 2, 10, 16
TIOCSTI, TIOCLINUX = 0x5412, 0x541C

AUDIT_ARCH = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
X32_BIT = 0x40000000
KILL_PROCESS, ALLOW, ERRNO = 0x80000000, 0x7FFF0000, 0x00050000
NR, ARCH, ARG0, ARG1 = 0, 4, 16, 24  # offsets in struct seccomp_data, little-endian: the low half of an argument comes first

LD_ABS, JEQ, JGE, JSET, RET = 0x20, 0x15, 0x35, 0x45, 0x06


@dataclass(frozen=True)
class Label:
    """A jump target, resolved when the program is laid out."""

    name: str


Instruction = tuple[int, Label | None, Label | None, int]


def machine() -> str:
    name = platform.machine()
    if name not in AUDIT_ARCH:
        raise SystemFailure(f"no system-call filter for {name}: only {' and '.join(AUDIT_ARCH)} are known")
    return name


@cache
def program(arch: str, *, network: bool, unix: bool = True) -> bytes:
    """The filter for bwrap's --seccomp or PR_SET_SECCOMP: 8 bytes an instruction.

    Kills a process of another architecture or of the x32 ABI. network: false refuses every socket but AF_UNIX (and netlink, without which a resolver
    cannot even say that there is no network); true adds IPv4 and IPv6, never AF_VSOCK, which no network namespace holds back. unix: false refuses AF_UNIX too.
    """
    column = list(AUDIT_ARCH).index(arch)
    code: list[Instruction | Label] = []

    def refuse_if(number: int | None, label: str) -> None:
        if number is not None:
            code.append((JEQ, Label(label), None, number))

    code += [(LD_ABS, None, None, ARCH), (JEQ, None, Label("kill"), AUDIT_ARCH[arch]), (LD_ABS, None, None, NR)]
    if arch == "x86_64":
        code.append((JGE, Label("kill"), None, X32_BIT))
    code += [
        (JEQ, Label("clone"), None, CLONE[column]),
        (JEQ, Label("socket"), None, SOCKET[column]),
        (JEQ, Label("ioctl"), None, IOCTL[column]),
    ]
    for numbers in DENIED.values():
        refuse_if(numbers[column], "deny")
    for numbers in ABSENT.values():
        refuse_if(numbers[column], "absent")
    code.append((RET, None, None, ALLOW))
    code += [Label("clone"), (LD_ABS, None, None, ARG0), (JSET, Label("deny"), Label("allow"), NEW_NAMESPACE)]
    code += [Label("socket"), (LD_ABS, None, None, ARG0)]
    families = [AF_NETLINK, *([AF_UNIX] if unix else []), *([AF_INET, AF_INET6] if network else [])]
    code += [(JEQ, Label("allow"), None, family) for family in families]
    code.append((RET, None, None, ERRNO | errno.EAFNOSUPPORT))
    code += [Label("ioctl"), (LD_ABS, None, None, ARG1), (JEQ, Label("deny"), None, TIOCSTI), (JEQ, Label("deny"), Label("allow"), TIOCLINUX)]
    code += [Label("deny"), (RET, None, None, ERRNO | errno.EPERM)]
    code += [Label("absent"), (RET, None, None, ERRNO | errno.ENOSYS)]
    code += [Label("allow"), (RET, None, None, ALLOW)]
    code += [Label("kill"), (RET, None, None, KILL_PROCESS)]
    return _assemble(code)


def _assemble(code: list[Instruction | Label]) -> bytes:
    """Resolve labels into the relative jumps of classic BPF, which only go forward and at most 255 instructions."""
    places: dict[str, int] = {}
    instructions: list[Instruction] = []
    for item in code:
        if isinstance(item, Label):
            places[item.name] = len(instructions)
        else:
            instructions.append(item)

    def distance(label: Label | None, here: int) -> int:
        jump = 0 if label is None else places[label.name] - here - 1
        assert 0 <= jump <= 255, f"{label}: a jump of {jump}"
        return jump

    return b"".join(
        struct.pack("<HBBI", operation, distance(yes, i), distance(no, i), value) for i, (operation, yes, no, value) in enumerate(instructions)
    )
