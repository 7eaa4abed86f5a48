"""The two levels below bwrap, for machines without it: Landlock with the system-call filter, and nothing but limits."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sao.sandbox import bwrap, seccomp
from sao.sandbox.box import Box
from sao.sandbox.protocol import MiB, SandboxSpec

CONFINE = str(Path(__file__).with_name("confine.py"))
SYSTEM = ("/etc/passwd", "/etc/group", "/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32")
DEVICES = ("/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom")
NO_NAMESPACES = "no namespaces: files lie under their host path instead of /workspace, and what a command leaves running is searched for and killed"
SAME_UID = "commands run under this user's uid, so the process limit counts all of this user's processes"


HELPER = """set -e
folder=$(mktemp -d "$PWD/helper-XXXXXX"); trap 'rm -rf "$folder"' EXIT; cd "$folder"
"""


@dataclass(frozen=True)
class Confined:
    """landlock: the version of it the kernel speaks; 0: the level `subprocess`, which confines nothing. own_uid: commands get a uid of their own."""

    landlock: int
    own_uid: bool
    kills_tree: bool = False

    @property
    def name(self) -> str:
        return "landlock" if self.landlock else "subprocess"

    @property
    def degraded(self) -> Sequence[str]:
        found = [NO_NAMESPACES] + ([] if self.own_uid else [SAME_UID])
        if not self.landlock:
            return ["nothing is confined: commands read, write and reach whatever their user may, the network included", *found]
        if self.landlock < 6 and not self.own_uid:
            found.append("commands can signal this user's other processes, the trainer among them")
        return found

    def command(self, box: Box, argv: Sequence[str], environment: Mapping[str, str], *, address_space: bool, user_tasks: int) -> list[str]:
        spec = box.spec
        disk, processes = spec.disk_mb * MiB, spec.processes + user_tasks
        limits = {
            "CORE": [0, 0], "NOFILE": [512, 512], "FSIZE": [disk, disk], "CPU": [spec.cpu_s, spec.cpu_s + 1], "MSGQUEUE": [0, 0],
            "MEMLOCK": [65536, 65536], "NPROC": [processes, processes],
        }  # fmt: skip
        if address_space:
            limits["AS"] = [spec.memory_mb * MiB] * 2
        given: dict[str, Any] = {
            "directory": box.work,
            "uid": box.uid,
            "limits": limits,
            "landlock": self._rules(box) if self.landlock else None,
            "environment": bwrap.environment_of(box, {}) | {"HOME": box.work, "TMPDIR": box.tmp, "SAO_SANDBOX": box.box_id, **environment},
        }
        return [sys.executable, "-I", "-S", CONFINE, json.dumps(given), *argv]

    def _rules(self, box: Box) -> dict[str, Any]:
        files = [*bwrap.FROM_ETC, *(bwrap.FOR_NETWORK if box.spec.network else ())]
        homes = [bwrap.python_home()] if bwrap.python_home() else []
        return {
            "abi": self.landlock,
            "readable": [*SYSTEM, *files, *homes, *box.spec.read_only],
            "writable": [box.work, box.tmp, box.shm],
            "devices": list(DEVICES),
            "tcp": box.spec.network,
        }

    def helper(self, script: str, base: Box, box: Box, *, writes: bool) -> list[str]:
        """To read, the script has copies: git compares links as links."""
        a, b = shlex.quote(base.work), shlex.quote(box.work)
        provide = f"ln -s {a} a; ln -s {b} b\n" if writes else f"cp -a {a} a; cp -a {b} b\n"
        given = {"directory": str(Path(box.root).parent), "uid": None, "limits": {}, "landlock": None, "environment": {"PATH": "/usr/bin:/bin"}}
        return [sys.executable, "-I", "-S", CONFINE, json.dumps(given), "/bin/sh", "-c", HELPER + provide + script]

    def seccomp(self, spec: SandboxSpec) -> bytes | None:
        """Without a mount namespace a Unix socket of the host is a path like any other, so there are none."""
        return seccomp.program(seccomp.machine(), network=spec.network, unix=False) if self.landlock else None

    def began(self, status: bytes) -> bool:
        return status == b"begun"
