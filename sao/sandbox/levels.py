"""Which backend a name stands for, whether it can be had here, and what would mend that. Nothing weaker is ever taken instead."""

from __future__ import annotations

import os
import re
from pathlib import Path

from sao.errors import SandboxFailure
from sao.sandbox import bwrap, cgroups, kernel
from sao.sandbox.box import first_uid
from sao.sandbox.confined import Confined
from sao.sandbox.containers import Containers
from sao.sandbox.local import LocalBackend

ENGINES = ("docker", "podman")
BACKENDS = ("bwrap", "landlock", *ENGINES, "subprocess")
WEAKER = "choose a weaker level, env.sandbox.backend=landlock"
MENDS = (
    (r"needs .*bwrap", "apt-get install bubblewrap"),
    (r"needs .*(setpriv|prlimit)", "apt-get install util-linux"),
    (r"namespace|unshare|uid map|Operation not permitted", "run as root, or allow user namespaces (sysctl kernel.unprivileged_userns_clone=1, "
     "kernel.apparmor_restrict_unprivileged_userns=0, user.max_user_namespaces=10000)"),
    (r"Landlock", "boot with lsm=landlock,... (Linux 5.13 or newer)"),
    (r"needs (docker|podman)", "install it"),
    (r"no engine answers", "start the engine, or give this user the right to use it"),
)  # fmt: skip


def make(name: str, directory: str) -> LocalBackend | Containers:
    """The backend, in this process. Raises SandboxFailure, OSError."""
    groups, _ = cgroups.writable(Path("/proc/self/mountinfo").read_text(), Path("/proc/self/cgroup").read_text())
    if name == "bwrap":
        missing = [tool for tool in bwrap.TOOLS if not os.path.isabs(bwrap.tool(tool))]
        if missing:
            raise SandboxFailure(f"env.sandbox.backend=bwrap needs {', '.join(missing)}, which this machine lacks")
        kernel.own_mounts()
        uid = first_uid(Path("/proc/self/uid_map").read_text(), os.getpid()) if os.getuid() == 0 else None
        return LocalBackend(bwrap.Bubblewrap(privileged=uid is not None), directory, first_uid=uid, sized=True, cgroups=groups)
    if name in ("landlock", "subprocess"):
        landlock = kernel.landlock_abi() if name == "landlock" else 0
        if name == "landlock" and not landlock:
            raise SandboxFailure("env.sandbox.backend=landlock: this kernel has no Landlock")
        uid = first_uid(Path("/proc/self/uid_map").read_text(), os.getpid()) if os.getuid() == 0 else None
        try:
            kernel.own_mounts()
            sized = True
        except OSError:
            sized = False
        return LocalBackend(Confined(landlock, own_uid=uid is not None), directory, first_uid=uid, sized=sized, cgroups=groups)
    if name in ENGINES:
        return Containers(name)
    raise SandboxFailure(f"env.sandbox.backend={name} is not one of {', '.join(BACKENDS)}")


def mend(name: str, problem: str) -> str:
    """What to do about it."""
    known = next((text for pattern, text in MENDS if re.search(pattern, problem)), "")
    return ", or ".join(filter(None, [known, WEAKER if name == "bwrap" else ""])) or "choose another env.sandbox.backend"
