"""What a disk that takes no more, and a folder of another version, say."""

from __future__ import annotations

import errno
import json

import pytest

from sao import resume
from sao.config import Config
from sao.config_load import to_yaml
from sao.errors import SystemFailure, UserError
from sao.train import _disk_faults


def test_a_full_disk_ends_the_run_in_one_sentence_with_the_way_on(tmp_path):
    with (
        pytest.raises(SystemFailure, match=rf"metrics.jsonl cannot be written \(No space left on device\).*resume={tmp_path}"),
        _disk_faults(tmp_path),
    ):
        raise OSError(errno.ENOSPC, "No space left on device", str(tmp_path / "metrics.jsonl"))


def test_other_errors_pass_unchanged(tmp_path):
    with pytest.raises(FileNotFoundError), _disk_faults(tmp_path):
        (tmp_path / "nothing").read_text()


@pytest.mark.parametrize("by", ["0.0.7", None])
def test_a_run_of_another_version_is_named_as_such(tmp_path, by):
    (tmp_path / "config.yaml").write_text(to_yaml(Config()) + "\nold_key: 3\n")
    if by:
        (tmp_path / "command.json").write_text(json.dumps({"sao": by}))
    with pytest.raises(UserError, match=rf"started by SAO {by or 'an unknown version'}.*old_key"):
        resume.load(str(tmp_path), [])
