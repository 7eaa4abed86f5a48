"""A critic fitted on rollouts of the frozen policy, and what a run makes of it; losses on the way are told from the run folder."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from sao.report.dropped import read_dropped, read_tokens
from sao.report.store import read_trajectories
from tests.system.faults import Run
from tests.system.scripted_run import options

pytestmark = pytest.mark.system
STEPS = 6


def explained(folder: Path) -> list[float | None]:
    rows = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [row.get("critic/vf_explained_var") for row in rows if row["axis"] == "train"]


def run(root: Path, name: str, *more: str) -> Path:
    started = Run([*options(root, steps=STEPS), f"run.dir={root / name}", *more], root / name, scripted=True, log=root / f"{name}.log")
    assert started.wait() == 0, started.log.read_text()
    return root / name


def test_a_critic_is_fitted_first_and_taken_over(tmp_path):
    fitted = run(tmp_path, "critic", "run.phase=critic", "critic.critic_only_steps=0")
    assert {episode.trained_at_version for episode in read_trajectories(fitted)} == {0}, "the policy was frozen"
    critic = fitted / "checkpoints/final/critic"
    after = run(tmp_path, "rl", f"critic.path={critic}", "critic.critic_only_steps=0", "algo.values=before")
    first = read_trajectories(after, [0])[0].records[0]
    assert first is not None
    mask = first.mask_reason != 0
    assert np.abs(first.values[mask]).min() > 0, "a fresh critic would read 0 before its first step"
    assert first.mask_reason[mask].max() == 1 and explained(after)[0] is not None
    state = json.loads((after / "checkpoints/final/state.json").read_text())
    assert state == {"version": STEPS, "batches_done": STEPS}


def flaky(completion: str, row: dict) -> float:
    """Not a number for one task in five, at every attempt."""
    return float("nan") if int(row["answer"]) % 5 == 0 else 1.0


def test_what_failed_is_in_the_folder_with_its_tokens(tmp_path):
    folder = run(tmp_path, "flaky", "reward=tests.system.test_critic_phase:flaky", "data.shuffle=false", "critic.critic_only_steps=0")
    ledger = json.loads((folder / "ledger.json").read_text())
    losses = read_dropped(folder)
    dropped = [loss for loss in losses if not loss.retried]
    assert ledger["closes"] and len(dropped) == sum(ledger["prompts"]["dropped"].values()) > 0
    assert len(losses) - len(dropped) == sum(ledger["prompts"]["retried"].values()) > 0
    assert sum(loss.tokens for loss in losses) == sum(ledger["tokens"]["dropped"].values()) > 0
    for loss in losses:
        assert loss.reason.startswith("reward") and "nan" in loss.message
        stored = read_tokens(folder, loss)
        assert stored is not None and stored.trajectory.sampled_tokens == loss.tokens and stored.trajectory.finish.detail == loss.reason
