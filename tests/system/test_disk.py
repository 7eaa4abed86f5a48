"""A disk that is full, for real: on a small file system in a mount namespace of its own."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys

import pytest

from tests.system.faults import ROOT, account
from tests.system.scripted_run import options

pytestmark = pytest.mark.system


@pytest.fixture(scope="module")
def small_disk(tmp_path_factory):
    """What four runs on it said, by name, with their exit codes, and the folder they were in."""
    root = tmp_path_factory.mktemp("disk")
    disk, out = root / "disk", root / "out"
    disk.mkdir()
    out.mkdir()
    if shutil.which("unshare") is None:
        pytest.skip("there is no unshare here")
    command = ["unshare", "--user", "--map-root-user", "--mount", str(ROOT / "tests/system/full_disk.sh"), str(disk), str(out), sys.executable]
    done = subprocess.run(
        [*command, *options(root, steps=24)], cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=500
    )
    if not (out / "checkpoint.code").exists():
        pytest.skip(f"no file system can be mounted here: {done.stderr.strip()[-200:]}")
    names = ("checkpoint", "full", "readonly", "end")
    said = {name: (int((out / f"{name}.code").read_text()), (out / f"{name}.log").read_text()) for name in names}
    return said, out / "run"


def test_no_room_for_a_checkpoint_is_said_and_the_run_goes_on(small_disk):
    said, _ = small_disk
    code, text = said["checkpoint"]
    assert re.search(r"checkpoint of step \d+ failed, the run goes on with the one before it: .*No space left on device", text), text
    assert code == 1 and re.search(r"failed: .*checkpoints/\.making-final\S* cannot be written.*sao train resume=", text), text
    assert "Traceback" not in text


def test_no_room_at_all_ends_the_run_in_one_sentence(small_disk):
    said, _ = small_disk
    code, text = said["full"]
    assert code == 1 and re.search(r"failed: .*cannot be written.*No space left on device.*sao train resume=", text), text
    assert "Traceback" not in text


def test_a_read_only_folder_is_refused(small_disk):
    said, _ = small_disk
    code, text = said["readonly"]
    assert code == 2 and "cannot be written (Read-only file system)" in text, text


def test_with_room_again_it_goes_on_and_nothing_is_lost(small_disk):
    said, folder = small_disk
    code, text = said["end"]
    assert code == 0, text
    found = account(folder)
    assert found["closes"] and found["doubled"] == found["lost"] == found["steps_missing"] == 0, found
    assert found["trained"] == found["trained_by_store"] == 8 * 41, found
