"""What a resume refuses before it writes anything: a checkpoint of another version or another model, and files that were cut off."""

from __future__ import annotations

import errno
import json
import shutil
import threading

import pytest
from transformers import LlamaConfig, LlamaForCausalLM

from sao import train
from sao.cli import main
from sao.durable import put_in_place
from sao.report.store import write_file
from sao.runtime import run_folder
from sao.runtime.checkpoints import FORMAT
from sao.runtime.run_folder import RunFolder, refuse_used, started_by, write_atomically
from tests.unit.evals.test_eval_command import made, project  # noqa: F401 - fixtures
from tests.unit.learner.learner_builders import SHAPE


@pytest.fixture
def run(project, monkeypatch):  # noqa: F811
    """A run that has done two steps of 200; nothing may be started."""

    def started(*_):
        raise AssertionError("it was started")

    monkeypatch.setattr(train, "Job", started)
    monkeypatch.setattr(train, "check_openings", lambda *_: None)
    monkeypatch.setattr(train.sweeper, "start", lambda: None)
    folder = project / "run"
    shutil.rmtree(folder / "checkpoints" / "final")
    (folder / "command.json").write_text(json.dumps({"incarnation": 1, "sao": "0.0.9"}))
    return folder


def content(folder):
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file() and path.name != "run.lock"}


def refused(run, capsys, *overrides):
    """What the command says; the folder is as it was."""
    before = content(run)
    assert main(["train", "resume=run", *overrides]) == 2
    assert content(run) == before
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith("error: ")
    return error


def test_the_run_of_these_tests_would_start(run):
    with pytest.raises(AssertionError, match="started"):
        main(["train", "resume=run"])
    assert json.loads((run / "command.json").read_text())["incarnation"] == 2
    assert not [thread for thread in threading.enumerate() if thread.name == "wandb-mirror"], "a run that cannot start leaves its mirror behind"


@pytest.mark.parametrize("overrides", [[], ["run.dry_run=true"]])
def test_a_checkpoint_of_another_version_is_refused_with_both_named(run, capsys, overrides):
    manifest = run / "checkpoints" / "step-000002" / "manifest.json"
    facts = json.loads(manifest.read_text())
    assert facts["sao"] == started_by()
    manifest.write_text(json.dumps(facts | {"format": 0, "sao": "0.0.8"}))
    assert f"made by SAO 0.0.8 in format 0, this is SAO {started_by()}, which reads format {FORMAT}" in refused(run, capsys, *overrides)
    del facts["sao"]
    manifest.write_text(json.dumps(facts | {"format": 2}))  # whose tasks in flight are cursors, not places
    assert f"made by SAO 0.0.9 in format 2, this is SAO {started_by()}, which reads format {FORMAT}" in refused(run, capsys, *overrides)


def test_a_checkpoint_of_another_model_is_refused(run, capsys):
    LlamaForCausalLM(LlamaConfig(**SHAPE | {"intermediate_size": 40, "tie_word_embeddings": True})).save_pretrained(run.parent / "model")
    error = refused(run, capsys)
    assert "step-000002 is of another model than " in error and f"feed_forward is {SHAPE['intermediate_size']} instead of 40" in error


def test_a_dry_run_looks_at_a_resume_and_leaves_it(run, capsys):
    before = content(run)
    assert main(["train", "resume=run", "run.dry_run=true"]) == 0
    assert "dry run: everything checks out" in capsys.readouterr().out and content(run) == before


@pytest.mark.parametrize("text", ["", "{", "[1]", "\0\0\0"])
def test_a_damaged_command_file_is_one_sentence(run, capsys, text):
    (run / "command.json").write_text(text)
    assert "command.json is damaged; remove it" in refused(run, capsys)


def test_a_damaged_configuration_is_not_taken_for_another_version(run, capsys):
    (run / "command.json").write_text(json.dumps({"sao": started_by()}))
    (run / "config.yaml").write_text("")
    error = refused(run, capsys)
    assert "config.yaml lacks seed" in error and "it was cut off" in error and "started by" not in error


@pytest.mark.parametrize("left", ["ledger.json", "trajectories/step-000000.parquet", "checkpoints/step-000004/manifest.json", "checkpoints/final/x"])
def test_a_folder_with_any_part_of_a_run_is_used(tmp_path, left):
    refuse_used(tmp_path)
    (tmp_path / left).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / left).touch()
    with pytest.raises(run_folder.UserError, match="already holds a run"):
        refuse_used(tmp_path)
    with pytest.raises(run_folder.UserError), RunFolder(tmp_path):
        pass


def test_content_is_on_the_disk_before_a_file_has_its_name(tmp_path, monkeypatch):
    """A power cut between the two would leave an empty file under the name."""
    done = []
    monkeypatch.setattr("sao.durable.sync", lambda path: done.append(("sync", path.name)))
    monkeypatch.setattr("sao.durable.os.replace", lambda old, new: done.append(("replace", new.name)))
    write_atomically(tmp_path / "command.json", "{}")
    (tmp_path / "t").mkdir()
    write_file(tmp_path / "t" / "step-000000.parquet", 0, [])
    assert [what for what, _ in done] == ["sync", "replace", "sync"] * 2
    assert done[1] == ("replace", "command.json") and done[2] == ("sync", tmp_path.name) and done[4] == ("replace", "step-000000.parquet")


def test_a_write_that_fails_leaves_the_old_content_and_nothing_else(tmp_path, monkeypatch):
    write_atomically(tmp_path / "x.json", "old")

    def full(temporary, path):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(run_folder, "put_in_place", full)
    with pytest.raises(OSError, match="No space"):
        write_atomically(tmp_path / "x.json", "new")
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("x.json", "old")]
    put_in_place(tmp_path / "x.json", tmp_path / "y.json")
