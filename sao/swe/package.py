"""A Python package to make tasks of: its source tree, where its modules and tests are, and under which licence it may be used."""

from __future__ import annotations

import email.parser
import io
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from dataclasses import dataclass
from email.message import Message
from pathlib import Path

from sao.errors import UserError

FETCH_TIMEOUT_S = 300
MOST_BYTES = 50 << 20  # unpacked
PERMISSIVE = re.compile(r"\b(MIT|BSD|ISC|Apache|PSF|Python Software Foundation|Unlicense)\b", re.IGNORECASE)
NO_SOURCE = {"docs", "doc", "examples", "example", "benchmarks", "bench", "scripts", "tools", "build", "dist"}
NO_REPOSITORY = {".git", ".hg", ".svn", ".github", "__pycache__", ".tox", ".venv"}


@dataclass(frozen=True)
class Package:
    """An unpacked source tree. import_path: the directory that goes on sys.path, `.` or `src`. modules, tests: files relative to `root`, sorted."""

    name: str
    version: str
    licence: str
    root: Path
    import_path: str
    modules: tuple[str, ...]
    tests: tuple[str, ...]


def fetch(requirement: str, into: Path) -> Path:
    """The source distribution of a package (`name` or `name==version`) from the index that pip is configured for. Raises UserError."""
    into.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=into) as scratch:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps", "--no-binary", ":all:"]
        try:
            done = subprocess.run([*command, "--dest", scratch, requirement], capture_output=True, text=True, timeout=FETCH_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            raise UserError(
                f"pip did not fetch the source of {requirement} within {FETCH_TIMEOUT_S} s; give its source distribution by path"
            ) from None
        files = list(Path(scratch).iterdir())
        if done.returncode or len(files) != 1:
            last = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
            raise UserError(f"pip could not fetch the source of {requirement} ({last}); check the name, or give its source distribution by path")
        target = into / files[0].name
        files[0].replace(target)
    return target


def unpack(archive: Path, into: Path) -> Path:
    """The top directory of a source distribution (.tar.gz, .zip) or a copy of a directory, below `into`. Raises UserError for anything else, or a trap."""
    into.mkdir(parents=True, exist_ok=True)
    if archive.is_dir():
        return Path(shutil.copytree(archive, into / archive.name, ignore=shutil.ignore_patterns(*NO_REPOSITORY), symlinks=True))
    try:
        if archive.suffix == ".zip":
            with zipfile.ZipFile(archive) as zipped:
                _bounded(archive, sum(info.file_size for info in zipped.infolist()))
                zipped.extractall(into)
        else:
            with tarfile.open(archive) as tar:
                _bounded(archive, sum(member.size for member in tar))
                tar.extractall(into, filter="data")
    except (OSError, tarfile.TarError, zipfile.BadZipFile) as error:
        raise UserError(f"{archive} cannot be unpacked ({error}); give a source distribution (.tar.gz or .zip) or a directory") from None
    tops = [path for path in into.iterdir() if path.is_dir()]
    if len(tops) != 1:
        raise UserError(f"{archive} holds {len(tops)} top directories; a source distribution has one")
    return tops[0]


def _bounded(archive: Path, size: int) -> None:
    if size > MOST_BYTES:
        raise UserError(f"{archive} unpacks to {size >> 20} MiB, more than {MOST_BYTES >> 20}; choose a smaller package")


def read_package(root: Path, name: str = "") -> Package:
    """What a source tree holds. name: used where it has no PKG-INFO. Raises UserError when it has no module or no test."""
    about = root / "PKG-INFO"
    # The header alone: a description may hold anything.
    text = about.read_text(errors="replace") if about.is_file() else ""
    facts = email.parser.HeaderParser().parse(io.StringIO(text))
    name = str(facts.get("Name") or name or root.name).lower()
    import_path = "src" if (root / "src").is_dir() else "."
    python = sorted(path for path in root.rglob("*.py") if path.is_file() and not path.is_symlink())
    relative = [path.relative_to(root) for path in python]
    tests = [path for path in relative if is_test(path.as_posix())]
    base = Path(import_path)
    modules = [
        path
        for path in relative
        if path.is_relative_to(base)
        and not is_support(path.as_posix())
        and not NO_SOURCE & set(path.parts[:-1])
        and path.name not in ("setup.py", "conftest.py", "noxfile.py")
    ]
    if not modules or not tests:
        raise UserError(f"{root} has {len(modules)} modules and {len(tests)} test files; a package without either makes no task")
    licence = _licence(root, facts)
    return Package(
        name, str(facts.get("Version") or "0"), licence, root, import_path, tuple(p.as_posix() for p in modules), tuple(p.as_posix() for p in tests)
    )


def is_test(path: str) -> bool:
    """Whether pytest collects this file by its name."""
    name = path.rsplit("/", 1)[-1]
    return name.endswith(".py") and (name.startswith("test_") or name.endswith("_test.py"))


def is_support(path: str) -> bool:
    """Whether a file belongs to the tests: a test, or anything in a directory of tests."""
    return is_test(path) or bool({"test", "tests", "testing"} & set(path.split("/")[:-1]))


def _licence(root: Path, facts: Message) -> str:
    """The licence in one word, or an empty string when it is not a known permissive one."""
    said = [str(facts.get("License-Expression") or ""), str(facts.get("License") or "")[:200]]
    said += [value for key, value in facts.items() if key == "Classifier" and value.startswith("License ::")]
    said += [path.read_text(errors="replace")[:1000] for path in sorted(root.glob("LICEN[CS]E*")) if path.is_file()]
    for text in said:
        if match := PERMISSIVE.search(text):
            return match[1]
        if "Permission is hereby granted, free of charge" in text:
            return "MIT"
        if "Redistribution and use in source and binary forms" in text:
            return "BSD"
    return ""
