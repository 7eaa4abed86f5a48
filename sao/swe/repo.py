"""A task repository on disk, in the form of swebench 5 (`swebench.task.repo`), with what is needed to build it without Docker and without a network.

sweb.yaml                          the data set's name and its splits: train, and test (packages held out)
tasks/<instance_id>/task.yaml      metadata; `source`, `licence`, `hidden`, `kept` and `mutation` are ours
                    tests.json     FAIL_TO_PASS, PASS_TO_PASS
                    problem_statement.md, gold.patch, test.patch, eval.sh, Dockerfile
                    bug.patch      from the package as published to the repository that is handed out, its hidden tests still there
sources/<name>-<version>.tar.gz    the package as published
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from sao.errors import DataError, UserError

CONFIG, TASKS, SOURCES = "sweb.yaml", "tasks", "sources"
TRAIN, HELD_OUT = "train", "test"
LOG_PARSER, EVAL_TYPE = "parse_log_pytest_v2", "pass_and_fail"
START, END, EXIT_CODE = ">>>>> Start Test Output", ">>>>> End Test Output", ">>>>> Test Exit Code"  # the official harness's markers
LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
REQUIRED = ("task.yaml", "tests.json", "problem_statement.md", "gold.patch", "test.patch", "bug.patch")


@dataclass(frozen=True)
class SweTask:
    """One task, everything in it as bytes or text.

    repository: `<author>/<package>` in the official sense, here pypi/<package>. base_commit: of the one root commit the agent sees. source: the archive.
    import_path: goes on sys.path. tests: the files that grading runs. hidden: of them, those the agent does not see. kept: files of the tests, and
    settings of pytest, that grading restores. mutation: kind, path, line, before, after, function.
    """

    instance_id: str
    package: str
    version: str
    base_commit: str
    split: str
    source: Path
    licence: str
    import_path: str
    statement: str
    gold: bytes
    bug: bytes
    test_patch: bytes
    tests: tuple[str, ...]
    hidden: tuple[str, ...]
    kept: tuple[str, ...]
    fail_to_pass: tuple[str, ...]
    pass_to_pass: tuple[str, ...]
    mutation: dict[str, Any] = field(default_factory=dict)
    timeout_s: float = 60.0

    @property
    def repository(self) -> str:
        return f"pypi/{self.package}"


def write_task(repo: Path, task: SweTask, dataset: str) -> Path:
    """Write a task's directory: under a name of its own first, so that what is there is whole."""
    target = repo / TASKS / task.instance_id
    scratch = target.with_name(f".{target.name}")
    scratch.mkdir(parents=True, exist_ok=True)
    meta = {
        "instance_id": task.instance_id,
        "repo": task.repository,
        "version": task.version,
        "base_commit": task.base_commit,
        "split": task.split,
        "datasets": [dataset],
        "image": f"swebench/sweb.eval.x86_64.{task.instance_id}:latest".lower().replace("__", "_1776_"),
        "log_parser": LOG_PARSER,
        "eval_type": EVAL_TYPE,
        "source": task.source.name,
        "licence": task.licence,
        "import_path": task.import_path,
        "tests": list(task.tests),
        "hidden": list(task.hidden),
        "kept": list(task.kept),
        "mutation": task.mutation,
        "timeout_s": task.timeout_s,
    }
    (scratch / "task.yaml").write_text(yaml.safe_dump(meta, sort_keys=True, allow_unicode=True))
    tests = {"FAIL_TO_PASS": list(task.fail_to_pass), "PASS_TO_PASS": list(task.pass_to_pass)}
    (scratch / "tests.json").write_text(json.dumps(tests, indent=2, ensure_ascii=False) + "\n")
    (scratch / "problem_statement.md").write_text(task.statement)
    for name, data in (("gold.patch", task.gold), ("test.patch", task.test_patch), ("bug.patch", task.bug)):
        (scratch / name).write_bytes(data)
    (scratch / "eval.sh").write_text(eval_script(task))
    (scratch / "Dockerfile").write_text(dockerfile(task))
    scratch.rename(target)
    return target


def write_config(repo: Path, dataset: str) -> None:
    repo.mkdir(parents=True, exist_ok=True)
    (repo / CONFIG).write_text(yaml.safe_dump({"datasets": [dataset], "splits": [HELD_OUT, TRAIN]}))


def read_repo(repo: Path) -> dict[str, SweTask]:
    """Every task of a repository by its id. Raises UserError when it is none, DataError naming the task that cannot be used."""
    if not (repo / CONFIG).is_file():
        raise UserError(f"repo={repo} is no task repository: it has no {CONFIG}; make one with `sao env make swe`")
    folders = sorted(path.parent for path in (repo / TASKS).glob("*/task.yaml") if not path.parent.name.startswith("."))
    if not folders:
        raise UserError(f"repo={repo} has no task; make some with `sao env make swe`")
    return {folder.name: read_task(folder) for folder in folders}


def read_task(folder: Path) -> SweTask:
    """One task. Raises DataError when a file is missing or says nothing that can be used."""
    missing = [name for name in REQUIRED if not (folder / name).is_file()]
    if missing:
        hint = "; a task that needs an image goes to the official harness" if missing == ["bug.patch"] else ""
        raise DataError(f"{folder} has no {', '.join(missing)} and cannot be built in the sandbox{hint}")
    try:
        meta = yaml.load((folder / "task.yaml").read_text(), Loader=LOADER)
        tests = json.loads((folder / "tests.json").read_text())
        task = SweTask(
            instance_id=folder.name,
            package=str(meta["repo"]).rsplit("/", 1)[-1],
            version=str(meta["version"]),
            base_commit=str(meta["base_commit"]),
            split=str(meta["split"]),
            source=folder.parent.parent / SOURCES / _name(meta["source"]),
            licence=str(meta["licence"]),
            import_path=str(meta["import_path"]),
            statement=(folder / "problem_statement.md").read_text(),
            gold=(folder / "gold.patch").read_bytes(),
            bug=(folder / "bug.patch").read_bytes(),
            test_patch=(folder / "test.patch").read_bytes(),
            tests=_names(meta["tests"]),
            hidden=_names(meta["hidden"]),
            kept=_names(meta["kept"]),
            fail_to_pass=tuple(map(str, tests["FAIL_TO_PASS"])),
            pass_to_pass=tuple(map(str, tests["PASS_TO_PASS"])),
            mutation=dict(meta.get("mutation") or {}),
            timeout_s=float(meta["timeout_s"]),
        )
    except (yaml.YAMLError, KeyError, ValueError, TypeError, AttributeError) as error:
        raise DataError(f"{folder} cannot be used ({type(error).__name__}: {' '.join(str(error).split())[:200]}); make the task again") from None
    if meta.get("instance_id") != folder.name or not task.fail_to_pass or not task.tests or not task.source.is_file():
        raise DataError(f"{folder} cannot be used: its id, its FAIL_TO_PASS, its tests or its source is missing or wrong; make the task again")
    return task


class Listed(NamedTuple):
    """A task of a repository as a list shows it."""

    instance_id: str
    split: str
    kind: str
    source: str
    path: str


def list_tasks(repo: Path) -> tuple[Listed, ...]:
    """A repository's tasks by id, without reading more than task.yaml of each. Raises UserError as `read_repo` does."""
    if not (repo / CONFIG).is_file():
        raise UserError(f"repo={repo} is no task repository: it has no {CONFIG}; make one with `sao env make swe`")
    found = []
    for path in sorted((repo / TASKS).glob("*/task.yaml")):
        if not path.parent.name.startswith("."):
            meta = yaml.load(path.read_text(), Loader=LOADER)
            mutation = meta.get("mutation") or {}
            found.append(Listed(path.parent.name, str(meta["split"]), str(mutation.get("kind")), str(meta["source"]), str(mutation.get("path"))))
    return tuple(found)


def _name(value: Any) -> str:
    if not isinstance(value, str) or "/" in value or value.startswith("."):
        raise ValueError(f"{value!r} is not a file name")
    return value


def _names(values: Any) -> tuple[str, ...]:
    if not isinstance(values, list) or any(not isinstance(v, str) or v.startswith(("/", "-")) or ".." in v.split("/") for v in values):
        raise ValueError(f"{values!r} is not a list of files")
    return tuple(values)


def row(task: SweTask) -> dict[str, Any]:
    """The task as a row of the official data set, for the official grading functions and the official harness."""
    return {
        "instance_id": task.instance_id,
        "repo": task.repository,
        "version": task.version,
        "base_commit": task.base_commit,
        "image": f"swebench/sweb.eval.x86_64.{task.instance_id}:latest".lower().replace("__", "_1776_"),
        "patch": task.gold.decode(),
        "test_patch": task.test_patch.decode(),
        "problem_statement": task.statement,
        "eval_script": eval_script(task),
        "log_parser": LOG_PARSER,
        "eval_type": EVAL_TYPE,
        "FAIL_TO_PASS": list(task.fail_to_pass),
        "PASS_TO_PASS": list(task.pass_to_pass),
    }


def eval_script(task: SweTask) -> str:
    """What the official harness runs in the task's image, in its own form."""
    files = " ".join(_shell(name) for name in task.tests)
    kept = " ".join(_shell(name) for name in task.kept if name not in task.hidden)
    hidden = " ".join(_shell(name) for name in task.hidden)
    path = "/testbed" if task.import_path == "." else f"/testbed/{task.import_path}"
    lines = [
        "#!/bin/bash",
        "set -uxo pipefail",
        "cd /testbed",
        f"export PYTHONPATH={path} NO_COLOR=1 PYTEST_DISABLE_PLUGIN_AUTOLOAD=1",
        *([f"git checkout HEAD -- {kept}"] if kept else []),
        *([f"rm -f {hidden}"] if hidden else []),
        "git apply -v - <<'EOF_114329324912'",
        task.test_patch.decode().removesuffix("\n"),
        "EOF_114329324912",
        f": '{START}'",
        f"python -m pytest -rA -q --tb=native --color=no -p no:cacheprovider -o addopts= --continue-on-collection-errors --rootdir=. {files}",
        f": '{END}'",
    ]
    return "\n".join(lines) + "\n"


def dockerfile(task: SweTask) -> str:
    """An image of the same repository, for the official harness; it fetches the package's source from the index."""
    return "\n".join(
        [
            "FROM python:3.11-slim",
            "RUN apt-get update && apt-get install -y --no-install-recommends git patch && rm -rf /var/lib/apt/lists/* && pip install pytest",
            f"RUN pip download --no-deps --no-binary :all: --dest /source {task.package}=={task.version} \\",
            "    && mkdir /testbed && tar -xf /source/*.tar.gz -C /testbed --strip-components 1",
            "WORKDIR /testbed",
            "COPY bug.patch test.patch /source/",
            "RUN git init -q && git apply /source/bug.patch && git apply -R /source/test.patch && rm -r /source && git add -A -f \\",
            "    && git -c user.name=task -c user.email=task@localhost commit -q -m base && rm -rf .git/logs",
            "",
        ]
    )


def _shell(name: str) -> str:
    return name if re.fullmatch(r"[\w./-]+", name) else "'" + name.replace("'", "'\\''") + "'"
