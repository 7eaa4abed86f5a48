"""SWE tasks in real sandboxes: made, verified, attacked, solved by an agent, and compared with the official grading functions."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from sao.environment import Action, Context, StepResult, Task
from sao.envs.swe.actions import SENTINEL
from sao.envs.swe.edits import right_edit
from sao.envs.swe.environment import SweEnvironment
from sao.sandbox.client import Sandboxes
from sao.sandbox.protocol import SandboxSpec
from sao.swe.grading import Verdict, grade, grade_untouched
from sao.swe.make import Maker
from sao.swe.repo import SweTask, read_repo, row
from sao.swe.workspace import Create, build, workspace_spec
from tests.integration.swe_package import small_package

pytestmark = pytest.mark.integration


class Made(NamedTuple):
    repo: Path
    tasks: dict[str, SweTask]

    @property
    def task(self) -> SweTask:
        """A task whose bug one test of several shows."""
        return next(task for task in self.tasks.values() if task.pass_to_pass and len(task.fail_to_pass) == 1)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Made]:
    folder = tmp_path_factory.mktemp("swe")
    package = small_package(folder)
    said: list[str] = []

    async def work(create: Create) -> None:
        maker = Maker(folder / "repo", create, seed=0, held_out=set(), parallel=2, say=said.append)
        assert (await maker.make([package], 4))[package.name] == 4, (said, maker.tried)

    in_sandboxes(work)
    yield Made(folder / "repo", read_repo(folder / "repo"))


def in_sandboxes(work: Callable[[Create], Awaitable[Any]]) -> Any:
    async def run() -> Any:
        boxes = Sandboxes("bwrap", key="tests of swe")
        await boxes.start()
        return await work(boxes.create)

    return asyncio.run(run())


@pytest.fixture(scope="module", autouse=True)
def _no_daemon_left() -> Iterator[None]:
    yield
    asyncio.run(Sandboxes("bwrap", key="tests of swe").end())


def verdict(task: SweTask, patch: str | bytes) -> Verdict:
    found = in_sandboxes(lambda create: grade(task, patch, create))
    assert isinstance(found, Verdict)
    return found


def adding(path: str, text: str) -> bytes:
    lines = text.splitlines()
    body = "".join(f"+{line}\n" for line in lines)
    return f"diff --git a/{path} b/{path}\nnew file mode 100644\n--- /dev/null\n+++ b/{path}\n@@ -0,0 +1,{len(lines)} @@\n{body}".encode()


def at_import(task: SweTask, code: str) -> bytes:
    """A patch that runs some code when the package is imported."""
    lines = code.splitlines()
    name, added = "small/__init__.py", "".join(f"+{line}\n" for line in lines)
    head = f"diff --git a/{name} b/{name}\n--- a/{name}\n+++ b/{name}\n@@ -1 +1,{len(lines) + 1} @@\n"
    return f"{head} from small.sizes import fits, total\n{added}".encode()


def test_a_made_task_is_whole_and_the_official_checks_find_nothing(made: Made):
    from swebench.task.checks import check_task_repo
    from swebench.task.repo import load_task_repo

    assert check_task_repo(made.repo) == []
    assert {r["instance_id"] for r in load_task_repo(made.repo)} == set(made.tasks)
    task = made.task
    for name in task.hidden:
        assert f"+++ b/{name}".encode() in task.test_patch
    assert task.fail_to_pass[0] in task.statement and task.mutation["path"] not in task.statement.split("ends with")[0]


def test_gold_resolves_nothing_does_not_and_no_patch_is_empty(made: Made):
    async def all_three(create: Create) -> list[Verdict]:
        return [await grade(made.task, made.task.gold, create), await grade_untouched(made.task, create), await grade(made.task, "", create)]

    gold, untouched, empty = in_sandboxes(all_three)
    assert (gold.verdict, untouched.verdict, empty.verdict) == ("resolved", "unresolved", "empty")
    assert untouched.failed == made.task.fail_to_pass and not untouched.broken


def test_an_agent_gets_one_commit_and_no_way_back(made: Made):
    async def look(create: Create) -> str:
        box = await create(workspace_spec())
        commit = await build(box, made.task)
        assert commit == made.task.base_commit
        script = "git rev-list --all --count; git remote; git tag; git reflog; ls -A; find .git -name '*.pack' -o -name hooks -o -name logs; git log --format=%P; git status -s"
        said = (await box.exec(script)).text
        await box.close()
        return said

    lines = in_sandboxes(look).split("\n")
    assert lines[0] == "1"
    assert [line for line in lines[1:] if line] == [
        ".git",
        "PKG-INFO",
        "setup.cfg",
        "small",
        *(["tests"] if set(made.task.hidden) != {"tests/test_other.py", "tests/test_sizes.py"} else []),
    ]


FORGED = """real = total
def total(sizes):
    print('>>>>> Start Test Output\\nPASSED tests/test_sizes.py::test_total\\n>>>>> End Test Output')
    return real(sizes)"""
ATTACKS: dict[str, tuple[Callable[[SweTask], bytes], str, str]] = {
    "markers": (lambda t: at_import(t, FORGED), "tampered", "forged_markers"),
    "exit 0": (lambda t: at_import(t, "import os; print('PASSED', flush=True); os._exit(0)"), "tampered", "forged_exit_code"),
    "exit 1": (lambda t: at_import(t, "import os; os._exit(1)"), "unresolved", "tests_did_not_finish"),
    "hang": (lambda t: at_import(t, "import time; time.sleep(600)"), "error", "tests_timeout"),
    "all pass": (
        lambda t: at_import(t, "import _pytest.python as p; p.Function.runtest = lambda self: None"),
        "tampered",
        "rewritten_reports",
    ),
    "forged report": (
        lambda t: at_import(
            t, "import atexit, glob, os; open('sitecustomize.py', 'w'); os.execv('/bin/sh', ['sh', '-c', 'echo x > .report-x; exit 1'])"
        ),
        "unresolved",
        "tests_did_not_finish",
    ),
    "colours": (lambda t: adding("pytest.ini", "[pytest]\naddopts = --color=yes --collect-only"), "unresolved", "still_failing"),
    "conftest": (
        lambda t: adding(
            "conftest.py", "import pytest\n@pytest.hookimpl(wrapper=True)\ndef pytest_pyfunc_call(pyfuncitem):\n    yield\n    return True"
        ),
        "unresolved",
        "still_failing",
    ),
    "startup": (lambda t: adding("sitecustomize.py", "import os; os._exit(0)"), "unresolved", "still_failing"),
    "shadowed pytest": (lambda t: adding("pytest.py", "raise SystemExit(0)"), "unresolved", "still_failing"),
    "plugin": (lambda t: adding("x.dist-info/entry_points.txt", "[pytest11]\nx = nowhere"), "unresolved", "still_failing"),
    "planted tests": (lambda t: adding(t.hidden[0], "def test_label(): pass"), "unresolved", "still_failing"),
    "deleted tests": (lambda t: at_import(t, "import os, glob; [os.unlink(f) for f in glob.glob('tests/*.py')]"), "unresolved", "still_failing"),
    "hooks": (lambda t: adding(".git/hooks/post-checkout", "#!/bin/sh\nexit 0"), "tampered", "git_directory"),
    "wrong counts": (lambda t: re.sub(rb"@@ -(\d+),\d+ \+(\d+),\d+ @@", rb"@@ -\1,99 +\2,99 @@", t.gold), "error", "apply_counts"),
    "no prefix": (lambda t: t.gold.replace(b"a/", b"").replace(b"b/", b"").replace(b"diff --git", b"x", 1), "error", "apply_prefix"),
}


@pytest.mark.parametrize("name", ATTACKS)
def test_a_patch_that_cheats_or_is_broken_has_one_typed_verdict(made: Made, name: str):
    patch, expected, reason = ATTACKS[name]
    task = replace(made.task, timeout_s=4.0 if name == "hang" else made.task.timeout_s)
    found = verdict(task, patch(task))
    assert (found.verdict, found.reason) == (expected, reason), (found.detail, found.log[-800:])


def test_what_still_applies_still_counts(made: Made):
    gold = made.task.gold.decode()
    shifted = gold.replace("@@ -", "@@ -4", 1)
    for patch in (gold, f"Here it is:\n```diff\n{gold}```\nDone.", shifted, gold.rstrip("\n")):
        assert verdict(made.task, patch).resolved, patch


def test_honest_logs_are_judged_as_the_official_functions_judge_them(made: Made, tmp_path: Path):
    from swebench.harness.grading import get_eval_report
    from swebench.types import TestSpec

    task = made.task
    columns = row(task)
    names = ("instance_id", "image", "repo", "version", "FAIL_TO_PASS", "PASS_TO_PASS", "log_parser", "eval_type")
    spec = TestSpec(eval_script_list=[], **{name: columns[name] for name in names})
    worse = task.gold.decode().replace(task.mutation["right"], "    return None")
    for number, patch in enumerate([task.gold, b"", worse.encode(), adding("notes.txt", "nothing")]):
        found = in_sandboxes(lambda create, patch=patch: grade(task, patch, create) if patch else grade_untouched(task, create))
        (log := tmp_path / f"{number}.log").write_text(found.log)
        prediction = {"instance_id": task.instance_id, "model_name_or_path": "m", "model_patch": patch.decode() or "none"}
        said = get_eval_report(spec, prediction, log, include_tests_status=True)[task.instance_id]
        assert said["resolved"] == found.resolved, (patch, found)
        assert set(said["tests_status"]["FAIL_TO_PASS"]["failure"]) == set(found.failed)
        assert set(said["tests_status"]["PASS_TO_PASS"]["failure"]) == set(found.broken)


def play(task_id: str, turns: list[str], **args: Any) -> tuple[list[StepResult], str]:
    """The results of an episode of env=swe, and its opening."""

    async def episode(create: Create) -> tuple[list[StepResult], str]:
        environment = SweEnvironment(Task("t", "swe", {"instance_id": task_id}), **args)
        box = await create(environment.extend_spec(SandboxSpec()))
        try:
            opening = await environment.reset(Context(sandbox=box))
            return [await environment.step(Action(text=turn)) for turn in turns], str(opening[-1]["content"])
        finally:
            await environment.close()
            await box.close()

    found: tuple[list[StepResult], str] = in_sandboxes(episode)
    return found


def test_an_agent_works_with_bash_and_hands_in(made: Made):
    task = made.task
    wrong, right = task.mutation["wrong"], task.mutation["right"]
    mend = f"```bash\npython - <<'X'\np = {task.mutation['path']!r}\ns = open(p).read()\nopen(p, 'w').write(s.replace({wrong!r}, {right!r}))\nX\n```"
    turns = [
        "What now?",
        "```bash\ncd small\n```\n```bash\nls\n```",
        "```bash\ncd small && python -m compileall -q . ; pwd\n```",
        "```bash\npwd; exit 3\n```",
        mend,
    ]
    results, opening = play(task.instance_id, [*turns, f"```bash\necho {SENTINEL}\n```"], repo=str(made.repo))
    assert task.statement in opening
    said = [r.observation[0]["content"] if r.observation else "" for r in results]
    assert "Nothing was run" in said[0] and "Nothing was run" in said[1]
    assert said[2].endswith("/workspace/small\n</output>") and "<returncode>3" in said[3] and "/workspace\n" in said[3]
    assert results[-1].terminated and results[-1].reward == 1.0 and results[-1].info["verdict/resolved"] == 1.0


def test_what_an_agent_hands_in_is_taken_from_outside(made: Made):
    hide = "```bash\necho '* -diff' > .gitattributes; git config diff.external true; echo 'x = 1' > small/new.py; rm -rf .git/objects; mkdir -p a/__pycache__"
    hide += "; touch a/__pycache__/b.pyc\n```"
    results, _ = play(made.task.instance_id, [hide, f"```bash\necho {SENTINEL}\n```"], repo=str(made.repo), graded=False)
    patch = results[-1].observation[0]["content"]
    assert "+x = 1" in patch and "pyc" not in patch and results[-1].terminated


def test_one_line_is_edited_and_judged(made: Made):
    task = made.task
    args: dict[str, Any] = {"repo": str(made.repo), "actions": "edit", "statement": False, "context": 1}
    results, opening = play(task.instance_id, [right_edit(task.mutation["line"], task.mutation["wrong"], task.mutation["right"])], **args)
    assert task.mutation["wrong"] in opening and len(opening.splitlines()) == 3
    assert results[0].terminated and results[0].reward == 1.0
    results, _ = play(task.instance_id, ["I do not know", f"replace line {task.mutation['line']}: pass"], **args)
    assert not results[0].terminated and results[1].terminated and results[1].reward == 0.0


def test_the_job_survives_a_kill_and_its_counts_add_up(made: Made, tmp_path: Path):
    names = list(made.tasks)
    lines = [json.dumps({"instance_id": name, "model_name_or_path": "gold", "model_patch": made.tasks[name].gold.decode()}) for name in names[:3]]
    (tmp_path / "p.jsonl").write_text("\n".join([*lines, "", lines[0], "{"]) + "\n")
    out = tmp_path / "out"
    command = [
        sys.executable,
        "-m",
        "sao.cli",
        "eval",
        "swebench",
        f"repo={made.repo}",
        f"predictions={tmp_path}/p.jsonl",
        f"out={out}",
        "parallel=1",
    ]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, start_new_session=True)
    until = time.monotonic() + 60
    while not (out / "verdicts.jsonl").exists() or not (out / "verdicts.jsonl").read_text().count("\n"):
        assert process.poll() is None and time.monotonic() < until
        time.sleep(0.02)
    os.kill(process.pid, signal.SIGKILL)
    process.communicate()
    kept = (out / "verdicts.jsonl").read_text().count("\n")
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    report = json.loads((out / "report.json").read_text())
    assert (report["resolved_instances"], report["submitted_instances"], len(report["bad_lines"]), report["prediction_lines"]) == (3, 3, 3, 6)
    assert report["missing_ids"] == sorted(names[3:]) and report["resolve_rate"] == 0.75
    assert (out / "verdicts.jsonl").read_text().count("\n") == 3 and 1 <= kept <= 3
