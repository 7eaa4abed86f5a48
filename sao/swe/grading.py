"""Grading a patch: from the diff alone, in a clean sandbox, by what the tests did and not by what was printed.

    1 the patch is judged (sao/swe/patches.py) before anything touches a file
    2 a fresh repository is built in a fresh sandbox, and the patch applied as the official harness does: git apply, its variants, then patch
    3 the files of the tests are restored, whatever the patch did to them, and test.patch is applied
    4 the tests run under a recorder whose report is signed with a nonce; a canary that must fail shows whether reports are being rewritten
    5 FAIL_TO_PASS and PASS_TO_PASS are compared with the report

A sandbox that could not do its work is a SandboxFailure and no verdict.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import secrets
from dataclasses import asdict, dataclass, field
from importlib.resources import files
from typing import Any

from sao.sandbox.protocol import WORKSPACE, ExecResult, FileAccess, Sandbox
from sao.swe import patches
from sao.swe.repo import END, EXIT_CODE, START, SweTask
from sao.swe.toolbox import toolbox
from sao.swe.workspace import Create, build, workspace_spec

VERDICTS = ("resolved", "unresolved", "error", "empty", "tampered")
GOOD = ("PASSED", "XFAIL")
OUTPUT_KB = 4096
REPORT_BYTES = 8 << 20
SETTINGS = (
    "conftest.py",
    "pytest.ini",
    ".pytest.ini",
    "pytest.toml",
    ".pytest.toml",
    "tox.ini",
    "setup.cfg",
    "pyproject.toml",
    "sitecustomize.py",
    "usercustomize.py",
)
# After a failed attempt the tree is put back: --reject leaves half a patch behind. The order is the official harness's (run_evaluation.py, GIT_APPLY_CMDS).
APPLY = """
again() { git checkout -q -f HEAD -- . && git clean -q -f -d -x -e /.patch; }
git apply --verbose .patch && exit 0; again
git apply --verbose --3way .patch && exit 0; git reset -q --hard HEAD; again
git apply --verbose --reject .patch && exit 0; again
patch --batch --forward --fuzz=5 -p1 -i .patch && exit 0; again
git apply --check --reverse .patch && exit 0
exit 1
"""
RESTORE = """set -e
rm -f .patch
git ls-files -z --others | while IFS= read -r -d '' f; do case "${{f##*/}}" in {settings}) rm -rf -- "./$f";; esac; done
{restore}
{remove}
if [ -s .tests ]; then git apply --whitespace=nowarn .tests; fi
rm -f .tests
"""


@dataclass(frozen=True)
class Verdict:
    """What a patch is worth. reason: one of a few words that reports count by; detail: one sentence for people.

    failed: tests of FAIL_TO_PASS that do not pass; broken: tests of PASS_TO_PASS that no longer do. log: the run in the official harness's form.
    """

    instance_id: str
    verdict: str
    reason: str = ""
    detail: str = ""
    failed: tuple[str, ...] = ()
    broken: tuple[str, ...] = ()
    seconds: float = 0.0
    log: str = field(default="", repr=False, compare=False)

    @property
    def resolved(self) -> bool:
        return self.verdict == "resolved"

    def record(self) -> dict[str, Any]:
        """JSON-compatible, without the log."""
        return {key: value for key, value in asdict(self).items() if key != "log"}


@dataclass(frozen=True)
class TestRun:
    """What a run of the tests came to. status: of each test, as the official parsers name it. trouble: why there is none, as (verdict, reason, detail)."""

    status: dict[str, str]
    failures: dict[str, str]
    result: ExecResult
    trouble: tuple[str, str, str] | None = None

    __test__ = False  # not a test of ours


async def grade(task: SweTask, patch: str | bytes | None, create: Create) -> Verdict:
    """The verdict on one patch, in a sandbox of its own. Raises SandboxFailure when no sandbox could say."""
    data = patches.normal(patch or b"")
    if refusal := patches.judge(data):
        return Verdict(task.instance_id, refusal.verdict, refusal.kind, refusal.text)
    return await _in_fresh(task, data, create)


async def grade_untouched(task: SweTask, create: Create) -> Verdict:
    """The verdict on the repository as it is handed out, which a good task leaves unresolved."""
    return await _in_fresh(task, b"", create)


async def grade_in(sandbox: Sandbox, task: SweTask, patch: bytes) -> Verdict:
    """The verdict on one patch, in a sandbox that holds the built repository and in which no command of the policy ever ran."""
    data = patches.normal(patch)
    if refusal := patches.judge(data):
        return Verdict(task.instance_id, refusal.verdict, refusal.kind, refusal.text)
    return await _graded(sandbox, task, data)


async def _in_fresh(task: SweTask, patch: bytes, create: Create) -> Verdict:
    sandbox = await create(workspace_spec())
    try:
        await build(sandbox, task)
        return await _graded(sandbox, task, patch)
    finally:
        await sandbox.close()


async def _graded(sandbox: Sandbox, task: SweTask, patch: bytes) -> Verdict:
    if patch:
        await sandbox.write(".patch", patch)
        applied = await sandbox.exec(["bash", "-c", APPLY])
        if applied.rc:
            why = f"apply_{patches.why_not_applied(patch)}"
            return Verdict(task.instance_id, "error", why, f"the patch does not apply: {_last(applied.text)}", log=applied.text)
    if trouble := await _restore(sandbox, task):
        return Verdict(task.instance_id, *trouble)
    return compare(task, await run_tests(sandbox, task.import_path, task.tests, task.timeout_s))


async def _restore(sandbox: Sandbox, task: SweTask) -> tuple[str, str, str] | None:
    await sandbox.write(".tests", task.test_patch)
    kept = [name for name in task.kept if name not in task.hidden]
    restore = f"git checkout -q -f HEAD -- {' '.join(map(_quoted, kept))}" if kept else ""
    remove = f"rm -rf -- {' '.join(map(_quoted, task.hidden))}" if task.hidden else ""
    script = RESTORE.format(settings="|".join(SETTINGS), restore=restore, remove=remove)
    result = await sandbox.exec(["bash", "-c", script])
    return ("error", "tests_not_restored", f"the tests could not be put in place: {_last(result.text)}") if result.rc else None


async def run_tests(sandbox: Sandbox, import_path: str, tests: tuple[str, ...], timeout_s: float) -> TestRun:
    """Run test files under the recorder."""
    key, name = secrets.token_bytes(32), secrets.token_hex(8)
    canary, out = f"test_canary_{name}.py", f".report-{name}"
    path = WORKSPACE if import_path == "." else f"{WORKSPACE}/{import_path}"
    paths = list(dict.fromkeys([path, WORKSPACE]))
    job = {"key": key.hex(), "paths": paths, "tests": list(tests), "canary": canary, "out": out}
    program = [f"{toolbox()}/bin/python", "-I", "-B", "-c", files("sao.swe").joinpath("runner.py").read_text()]
    result = await sandbox.exec(program, timeout_s=timeout_s, output_kb=OUTPUT_KB, stdin=json.dumps(job).encode())
    try:
        report = await sandbox.read(out, REPORT_BYTES)
    except FileAccess:
        report = b""
    if trouble := _distrusted(result, report, key):
        return TestRun({}, {}, result, trouble)
    body = json.loads(report.partition(b"\n")[2])
    status: dict[str, str] = body["status"]
    canaries = [status.pop(test) for test in list(status) if test.startswith(canary)]
    if canaries and canaries != ["FAILED"]:
        return TestRun({}, {}, result, ("tampered", "rewritten_reports", f"a test that must fail was reported as {' and '.join(canaries)}"))
    if not canaries:
        return TestRun(
            status, body["failures"], result, ("unresolved", "tests_did_not_run", f"pytest stopped before the tests: {_last(result.text)}")
        )
    return TestRun(status, body["failures"], result)


def _distrusted(result: ExecResult, report: bytes, key: bytes) -> tuple[str, str, str] | None:
    """Why what a run left behind says nothing, or None."""
    if result.timed_out:
        return "error", "tests_timeout", f"the tests had not ended after {result.seconds:.0f} s"
    if result.killed_by:
        return "error", f"tests_killed_{result.killed_by}", f"the tests were killed: {result.killed_by}"
    if any(marker in result.text for marker in (START, END, EXIT_CODE)):
        return "tampered", "forged_markers", "the tests printed the markers of a grader"
    signature, _, body = report.partition(b"\n")
    if not report:
        if result.rc == 0:
            return "tampered", "forged_exit_code", "the test process ended with exit code 0 before it had reported"
        return "unresolved", "tests_did_not_finish", f"the test process ended with exit code {result.rc} before it had reported"
    if not hmac.compare_digest(hmac.new(key, body, hashlib.sha256).hexdigest().encode(), signature):
        return "tampered", "forged_report", "the report of the tests does not bear the nonce"
    said = json.loads(body)
    if said["code"] != result.rc:
        return "tampered", "forged_exit_code", f"the tests reported exit code {said['code']}, the process ended with {result.rc}"
    return None


def compare(task: SweTask, run: TestRun) -> Verdict:
    """A run against the task's lists, as `swebench.harness.grading` does: resolved when every FAIL_TO_PASS passes and every PASS_TO_PASS passes or is skipped."""
    log = official_log(run.result)
    seconds = run.result.seconds
    if run.trouble:
        return Verdict(task.instance_id, *run.trouble, failed=task.fail_to_pass, seconds=seconds, log=log)
    failed = tuple(test for test in task.fail_to_pass if run.status.get(test) not in GOOD)
    broken = tuple(test for test in task.pass_to_pass if run.status.get(test) not in (*GOOD, "SKIPPED"))
    if not failed and not broken:
        return Verdict(task.instance_id, "resolved", seconds=seconds, log=log)
    reason = "still_failing" if failed else "broke_tests"
    detail = f"{len(failed)} of {len(task.fail_to_pass)} tests still fail, {len(broken)} of {len(task.pass_to_pass)} that passed no longer do"
    return Verdict(task.instance_id, "unresolved", reason, detail, failed, broken, seconds, log)


def official_log(result: ExecResult) -> str:
    """A run as the official harness would have logged it; its markers are put there by us, after the fact."""
    if result.timed_out:
        return f"{START}\n{result.text}\n>>>>> Tests Timed Out\n"
    return f"{START}\n{result.text}\n{END}\n{EXIT_CODE}: {result.rc}\n"


def _last(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1][:200] if lines else "no output"


def _quoted(name: str) -> str:
    return "'" + name.replace("'", "'\\''") + "'"
