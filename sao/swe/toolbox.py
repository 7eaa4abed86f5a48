"""What a task's commands run with: this interpreter's standard library and pytest, and nothing else.

The interpreter's own site-packages may hold the very package that a task broke, and its source is the answer. So what a sandbox sees is a copy without them.
"""

from __future__ import annotations

import compileall
import importlib.metadata
import os
import py_compile
import re
import shutil
import sys
import sysconfig
import tempfile
from collections.abc import Iterable
from pathlib import Path

from sao.errors import UserError

FORMAT = 2  # raise when this file copies something else
SKIPPED = shutil.ignore_patterns(
    "site-packages", "dist-packages", "test", "tests", "idlelib", "tkinter", "turtledemo", "ensurepip", "lib2to3", "config-*", "__pycache__"
)
CACHE = "~/.cache/sao/swe"


def toolbox(cache: str = "") -> Path:
    """The directory of the copy, made at the first call; `bin/python` is its interpreter. Raises UserError where pytest is not installed."""
    try:
        version = importlib.metadata.version("pytest")
    except importlib.metadata.PackageNotFoundError:
        raise UserError("SWE tasks are graded with pytest, which is not installed; install sao-rl[swe]") from None
    target = Path(cache or CACHE).expanduser() / f"python-{sys.version.split()[0]}-pytest-{version}-{FORMAT}"
    if target.is_dir():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=".making-", dir=target.parent))
    try:
        _copy_interpreter(scratch)
        library = scratch / "lib" / _lib() / "site-packages"
        library.mkdir()
        for name in _closure("pytest"):
            _copy_distribution(name, library)
        # Without byte code every run of the tests would compile pytest; by hash, and unchecked, since nobody can change these files.
        compileall.compile_dir(str(scratch / "lib"), quiet=2, invalidation_mode=py_compile.PycInvalidationMode.UNCHECKED_HASH)
        scratch.chmod(0o755)
        try:
            os.replace(scratch, target)
        except OSError:
            if not target.is_dir():  # another process was first
                raise
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return target


def _lib() -> str:
    return f"python{sys.version_info.major}.{sys.version_info.minor}"


def _copy_interpreter(target: Path) -> None:
    (target / "bin").mkdir()
    binary = Path(os.path.realpath(sys.executable))
    shutil.copy2(binary, target / "bin" / _lib())
    for name in ("python", "python3"):
        (target / "bin" / name).symlink_to(_lib())
    shutil.copytree(sysconfig.get_path("stdlib"), target / "lib" / _lib(), ignore=SKIPPED, symlinks=False)
    shared = binary.parent.parent / "lib"
    for library in shared.glob(f"lib{_lib()}*.so*"):
        shutil.copy2(library, target / "lib" / library.name)


def _closure(name: str) -> list[str]:
    """A distribution and what it requires here, extras left out."""
    found: list[str] = []
    waiting = [name]
    while waiting:
        current = waiting.pop()
        if current in found:
            continue
        try:
            requirements = importlib.metadata.requires(current) or []
        except importlib.metadata.PackageNotFoundError:
            continue  # required on other systems only
        found.append(current)
        names = (re.match(r"[\w.-]+", requirement) for requirement in requirements if "extra ==" not in requirement)
        waiting += [match[0] for match in names if match]
    return found


def _copy_distribution(name: str, library: Path) -> None:
    for file in importlib.metadata.files(name) or []:
        source = Path(str(file.locate()))
        if ".." in file.parts or not source.is_file():
            continue  # scripts
        copy = library / file
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(source, copy)


def within_reach(names: Iterable[str]) -> list[str]:
    """Packages that lie in the installation of this interpreter, which the sandbox shows beside the copy: whoever looks there finds the answer."""
    library = sysconfig.get_path("purelib", vars={"base": sys.base_prefix, "platbase": sys.base_prefix})
    there = {_plain(found.metadata["Name"]) for found in importlib.metadata.distributions(path=[library]) if found.metadata["Name"]}
    return sorted(name for name in names if _plain(name) in there)


def _plain(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()
