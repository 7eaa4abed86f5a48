"""`sao replay` on runs made in this process: bit-equal when nothing was touched, and what was touched is found and named."""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from sao.cli import main
from sao.config import Config, LoggerConfig
from sao.config_yaml import to_yaml
from sao.errors import UserError
from sao.learner.learner import TorchLearner
from sao.replay.roll import replay
from sao.report.metrics import MetricsWriter
from sao.report.steps import step_name
from sao.report.store import TrajectoryWriter, read_trajectories, step_path, write_file
from sao.runtime.actors import LearnerActor
from sao.runtime.checkpoints import Checkpoints
from sao.runtime.lineage import roll_backs, stretch_of, stretches, took_over
from sao.trajectory import EpisodeId
from tests.unit.learner.learner_builders import batch, config, save_model

STEPS = 9


def numbered(step: int):
    return [replace(t, episode_id=EpisodeId(t.episode_id.ordinal + 100 * step)) for t in batch(seed=step, version=0)]


class Run:
    """A run folder as the loop and the learner actor write it, a checkpoint every `every` steps, the newest two kept."""

    def __init__(self, folder: Path, model: str, settings: Config, every: int = 3) -> None:
        self.folder, self.model, self.settings, self.every = folder, model, settings, every
        folder.mkdir()
        (folder / "config.yaml").write_text(to_yaml(settings))
        self.metrics = MetricsWriter(folder, LoggerConfig(wandb="disabled"), {})
        self.writer = TrajectoryWriter(folder)
        self.checkpoints = Checkpoints(folder, keep=2)

    def train(self, first: int, until: int, settings: Config | None = None) -> TorchLearner:
        """One learner process: from the checkpoint of `first` (0: the start) to `until`."""
        settings = settings or self.settings
        learner = TorchLearner(settings, self.model, total_steps=settings.train.steps, check_logprobs=True)
        if first:
            learner.restore(str(self.folder / "checkpoints" / f"step-{first:06d}"))
        took_over(self.folder, first, settings, self.model)
        return self.go_on(learner, first, until)

    def go_on(self, learner: TorchLearner, first: int, until: int) -> TorchLearner:
        for step in range(first, until):
            version, trajectories = learner.version, numbered(step)
            report = learner.step(trajectories, step)
            self.writer.write(step, trajectories, report.records, version)
            self.metrics.log("train", step, report.metrics)
            if (step + 1) % self.every == 0:
                self.keep(learner, step + 1)
        return learner

    def keep(self, learner: TorchLearner, done: int) -> None:
        scratch = self.checkpoints.begin(step_name(done))
        learner.save(str(scratch))
        self.checkpoints.commit(scratch, {"version": learner.version, "batches_done": done})


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    return save_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def whole(tmp_path_factory, model) -> Path:
    """Nine steps, the critic alone in the first two; checkpoints 6 and 9 are there, 3 was removed; and the final export."""
    folder = tmp_path_factory.mktemp("runs") / "whole"
    learner = Run(folder, model, config(critic__critic_only_steps=2, algo__whiten="auto", optim__policy__schedule="cosine")).train(0, STEPS)
    learner.export(str(folder / "checkpoints" / "final"))
    (folder / "checkpoints" / "final" / "state.json").write_text(json.dumps({"version": learner.version, "batches_done": STEPS}))
    return folder


@pytest.fixture
def copy(whole, tmp_path) -> Path:
    shutil.copytree(whole, tmp_path / "copy")
    return tmp_path / "copy"


@pytest.mark.parametrize(
    ("step", "start", "rolled", "weights"),
    [
        (0, "the initial weights", 0, []),
        (5, "the initial weights", 5, ["step-000006"]),
        (6, "checkpoint step-000006", 0, []),
        (7, "checkpoint step-000006", 1, []),
        (8, "checkpoint step-000006", 2, ["step-000009", "final"]),
    ],
)
def test_every_step_comes_out_the_same_from_the_nearest_checkpoint(whole, step, start, rolled, weights):
    result = replay(whole, step)
    assert result.found.bit_equal, result.found.first
    assert (result.start, len(result.steps) - 1, result.weights) == (start, rolled, weights)
    stored = [e for s in result.steps for e in read_trajectories(whole, [s])]
    assert result.found.tokens == sum(e.trajectory.action_tokens for e in stored) > 0
    for name in ("returns", "values", "advantages", "trainer_logprobs"):
        assert result.found.tallies[name].compared == result.found.tokens
    assert result.found.tallies["metrics"].compared > 20 * len(result.steps)
    assert result.found.notes == []
    assert ("policy weights" in result.found.tallies) == bool(weights)


def flip(run: Path, step: int, column: str) -> tuple[str, int]:
    """Change the last bit of the first recorded number of `column` in the middle of a step's file; its episode and position."""
    stored = read_trajectories(run, [step])
    chosen = stored[len(stored) // 2]
    record = chosen.records[0]
    array = getattr(record, column).copy()
    at = int(np.flatnonzero(chosen.trajectory.segments[0].action_mask)[1])
    if array.dtype == np.uint8:
        array[at] = 3
    else:
        array.view(np.uint32)[at] ^= 1
    records = [r if r is not record else replace(record, **{column: array}) for e in stored for r in e.records]
    write_file(step_path(run, step), step, [e.trajectory for e in stored], records, chosen.trained_at_version)
    return str(record.episode_id), at


@pytest.mark.parametrize("column", ["values", "returns", "advantages", "trainer_logprobs", "mask_reason"])
def test_one_flipped_number_of_the_record_is_found_and_named(copy, column):
    episode, at = flip(copy, 7, column)
    found = replay(copy, 7).found
    assert not found.bit_equal and {name: t.differ for name, t in found.tallies.items() if t.differ} == {column: 1}
    first = found.first
    assert (first.step, first.what, first.where) == (7, column, f"episode {episode}, segment 0, token {at}")
    assert first == found.largest and first.recorded != first.replayed
    assert replay(copy, 6).found.bit_equal


def test_one_flipped_metric_is_found_and_named(copy):
    lines = (copy / "metrics.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    records[7]["critic/grad_norm"] += 1e-15 * records[7]["critic/grad_norm"]
    (copy / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))
    found = replay(copy, 8).found
    assert (found.first.step, found.first.what) == (7, "metric critic/grad_norm") and found.tallies["metrics"].differ == 1


def sign(checkpoint: Path) -> None:
    """Make the manifest that of the files as they are now: what another arithmetic, not the disk, would have left."""
    scratch = checkpoint.rename(checkpoint.with_name(f".making-{checkpoint.name}"))
    (scratch / "manifest.json").unlink()
    Checkpoints(checkpoint.parents[1], keep=9).commit(scratch, json.loads((scratch / "state.json").read_text()))


@pytest.mark.parametrize("part", ["policy", "critic"])
def test_one_flipped_weight_is_found_and_named(copy, part):
    path = copy / "checkpoints" / "step-000009" / part / "model.safetensors"
    tensors = load_file(path)
    name = sorted(n for n in tensors if tensors[n].ndim == 2)[0]
    tensors[name].view(torch.int32)[1, 2] ^= 1
    save_file(tensors, path, metadata={"format": "pt"})
    sign(copy / "checkpoints" / "step-000009")
    found = replay(copy, 8).found
    columns = tensors[name].shape[1]
    assert (found.first.what, found.first.where) == (f"{part} weights", f"{name}, element {columns + 2}")
    assert sum(t.differ for t in found.tallies.values()) == 1


def test_a_flipped_token_departs_where_it_is_first_used(copy):
    """Damage to what was trained on shows in everything computed from it, at the step it belongs to and not before."""
    stored = read_trajectories(copy, [7])
    segment = stored[0].trajectory.segments[0]
    ids = segment.token_ids.copy()
    ids[0] = (ids[0] + 1) % 41
    changed = replace(stored[0].trajectory, segments=(replace(segment, token_ids=ids),))
    write_file(step_path(copy, 7), 7, [changed, *(e.trajectory for e in stored[1:])], [r for e in stored for r in e.records], 5)
    found = replay(copy, 8).found
    assert found.first.step == 7 and found.first.what == "values"
    assert found.tallies["trainer_logprobs"].differ > 0 and found.tallies["policy weights"].differ > 0


def test_a_damaged_checkpoint_is_not_started_from(copy):
    state = copy / "checkpoints" / "step-000006" / "learner.pt"
    state.write_bytes(state.read_bytes()[:-1] + b"x")
    said: list[str] = []
    result = replay(copy, 7, said.append)
    assert result.start == "the initial weights" and result.found.bit_equal
    assert "step-000006 is not used: learner.pt is not what was written" in said[0]


@pytest.mark.parametrize("file", ["policy/model.safetensors", "learner.pt", "critic/model.safetensors", "manifest.json"])
@pytest.mark.parametrize("how", ["cut", "gone"])
def test_a_damaged_checkpoint_is_not_compared_with(copy, file, how):
    path = copy / "checkpoints" / "step-000009" / file
    if how == "cut":
        path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    else:
        path.unlink()
    result = replay(copy, 8)
    assert result.found.bit_equal and result.weights == ["final"]
    assert result.found.notes[0].startswith("checkpoint step-000009 is not compared: ")
    shutil.rmtree(copy / "checkpoints" / "final" / "critic")
    result = replay(copy, 8)
    assert result.weights == [] and "checkpoint final is not compared: critic is missing" in result.found.notes[1]


def test_a_run_that_was_resumed_with_another_rate_and_one_that_lost_its_learner(tmp_path, model):
    """Each stretch of the surviving lineage is trained under its own configuration, also where the checkpoint between them is gone."""
    settings = config(train__steps=6, optim__policy__schedule="linear")
    run = Run(tmp_path / "run", model, settings)
    run.train(0, 5)  # killed after step 4; the checkpoint of step 3 is the newest
    slower = config(train__steps=STEPS, optim__policy__schedule="linear", optim__policy__lr=1e-3)
    run.train(3, 8, slower)  # resumed, asked for more steps, at another rate
    run.train(6, STEPS, slower)  # the learner was lost after step 7
    assert [s.first_step for s in stretches(run.folder)] == [0, 3, 6]
    assert stretch_of(stretches(run.folder), 4).config.train.steps == STEPS and stretch_of(stretches(run.folder), 2).config.train.steps == 6
    assert (run.folder / "checkpoints" / "step-000006").exists() and not (run.folder / "checkpoints" / "step-000003").exists()
    for step in (2, 4, 8):
        result = replay(run.folder, step)
        assert result.found.bit_equal, result.found.first
    shutil.rmtree(run.folder / "checkpoints" / "step-000006")
    result = replay(run.folder, 7)
    assert result.start == "the initial weights" and result.found.bit_equal, result.found.first
    (run.folder / "learner.jsonl").unlink()
    (run.folder / "config.yaml").write_text(to_yaml(slower))
    (run.folder / "command.json").write_text(json.dumps({"model": model}))
    result = replay(run.folder, 4)
    assert not result.found.bit_equal and result.found.first.step == 0, "without the record the first rate would not be known"
    assert "kept no record" in result.found.notes[0]


def test_a_roll_back_is_not_rolled_through(copy):
    """A learner that took up older weights trains on from a checkpoint, not from the step before."""
    first = stretches(copy)[0]
    took_over(copy, 7, first.config, first.model, back_to=1)
    assert roll_backs(copy) == [7]
    with pytest.raises(UserError, match="comes after a roll-back before step 7, and no checkpoint made since is left"):
        replay(copy, 8)
    assert replay(copy, 6).found.bit_equal
    took_over(copy, 6, first.config, first.model)
    assert roll_backs(copy) == [], "a resume from before it has undone the roll-back"


def test_what_a_roll_back_undid_is_not_compared_with_what_was_saved_after_it(tmp_path, model):
    """Four steps, the last undone: the checkpoint after it holds the weights of version 3 as version 4; two more steps follow."""
    run = Run(tmp_path / "run", model, config(), every=1)
    learner = run.train(0, 4)
    actor = object.__new__(LearnerActor)  # without the process it sets up
    actor.learner, actor.config, actor.model_path, actor.run_dir = learner, run.settings, model, run.folder
    actor.go_back(str(run.folder / "checkpoints" / "step-000003"), 4, 4)
    assert actor.took_over and learner.version == 4, "its next step begins no other stretch"
    run.keep(learner, 4)
    run.go_on(learner, 4, 6)
    assert roll_backs(run.folder) == [4]
    undone = replay(run.folder, 3)
    assert undone.found.bit_equal and undone.weights == [] and "a roll-back undid step 3" in undone.found.notes[0]
    after = replay(run.folder, 5)
    assert after.found.bit_equal and after.weights == ["step-000006"]


def test_another_machine_is_named(copy):
    lines = [json.loads(line) for line in (copy / "learner.jsonl").read_text().splitlines()]
    lines[0]["made_on"] |= {"torch": "1.0", "threads": 48}
    (copy / "learner.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    notes = replay(copy, 6).found.notes
    assert [note.split(":")[0] for note in notes] == ["torch", "threads"] and "the run had 48, here it is 1" in notes[1]


def test_what_cannot_be_replayed_is_refused_in_a_sentence(copy, tmp_path):
    empty = tmp_path / "empty"
    empty.mkdir()
    (empty / "config.yaml").write_text(to_yaml(config()))
    for folder, step, message in ((empty, 0, "holds no stored trajectories"), (copy, 99, "--step 99 is not stored in .*; it has steps 0 to 8")):
        with pytest.raises(UserError, match=message):
            replay(folder, step)
    (copy / "learner.jsonl").write_text((copy / "learner.jsonl").read_text().replace(stretches(copy)[0].model, "/nowhere"))
    with pytest.raises(UserError, match="the model this run started from, /nowhere, is not there any more"):
        replay(copy, 2)
    assert replay(copy, 6).found.bit_equal, "a checkpoint holds all that its steps need"
    write_file(step_path(copy, 6), 6, numbered(6))
    with pytest.raises(UserError, match="stored without the per-token training record"):
        replay(copy, 6)
    os.remove(step_path(copy, 6))
    with pytest.raises(UserError, match="needs the batches from step 6 on, and that of step 6 is not stored"):
        replay(copy, 7)
    (copy / "learner.jsonl").write_text('{"first_step": 0}\n')
    with pytest.raises(UserError, match=r"was made by SAO an unknown version, this is .*, and a line of learner\.jsonl has no 'config'"):
        replay(copy, 7)


def test_the_command_prints_both_forms_and_its_code_says_which(copy, capsys, monkeypatch):
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        monkeypatch.setenv(name, "1")  # the command sets them
    assert main(["replay", str(copy), "--step", "8"]) == 0
    out = capsys.readouterr().out
    assert "step 8, from checkpoint step-000006 over 2 steps before it" in out
    assert "bit-equal: " in out and "the weights of step-000009 and final" in out
    flip(copy, 8, "values")
    assert main(["replay", str(copy), "--step", "8"]) == 1
    assert "NOT bit-equal; it first departs at step 8, values of episode 803.0, segment 0, token" in capsys.readouterr().out
    assert main(["replay", str(copy), "--step", "8", "--json"]) == 1
    told = json.loads(capsys.readouterr().out)
    assert told["bit_equal"] is False and told["first"]["what"] == "values" and told["quantities"]["values"]["differ"] == 1
    assert told["steps"] == [6, 7, 8] and told["weights"] == ["step-000009", "final"]
    assert main(["replay", str(copy), "--step", "99"]) == 2
    assert capsys.readouterr().err.count("\n") == 1
