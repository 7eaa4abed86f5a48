"""Which backend a name stands for, whether it can be had here, and what would mend that. Nothing weaker is ever taken instead."""

from __future__ import annotations

import os
from pathlib import Path

from sao.errors import SandboxFailure
from sao.sandbox import bwrap, cgroups, kernel
from sao.sandbox.local import LocalBackend

WEAKER = "or choose a weaker level, env.sandbox.backend=landlock"


def make(name: str, directory: str) -> LocalBackend:
    """The backend, in this process. Raises SandboxFailure, OSError."""
    groups, _ = cgroups.writable(Path("/proc/self/mountinfo").read_text(), Path("/proc/self/cgroup").read_text())
    if name == "bwrap":
        missing = [tool for tool in bwrap.TOOLS if not os.path.isabs(bwrap.tool(tool))]
        if missing:
            raise SandboxFailure(f"env.sandbox.backend=bwrap needs {', '.join(missing)}, which this machine lacks")
        kernel.own_mounts()
        return LocalBackend(bwrap.Bubblewrap(privileged=os.getuid() == 0), directory, sized=True, cgroups=groups)
    raise SandboxFailure(f"there is no backend {name}")


def mend(name: str, problem: str) -> str:
    if "needs bwrap" in problem:
        return f"apt-get install bubblewrap, {WEAKER}"
    return WEAKER
