"""A checkpoint is complete or ignored."""

from __future__ import annotations

import asyncio
import json
import shutil
from pathlib import Path

import pytest

from sao.errors import CheckpointFailure, LearnerFailure, UserError
from sao.report.steps import step_name
from sao.report.store import stored_steps
from sao.runtime import checkpoints as checkpoints_module
from sao.runtime import saved
from sao.runtime.checkpoints import FINAL, Checkpoints, damage
from sao.runtime.run_store import RunCheckpointer, RunStore


def make(folder, step: int, keep: int = 3) -> Checkpoints:
    checkpoints = Checkpoints(folder, keep)
    scratch = checkpoints.begin(step_name(step))
    (scratch / "policy").mkdir()
    (scratch / "policy" / "model.safetensors").write_bytes(bytes(range(200)) * 10)
    (scratch / "learner.pt").write_bytes(b"state" * 100)
    checkpoints.commit(scratch, {"batches_done": step})
    return checkpoints


def test_the_newest_is_found_and_its_state_read_back(tmp_path):
    make(tmp_path, 2)
    checkpoints = make(tmp_path, 10)
    newest = checkpoints.latest(pytest.fail)
    assert newest is not None and newest.step == 10 and newest.state() == {"batches_done": 10}


def test_none_is_no_error(tmp_path):
    assert Checkpoints(tmp_path, 2).latest(pytest.fail) is None


FILES = ("policy/model.safetensors", "learner.pt", "state.json", "manifest.json")


@pytest.mark.parametrize("file", FILES)
@pytest.mark.parametrize("damage", ["truncate", "remove", "flip"])
def test_a_damaged_one_is_skipped_with_a_warning_for_the_one_before(tmp_path, file, damage):
    """C83: any file of the newest checkpoint cut short, missing or changed."""
    make(tmp_path, 1)
    checkpoints = make(tmp_path, 2)
    victim = tmp_path / "checkpoints" / "step-000002" / file
    content = victim.read_bytes()
    if damage == "truncate":
        victim.write_bytes(content[: len(content) // 2])
    elif damage == "remove":
        victim.unlink()
    else:
        victim.write_bytes(b"{" + content[1:-1] + bytes([content[-1] ^ 1]) if file == "manifest.json" else bytes([content[0] ^ 1]) + content[1:])
    warnings: list[str] = []
    newest = checkpoints.latest(warnings.append)
    assert newest is not None and newest.step == 1
    assert len(warnings) == 1 and "step-000002" in warnings[0]


def test_one_that_cannot_be_read_is_damaged(tmp_path, monkeypatch):
    """A bad disk, or a run that removes an old checkpoint while `sao export` looks at it."""

    def lost(path):
        raise FileNotFoundError(2, "No such file or directory", str(path))

    make(tmp_path, 1)
    monkeypatch.setattr(checkpoints_module, "_digest", lost)
    assert damage(tmp_path / "checkpoints" / "step-000001") == "learner.pt cannot be read (No such file or directory)"


def test_an_interrupted_one_is_invisible_and_its_leftover_goes(tmp_path):
    checkpoints = make(tmp_path, 1)
    (checkpoints.begin(step_name(2)) / "learner.pt").write_bytes(b"half")
    newest = checkpoints.latest(pytest.fail)
    assert newest is not None and newest.step == 1
    assert list(checkpoints.begin(step_name(2)).iterdir()) == []


def test_only_the_newest_are_kept(tmp_path):
    for step in range(1, 6):
        make(tmp_path, step, keep=2)
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["step-000004", "step-000005"]


def test_another_format_is_refused_by_name(tmp_path):
    checkpoints = make(tmp_path, 1)
    manifest = tmp_path / "checkpoints" / "step-000001" / "manifest.json"
    manifest.write_text(json.dumps(json.loads(manifest.read_text()) | {"format": 99}))
    with pytest.raises(UserError, match="format 99"):
        checkpoints.latest(pytest.fail)


def test_what_a_user_puts_beside_them_is_none_of_ours(tmp_path):
    """A copy named after a checkpoint, or after a stored batch, is neither read nor counted nor removed."""
    make(tmp_path, 4, keep=1)
    folder = tmp_path / "checkpoints"
    shutil.copytree(folder / "step-000004", folder / "step-000004-backup")
    (tmp_path / "trajectories").mkdir()
    for name in ("step-000003.parquet", "step-000009 (copy).parquet"):
        (tmp_path / "trajectories" / name).touch()
    checkpoints = make(tmp_path, 6, keep=1)
    newest = checkpoints.latest(pytest.fail)
    assert newest is not None and newest.step == 6
    assert sorted(path.name for path in folder.iterdir()) == ["step-000004-backup", "step-000006"]
    assert stored_steps(tmp_path) == [3] and saved.batches_done(tmp_path) == 6
    RunStore(tmp_path, 1, keep_all=False).prune()
    assert sorted(path.name for path in (tmp_path / "trajectories").iterdir()) == ["step-000009 (copy).parquet"]


class Exporting:
    """A learner that writes its policy, and its critic unless it is lost before."""

    def __init__(self, weights: bytes, *, lost: bool = False) -> None:
        self.weights, self.lost = weights, lost

    async def export(self, directory: str) -> None:
        for part in ("policy", "critic"):
            if part == "critic" and self.lost:
                raise LearnerFailure("the disk is full")
            (Path(directory) / part).mkdir()
            (Path(directory) / part / "model.safetensors").write_bytes(self.weights)

    async def save(self, directory, buffered) -> None: ...


def test_the_final_one_is_whole_or_as_it_was_before(tmp_path):
    """A run that is extended and dies while it writes the final checkpoint leaves the earlier one, never a policy and a critic of two times."""
    store = RunStore(tmp_path, 2, keep_all=True)
    final = tmp_path / "checkpoints" / FINAL
    asyncio.run(RunCheckpointer(store, Exporting(b"old"), pytest.fail).final({"version": 3, "batches_done": 5}))
    assert damage(final) is None and (saved.final_step(tmp_path), saved.version(final)) == (5, 3)
    with pytest.raises(LearnerFailure):
        asyncio.run(RunCheckpointer(store, Exporting(b"new", lost=True), pytest.fail).final({"version": 6, "batches_done": 8}))
    assert damage(final) is None and {path.read_bytes() for path in final.glob("*/model.safetensors")} == {b"old"}
    assert [path.name for path in final.parent.iterdir()] == [FINAL]
    asyncio.run(RunCheckpointer(store, Exporting(b"new"), pytest.fail).final({"version": 6, "batches_done": 8}))
    assert damage(final) is None and saved.final_step(tmp_path) == 8


def test_a_checkpoint_that_cannot_be_written_is_left_out_unless_it_is_needed(tmp_path):
    """After a roll-back it is: without it a recovery would train again what was undone."""

    class Full:
        async def save(self, directory, buffered):
            raise CheckpointFailure("the disk is full")

    said: list[str] = []
    checkpointer = RunCheckpointer(RunStore(tmp_path, 2, keep_all=True), Full(), said.append)
    asyncio.run(checkpointer.save({"batches_done": 3}, []))
    assert len(said) == 1 and "checkpoint of step 3 failed" in said[0]
    with pytest.raises(CheckpointFailure, match="the disk is full"):
        asyncio.run(checkpointer.save({"batches_done": 3}, [], needed=True))
    assert not list((tmp_path / "checkpoints").iterdir())
