"""A checkpoint is complete or ignored."""

from __future__ import annotations

import json

import pytest

from sao.errors import UserError
from sao.runtime.checkpoints import Checkpoints


def make(folder, step: int, keep: int = 3) -> Checkpoints:
    checkpoints = Checkpoints(folder, keep)
    scratch = checkpoints.begin(step)
    (scratch / "policy").mkdir()
    (scratch / "policy" / "model.safetensors").write_bytes(bytes(range(200)) * 10)
    (scratch / "learner.pt").write_bytes(b"state" * 100)
    checkpoints.commit(scratch, step, {"batches_done": step})
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


def test_an_interrupted_one_is_invisible_and_its_leftover_goes(tmp_path):
    checkpoints = make(tmp_path, 1)
    (checkpoints.begin(2) / "learner.pt").write_bytes(b"half")
    newest = checkpoints.latest(pytest.fail)
    assert newest is not None and newest.step == 1
    assert list(checkpoints.begin(2).iterdir()) == []


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
