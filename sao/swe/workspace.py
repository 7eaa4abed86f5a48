"""A task's repository inside a sandbox: built, changed by somebody, and taken out again as a diff."""

from __future__ import annotations

import gzip
import io
import tarfile
from collections.abc import Awaitable, Callable
from dataclasses import replace
from functools import lru_cache
from pathlib import Path

from sao.errors import SandboxFailure
from sao.sandbox.protocol import WORKSPACE, Sandbox, SandboxSpec
from sao.swe.package import NO_REPOSITORY, Package
from sao.swe.patches import paths, sections
from sao.swe.repo import SweTask
from sao.swe.toolbox import toolbox

Create = Callable[[SandboxSpec], Awaitable[Sandbox]]

BUILD_TIMEOUT_S = 120.0
PATCHES = ".task"  # in the workspace, while it is built
# A repository whose one commit has no parent, and no way back to what it was before: no remote, tag, reflog, hook or pack.
COMMIT = """
git init --quiet --template= --initial-branch=main .
git config core.hooksPath /dev/null && git config core.logAllRefUpdates false && git config gc.auto 0
git config user.name task && git config user.email task@localhost
git add --all --force .
GIT_COMMITTER_DATE='2000-01-01T00:00:00Z' git commit --quiet --date '2000-01-01T00:00:00Z' --message base
git rev-parse HEAD
"""
BUILD = f"""set -e
tar -xf - --no-same-owner
git apply --whitespace=nowarn {PATCHES}/bug.patch
if [ -s {PATCHES}/test.patch ]; then git apply --whitespace=nowarn -R {PATCHES}/test.patch; fi
rm -r {PATCHES}
{COMMIT}"""
JUNK = {"__pycache__", ".pytest_cache", ".mypy_cache", ".ruff_cache", ".hypothesis"}


def workspace_spec(base: SandboxSpec | None = None) -> SandboxSpec:
    """The sandbox of a task: this interpreter without its packages, pytest, git; limits from `base`."""
    tools = toolbox()
    base = base or SandboxSpec()
    environment = {
        "PATH": f"{tools}/bin:/usr/local/bin:/usr/bin:/bin",
        "LD_LIBRARY_PATH": f"{tools}/lib",
        "PYTHONPATH": f"{WORKSPACE}:{WORKSPACE}/src",
        "PYTHONDONTWRITEBYTECODE": "1",
        "PYTHONHASHSEED": "0",
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
        "PYTEST_ADDOPTS": "-p no:cacheprovider --color=no",
        "NO_COLOR": "1",
        "HOME": "/tmp",
        "GIT_CONFIG_NOSYSTEM": "1",
        "GIT_CONFIG_GLOBAL": "/dev/null",
        "GIT_PAGER": "cat",
        "PAGER": "cat",
    }
    return replace(base, read_only=(*base.read_only, str(tools)), environment={**environment, **base.environment})


def pack(package: Package, target: Path) -> Path:
    """The package's tree as the archive that repositories are built from: the same bytes for the same tree."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        for path in sorted(package.root.rglob("*")):
            relative = path.relative_to(package.root)
            if path.is_symlink() or not path.is_file() or any(part in NO_REPOSITORY or part.endswith(".egg-info") for part in relative.parts):
                continue
            data = path.read_bytes()
            member = tarfile.TarInfo(relative.as_posix())
            member.size, member.mode = len(data), 0o755 if path.stat().st_mode & 0o100 else 0o644
            tar.addfile(member, io.BytesIO(data))
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_bytes(gzip.compress(buffer.getvalue(), mtime=0))
    return target


async def build(sandbox: Sandbox, task: SweTask) -> str:
    """Make the repository that an agent is handed, in an empty sandbox; returns its commit. Raises SandboxFailure when it cannot be made."""
    for name, data in (("bug.patch", task.bug), ("test.patch", task.test_patch)):
        await sandbox.write(f"{PATCHES}/{name}", data)
    return await run_build(sandbox, BUILD, archive(task.source), task.instance_id)


async def run_build(sandbox: Sandbox, script: str, archive: bytes, name: str) -> str:
    """Run a script of ours that ends with the repository's commit; `archive` is on its standard input."""
    result = await sandbox.exec(script, timeout_s=BUILD_TIMEOUT_S, stdin=archive)
    if result.rc:
        raise SandboxFailure(f"the repository of {name} could not be built: {result.text.strip()[-300:] or result.killed_by}")
    return result.text.split()[-1]


@lru_cache(maxsize=64)
def archive(source: Path) -> bytes:
    """The package as published, as a plain tar."""
    return gzip.decompress(source.read_bytes())


@lru_cache(maxsize=4096)
def published(source: Path, path: str) -> bytes:
    """A file of the package as published. Raises KeyError where there is none."""
    with tarfile.open(fileobj=io.BytesIO(archive(source))) as tar:
        file = tar.extractfile(path)
        return file.read() if file else b""


def handed_out(task: SweTask) -> bytes:
    """The file with the bug, as the repository that is handed out has it."""
    lines = published(task.source, str(task.mutation["path"])).splitlines(keepends=True)
    at = int(task.mutation["line"]) - 1
    lines[at] = lines[at].replace(str(task.mutation["right"]).encode(), str(task.mutation["wrong"]).encode())
    return b"".join(lines)


async def changes(sandbox: Sandbox, base: Sandbox) -> bytes:
    """What was done to the repository since `base`, a copy of it from before, as `git diff --binary`; caches of tools are left out.

    Taken from outside: what the sandbox's own .git says is not asked.
    """
    kept = [part for part in sections(await sandbox.diff(base)) if not _is_cache(part)]
    return b"".join(kept)


def _is_cache(section: bytes) -> bool:
    parts = {name for path in paths(section) for name in path.decode("utf-8", "replace").split("/")}
    return bool(parts & JUNK) or any(name.endswith(".pyc") for name in parts)
