"""What a disk that takes no more, and a folder of another version, say."""

from __future__ import annotations

import errno
import json

import pytest

from sao import resume
from sao.config import Config
from sao.config_yaml import to_yaml
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


def finished(folder, *, steps: int, final: int | None):
    config = Config()
    config.data.path, config.reward.function, config.model.path = str(folder / "tasks.jsonl"), "sao.rewards.builtin:exact_match", str(folder)
    config.train.steps, config.critic.critic_only_steps = 10, 2
    (folder / "config.yaml").write_text(to_yaml(config))
    (folder / "tasks.jsonl").write_text('{"prompt": "a", "answer": "b"}\n')
    (folder / "trajectories").mkdir()
    (folder / f"trajectories/step-{steps - 1:06d}.parquet").touch()
    if final is not None:
        (folder / "checkpoints/final").mkdir(parents=True)
        (folder / "checkpoints/final/state.json").write_text(json.dumps({"batches_done": final}))


def test_a_run_that_has_ended_is_not_started_again_for_nothing(tmp_path):
    finished(tmp_path, steps=12, final=12)
    with pytest.raises(UserError, match=r"its 10 steps are done; set train\.steps higher"):
        resume.load(str(tmp_path), [])
    assert resume.load(str(tmp_path), ["train.steps=11"])[1] == ["train.steps: 10 -> 11"]


def test_a_run_that_has_ended_goes_on_for_the_evaluation_after_training(tmp_path):
    finished(tmp_path, steps=12, final=12)
    (tmp_path / "checkpoints/final/state.json").write_text(json.dumps({"batches_done": 12, "version": 10}))
    with pytest.raises(UserError, match="the run has ended"):
        resume.load(str(tmp_path), [])
    assert resume.load(str(tmp_path), ["eval.at_end=true"])[1] == ["eval.at_end: False -> True"]
    lines = [{"eval": "after", "version": 10, "temperature": t} for t in Config().eval.temperatures]
    (tmp_path / "eval.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    with pytest.raises(UserError, match="the run has ended"):
        resume.load(str(tmp_path), ["eval.at_end=true"])


def test_a_run_is_not_asked_for_fewer_steps_than_it_has_done(tmp_path):
    finished(tmp_path, steps=9, final=None)
    with pytest.raises(UserError, match=r"train\.steps=5 has been passed: 7 are done"):
        resume.load(str(tmp_path), ["train.steps=5"])


@pytest.mark.parametrize("final", [None, 9])
def test_a_run_whose_final_checkpoint_is_missing_or_old_goes_on(tmp_path, final):
    finished(tmp_path, steps=12, final=final)
    assert resume.load(str(tmp_path), [])[1] == []
