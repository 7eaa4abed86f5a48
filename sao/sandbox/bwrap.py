"""The default level: prlimit -> bwrap -> setpriv -> command.

As root bwrap keeps every capability and RLIMIT_NPROC does not bind uid 0, so the command gets a uid of its own, one per sandbox since that limit counts
per uid. Without privileges a user namespace does instead, and limits count what the user runs elsewhere too.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path, PurePosixPath

from sao.sandbox import seccomp
from sao.sandbox.box import SECCOMP_FD, STATUS_FD, Box
from sao.sandbox.protocol import WORKSPACE, MiB, SandboxSpec

TOOLS = ("bwrap", "setpriv", "prlimit")
FROM_ETC = ("/etc/alternatives", "/etc/ld.so.cache", "/etc/ssl/certs", "/etc/ssl/openssl.cnf", "/etc/mime.types", "/etc/localtime")
FOR_NETWORK = ("/etc/resolv.conf", "/etc/nsswitch.conf", "/etc/services", "/etc/protocols")
# What copies and compares two workspaces reads files of any owner, and nothing else.
HELPER_CAPABILITIES = ("CAP_DAC_OVERRIDE", "CAP_CHOWN", "CAP_FOWNER")


@cache
def tool(name: str) -> str:
    return shutil.which(name, path="/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin") or name


@cache
def python_home() -> str:
    """The installation this Python belongs to when it lies outside /usr, where it would not be seen; "" otherwise."""
    home = os.path.realpath(sys.base_prefix)
    return "" if home == "/usr" or home.startswith("/usr/") else home


def environment_of(box: Box, extra: Mapping[str, str]) -> dict[str, str]:
    """All that a command finds in its environment."""
    paths = ["/usr/local/bin", "/usr/bin", "/bin"]
    return {
        "PATH": ":".join([f"{python_home()}/bin", *paths] if python_home() else paths),
        "HOME": WORKSPACE,
        "LANG": "C.UTF-8",
        "TERM": "dumb",
        "TMPDIR": "/tmp",
        "GIT_CONFIG_NOSYSTEM": "1",
        "OMP_NUM_THREADS": "1",
        "OPENBLAS_NUM_THREADS": "1",
        **box.spec.environment,
        **extra,
    }


def limits(box: Box, *, address_space: bool, own_uid: bool, user_tasks: int) -> list[str]:
    """prlimit's part. address_space: no cgroup bounds the memory. own_uid: nobody else runs under the sandbox's uid; else `user_tasks` already do."""
    spec = box.spec
    flags = ["--core=0", "--nofile=512", f"--fsize={spec.disk_mb * MiB}", f"--cpu={spec.cpu_s}:{spec.cpu_s + 1}", "--msgqueue=0", "--memlock=65536"]
    flags.append(f"--nproc={spec.processes if own_uid else spec.processes + user_tasks}")
    if address_space:
        flags.append(f"--as={spec.memory_mb * MiB}")
    return [tool("prlimit"), *flags]


@cache
def view(read_only: tuple[str, ...], network: bool, etc: str) -> list[str]:
    """bwrap's part that shows a sandbox its system, all of it read-only. etc: the directory shown as /etc, "" for none."""
    flags = ["--unshare-ipc", "--unshare-pid", "--unshare-uts", "--unshare-cgroup-try", "--die-with-parent", "--new-session", "--clearenv"]
    flags += ["--hostname", "sandbox"] + ([] if network else ["--unshare-net"])
    flags += ["--ro-bind", "/usr", "/usr"] + (["--ro-bind", etc, "/etc"] if etc else [])
    for name in ("bin", "sbin", "lib", "lib32", "lib64", "libx32"):
        path = Path("/") / name
        if path.is_symlink():
            flags += ["--symlink", f"usr/{name}", str(path)]
        elif path.is_dir():
            flags += ["--ro-bind", str(path), str(path)]
    flags += ["--proc", "/proc", "--dev", "/dev"]
    folders = [*([python_home()] if python_home() else []), *read_only]
    for parent in _parents([*folders, "/var/tmp"]):
        flags += ["--perms", "0755", "--dir", parent]  # bwrap's own choice keeps everybody else out
    for folder in folders:
        flags += ["--ro-bind", folder, folder]
    return flags


@cache
def etc_of(directory: str, network: bool) -> str:
    """One directory with the little of /etc that programs need, since each mount costs a start 0.1 ms. passwd and group are a sandbox's own."""
    etc = Path(directory) / ("etc-network" if network else "etc")
    etc.mkdir(exist_ok=True)
    for name in [*FROM_ETC, *(FOR_NETWORK if network else ())]:
        source, target = Path(name), etc / Path(name).relative_to("/etc")
        target.parent.mkdir(parents=True, exist_ok=True)
        if source.is_dir():
            shutil.copytree(source, target, symlinks=True, dirs_exist_ok=True)
        elif source.is_file():
            shutil.copyfile(source, target)
    for name in ("passwd", "group"):
        (etc / name).touch()
    (etc / "hosts").write_text("127.0.0.1 localhost sandbox\n::1 localhost\n")
    return str(etc)


def _parents(paths: Sequence[str]) -> list[str]:
    """The directories above these paths, outermost first, but for what is there anyway."""
    found = {str(parent): None for path in paths for parent in reversed(PurePosixPath(path).parents)}
    return [parent for parent in found if parent != "/" and not parent.startswith("/usr")]


@dataclass(frozen=True)
class Bubblewrap:
    """privileged: this process is root and may give each sandbox a uid of its own."""

    privileged: bool
    name: str = "bwrap"
    degraded: Sequence[str] = ()
    kills_tree: bool = True

    def command(self, box: Box, argv: Sequence[str], environment: Mapping[str, str], *, address_space: bool, user_tasks: int) -> list[str]:
        chain = limits(box, address_space=address_space, own_uid=self.privileged, user_tasks=user_tasks)
        chain += [tool("bwrap"), *view(tuple(box.spec.read_only), box.spec.network, etc_of(str(Path(box.root).parent), box.spec.network))]
        chain += ["--bind", box.tmp, "/tmp", "--bind", box.shm, "/dev/shm", "--symlink", "../tmp", "/var/tmp", "--bind", box.work, WORKSPACE]
        chain += ["--ro-bind", box.passwd, "/etc/passwd", "--ro-bind", box.group, "/etc/group"]
        chain += ["--remount-ro", "/dev", "--remount-ro", "/", "--chdir", WORKSPACE]
        for name, value in environment_of(box, environment).items():
            chain += ["--setenv", name, value]
        chain += ["--seccomp", str(SECCOMP_FD), "--json-status-fd", str(STATUS_FD)]
        if self.privileged:
            uid = str(box.uid)
            chain += [
                "--",
                tool("setpriv"),
                "--reuid",
                uid,
                "--regid",
                uid,
                "--clear-groups",
                "--bounding-set=-all",
                "--inh-caps=-all",
                "--no-new-privs",
            ]
        else:
            chain += ["--unshare-user", "--disable-userns", "--cap-drop", "ALL"]
        return [*chain, "--", *argv]

    def helper(self, script: str, base: Box, box: Box, *, writes: bool) -> list[str]:
        chain = [tool("bwrap"), *view((), False, ""), "--perms", "1777", "--size", str(256 * MiB), "--tmpfs", "/tmp", "--cap-drop", "ALL"]
        chain += ["--ro-bind", base.work, "/tmp/a", "--bind" if writes else "--ro-bind", box.work, "/tmp/b", "--chdir", "/tmp"]
        if self.privileged:
            for capability in HELPER_CAPABILITIES:
                chain += ["--cap-add", capability]
        else:
            chain += ["--unshare-user", "--disable-userns"]
        chain += ["--setenv", "PATH", "/usr/bin:/bin", "--seccomp", str(SECCOMP_FD), "--json-status-fd", str(STATUS_FD)]
        return [*chain, "--", "/bin/sh", "-c", script]

    def seccomp(self, spec: SandboxSpec) -> bytes:
        return seccomp.program(seccomp.machine(), network=spec.network)

    def began(self, status: bytes) -> bool:
        """bwrap tells an exit code exactly when all was set up and the command ran."""
        return b'"exit-code"' in status
