"""`sao eval swebench` without a sandbox: what it refuses, what it counts, what it goes on from, and how it asks the official harness."""

from __future__ import annotations

import asyncio
import json
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from sao.errors import ConfigError, DataError, SandboxFailure, SystemFailure, UserError
from sao.evals import swebench
from sao.evals.swebench import SweJob, VerdictFile, chosen, grade_each, make_job, report, summary
from sao.evals.swebench_agent import handed_in, record
from sao.evals.swebench_official import check_rows, docker_trouble, load_rows, official_command, run_harness
from sao.swe.grading import Verdict
from sao.swe.predictions import Prediction, Predictions, read_predictions
from sao.swe.repo import HELD_OUT, TRAIN, SweTask, read_repo, row, write_config, write_task
from sao.trajectory import FinishReason


def task(name: str, repo: Path, split: str = HELD_OUT) -> SweTask:
    source = repo / "sources" / "small-1.tar.gz"
    source.parent.mkdir(parents=True, exist_ok=True)
    source.write_bytes(b"")
    package = name.split("__")[1].split("-")[0]
    lists: dict[str, Any] = {"tests": ("t.py",), "hidden": ("t.py",), "kept": ("t.py",), "fail_to_pass": ("t.py::a",), "pass_to_pass": ("t.py::b",)}
    diff = b"diff --git a/t.py b/t.py\n"
    mutation = {"kind": "comparison", "path": "s.py", "line": 1, "right": "a", "wrong": "b"}
    return SweTask(name, package, "1", "0" * 40, split, source, "MIT", ".", "Mend it.", diff, diff, diff, mutation=mutation, **lists)


@pytest.fixture
def repo(tmp_path: Path) -> Path:
    folder = tmp_path / "repo"
    write_config(folder, "sao/swe")
    for name, split in (("pypi__a-1", HELD_OUT), ("pypi__a-2", HELD_OUT), ("pypi__b-1", TRAIN)):
        write_task(folder, task(name, folder, split), "sao/swe")
    return folder


def predicted(path: Path, *names: str) -> Path:
    path.write_text("".join(Prediction(name, "m", "diff").line() for name in names))
    return path


def job(repo: Path, folder: Path, *names: str) -> SweJob:
    tasks = read_repo(repo)
    return SweJob(tasks, read_predictions(predicted(folder / "p.jsonl", *names), tasks), "job", folder / "out", 2, "bwrap")


def test_a_task_is_read_as_it_was_written(repo: Path):
    found = read_repo(repo)
    assert found["pypi__b-1"] == task("pypi__b-1", repo, TRAIN)
    assert set(row(found["pypi__a-1"])) >= {"image", "eval_script", "log_parser", "FAIL_TO_PASS"}


@pytest.mark.parametrize(
    ("file", "text", "said"),
    [
        ("tests.json", '{"FAIL_TO_PASS": []}', "cannot be used"),
        ("tests.json", "{", "cannot be used"),
        ("task.yaml", "split: [", "cannot be used"),
        ("task.yaml", "instance_id: pypi__a-1", "KeyError: 'repo'"),
        ("bug.patch", None, "has no bug.patch"),
    ],
)
def test_a_task_that_cannot_be_used_is_named(repo: Path, file: str, text: str | None, said: str):
    path = repo / "tasks" / "pypi__a-1" / file
    if text is None:
        path.unlink()
    else:
        path.write_text(text)
    with pytest.raises(DataError, match="pypi__a-1") as caught:
        read_repo(repo)
    assert said in str(caught.value)


def test_a_task_may_not_reach_out_of_its_repository(repo: Path):
    path = repo / "tasks" / "pypi__a-1" / "task.yaml"
    for old, new in (("source: small-1.tar.gz", "source: ../../etc/passwd"), ("- t.py", "- ../t.py")):
        text = path.read_text()
        path.write_text(text.replace(old, new, 1))
        with pytest.raises(DataError, match="cannot be used"):
            read_repo(repo)
        path.write_text(text)


@pytest.mark.parametrize(
    ("own", "said"),
    [
        ({}, "needs repo=DIR"),
        ({"repo": "{repo}"}, "one of predictions=FILE"),
        ({"repo": "{repo}", "predictions": "x", "run": "y"}, "one of predictions=FILE"),
        ({"repo": "/nowhere", "predictions": "x"}, "no task repository"),
        ({"repo": "{repo}", "predictions": "/nowhere"}, "cannot be read"),
        ({"repo": "{repo}", "predictions": "x", "parallel": "0"}, "parallel=0 must be at least 1"),
        ({"repo": "{repo}", "predictions": "x", "ids": "pypi__c-1"}, "names 'pypi__c-1'"),
        ({"repo": "{repo}", "predictions": "x", "split": "dev"}, "split=dev has no task; repo= has test, train"),
    ],
)
def test_what_cannot_work_is_refused_in_one_sentence(repo: Path, own: dict[str, str], said: str):
    with pytest.raises(UserError) as caught:
        make_job({key: value.format(repo=repo) for key, value in own.items()}, [])
    assert said in str(caught.value) and "\n" not in str(caught.value)


def test_an_agent_works_on_the_held_out_tasks_and_a_file_on_all(repo: Path):
    tasks = read_repo(repo)
    assert list(chosen(tasks, {"model": "m"})) == ["pypi__a-1", "pypi__a-2"]
    assert len(chosen(tasks, {"predictions": "p"})) == 3 and len(chosen(tasks, {"predictions": "p", "tasks": "2"})) == 2
    assert list(chosen(tasks, {"model": "m", "ids": "pypi__b-1"})) == ["pypi__b-1"]


def test_a_sandbox_that_fails_is_tried_again_and_never_a_verdict(repo: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    fails = {"pypi__a-1": 1, "pypi__a-2": 9}

    async def fake(found: SweTask, patch: str, create: object) -> Verdict:
        if fails.get(found.instance_id, 0) > 0:
            fails[found.instance_id] -= 1
            raise SandboxFailure("no room")
        return Verdict(found.instance_id, "resolved")

    monkeypatch.setattr(swebench, "grade", fake)
    asked = job(repo, tmp_path, "pypi__a-1", "pypi__a-2", "pypi__b-1")
    with VerdictFile(asked.folder) as verdicts:
        nobody: Any = None
        missing = asyncio.run(grade_each(asked, asked.predictions.good, nobody, verdicts.add, lambda verdict: None))  # type: ignore[union-attr]
        found = report(asked, verdicts.of(asked.predictions))  # type: ignore[arg-type]
    assert missing == {"pypi__a-2": "no room"}
    assert found["resolved_ids"] == ["pypi__a-1", "pypi__b-1"] and found["ungraded_ids"] == ["pypi__a-2"]
    assert found["resolve_rate"] == pytest.approx(2 / 3) and "ungraded 1" in summary(found)


def test_verdicts_are_kept_by_patch_whatever_cut_the_file_off(repo: Path, tmp_path: Path):
    asked = job(repo, tmp_path, "pypi__a-1", "pypi__a-2")
    assert asked.predictions is not None
    first, second = asked.predictions.good
    with VerdictFile(asked.folder) as verdicts:
        verdicts.add(first, Verdict(first.instance_id, "unresolved", "still_failing", failed=("x",), log="said"))
        with pytest.raises(UserError, match="another evaluation"), VerdictFile(asked.folder):
            pass
    with (asked.folder / "verdicts.jsonl").open("a") as file:
        file.write('{"instance_id": "pypi')
    with VerdictFile(asked.folder) as verdicts:
        assert verdicts.get(first) == Verdict(first.instance_id, "unresolved", "still_failing", failed=("x",))
        assert verdicts.get(second) is None and verdicts.get(replace(first, model_patch="other")) is None
        verdicts.add(second, Verdict(second.instance_id, "resolved"))
    with VerdictFile(asked.folder) as verdicts:
        assert len(verdicts.of(asked.predictions)) == 2
    assert (asked.folder / "logs" / "pypi__a-1.log").read_text() == "said"


class Played:
    """What `record` reads of a trajectory."""

    def __init__(self, finish: FinishReason) -> None:
        self.finish, self.sampled_tokens, self.metrics = finish, 5, {"turns": 2.0}
        self.info = {"messages": [{"role": "user", "content": "Mend."}, {"role": "user", "content": "diff\r\n"}]}


def test_an_episode_that_hands_in_nothing_is_an_empty_prediction():
    played: Any = Played(FinishReason.terminal())
    cut: Any = Played(FinishReason.truncated("turns"))
    assert handed_in(played) == "diff\r\n" and handed_in(cut) == ""
    assert record(played, "a", "diff\r\n")["info"]["exit_status"] == "Submitted"
    said = record(cut, "a", "")
    assert (said["info"]["exit_status"], said["trajectory_format"]) == ("LimitsExceeded", "mini-swe-agent-1.1")


OFFICIAL = {
    **dict.fromkeys(("image", "repo", "version", "log_parser", "eval_type", "eval_script"), "x"),
    "instance_id": "a__b-1",
    "patch": "diff --git a/x b/x\n",
    "FAIL_TO_PASS": '["t"]',
    "PASS_TO_PASS": ["u"],
}


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"image": None}, "has no image"),
        ({"FAIL_TO_PASS": "diff --git"}, "FAIL_TO_PASS is not a list"),
        ({"PASS_TO_PASS": [1]}, "PASS_TO_PASS is not a list"),
        ({"patch": '["t"]'}, "patch is not a diff"),
    ],
)
def test_rows_of_an_older_form_or_with_shifted_columns_are_refused(change: dict[str, Any], said: str):
    bad = {key: value for key, value in {**OFFICIAL, **change}.items() if value is not None}
    with pytest.raises(DataError, match="row 1"):
        check_rows([OFFICIAL, bad], "file")
    with pytest.raises(DataError) as caught:
        check_rows([bad], "file")
    assert said in str(caught.value)


def test_without_docker_an_official_data_set_is_refused_before_anything_is_loaded(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("shutil.which", lambda name: None)
    with pytest.raises(UserError, match="needs Docker, and there is no docker command here"):
        official_command({"dataset": "verified", "predictions": "p.jsonl"}, [])
    for own in ({"dataset": "verified"}, {"dataset": "verified", "model": "m"}):
        with pytest.raises(ConfigError):
            official_command(own, [])


def test_a_docker_that_does_not_answer_is_told_from_one_that_refuses(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("shutil.which", lambda name: "/usr/bin/docker")

    def hangs(*args: Any, **more: Any) -> None:
        raise subprocess.TimeoutExpired("docker", 20)

    assert docker_trouble(hangs) == "docker does not answer"
    assert docker_trouble(lambda *a, **k: subprocess.CompletedProcess(a, 1)) and not docker_trouble(lambda *a, **k: subprocess.CompletedProcess(a, 0))


def test_the_official_harness_gets_the_good_lines_in_its_own_form(tmp_path: Path):
    asked: dict[str, Any] = {}

    def harness(command: list[str], cwd: Path) -> subprocess.CompletedProcess[str]:
        asked["command"], asked["lines"] = command, Path(command[command.index("-p") + 1]).read_text()
        return subprocess.CompletedProcess(command, asked.get("rc", 0))

    good = Prediction("a__b-1", "m", "diff\r\n")
    assert run_harness("verified", "test", Predictions(2, (good,), ()), tmp_path, 3, harness) == 0
    assert json.loads(asked["lines"]) == vars(good)
    from swebench.cli.cli import app
    from typer.testing import CliRunner

    usage = CliRunner().invoke(app, ["eval", "--help"], env={"COLUMNS": "200"}).output
    assert all(flag in usage for flag in asked["command"] if flag.startswith("--"))
    asked["rc"] = 1
    with pytest.raises(SystemFailure, match="exit code 1"):
        run_harness("verified", "test", Predictions(1, (good,), ()), tmp_path, 3, harness)


def test_a_local_file_of_rows_is_read_and_a_broken_one_refused(tmp_path: Path):
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps(OFFICIAL) + "\n\n")
    assert load_rows(str(path), "test") == [OFFICIAL]
    path.write_text("{\n")
    with pytest.raises(UserError, match="cannot be read"):
        load_rows(str(path), "test")
