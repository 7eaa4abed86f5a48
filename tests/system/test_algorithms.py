"""Algorithms through whole commands, on the scripted engine: a loss and an advantage of a user's module, and groups that stop and go on."""

from __future__ import annotations

import os
import subprocess
import sys

import pyarrow.parquet as pq
import pytest

from sao.report.metrics import read_metrics
from sao.report.store import read_trajectories, step_path, stored_steps
from tests.system.faults import FOLDER_MARK, ROOT, account
from tests.system.scripted_run import options

pytestmark = pytest.mark.system

OWN = '''
import torch
from sao.algorithms.catalogue import needs
from sao.algorithms.policy_loss import TokenLoss, terms_of


@needs("old")
def flat(inputs, *, scale=1.0):
    """The policy gradient, scaled, over tokens whose old log-prob is known."""
    assert torch.isfinite(inputs.old[inputs.mask]).all()
    terms = terms_of(inputs)
    none = torch.zeros_like(terms.counted)
    return TokenLoss(-(scale * terms.advantages * terms.logprobs).sum(), terms.counted, terms.counted, none, none, terms.log_ratio)


def median(outcomes, state):
    return outcomes.rewards - outcomes.rewards.median(), {"batches": state.get("batches", 0) + 1}
'''


def train(folder, *arguments: str, path: str = "") -> str:
    environment = os.environ | {FOLDER_MARK: str(folder), "PYTHONPATH": os.pathsep.join(filter(None, (str(ROOT), path)))}
    command = [sys.executable, "-m", "tests.system.scripted_run", "train", *arguments]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


def plain(folder, **changes: int) -> list[str]:
    """The scripted run's options without its wide DIS band, which other losses do not read, and with a report."""
    return [text for text in options(folder, **changes) if not text.startswith(("algo.", "logger.report"))]


def test_a_users_loss_and_advantage_train_a_run(tmp_path):
    modules = tmp_path / "elsewhere"
    modules.mkdir()
    (modules / "my_method.py").write_text(OWN)
    folder = tmp_path / "run"
    own = ["algo.loss=my_method:flat", "algo.loss_args.scale=0.5", "algo.advantage=my_method:median", "algo.name=mine"]
    train(folder, *plain(tmp_path, steps=3, staleness=1), *own, f"run.dir={folder}", path=str(modules))
    rows = [row for row in read_metrics(folder) if row["axis"] == "train"]
    assert len(rows) == 3, "no critic, so no critic-only steps"
    assert not any(key.startswith("critic/") for row in rows for key in row)
    assert any(row["actor/grad_norm"] > 0 for row in rows)
    final = folder / "checkpoints" / "final"
    assert (final / "policy" / "model.safetensors").exists() and not (final / "critic").exists()
    assert account(folder)["closes"]


def test_groups_train_whole_stop_and_go_on(tmp_path):
    folder = tmp_path / "run"
    wide = ["algo=grpo_dis", "rollout.rollouts_per_prompt=4", "algo.eps_low=1.0", "algo.eps_high=1e9", "data.pool=6"]
    train(folder, *plain(tmp_path, steps=3, staleness=1), *wide, f"run.dir={folder}")
    train(folder, f"resume={folder}", "train.steps=6")
    assert stored_steps(folder) == list(range(6))
    found = account(folder)
    assert found["closes"] and found["trained"] == found["trained_by_store"] == 6 * 8
    tasks, ordinals = set(), set()
    for step in range(6):
        by_group: dict[int, set[str]] = {}
        for episode in read_trajectories(folder, [step]):
            ordinal = episode.trajectory.episode_id.ordinal
            ordinals.add(ordinal)
            by_group.setdefault(ordinal // 4, set()).add(episode.trajectory.task_id)
        assert len(by_group) == 2 and all(len(names) == 1 for names in by_group.values())
        tasks |= set.union(*by_group.values())
    assert len(tasks) <= 6 and len(ordinals) == 6 * 8, "a pool's task comes again, an episode does not"
    values = pq.read_table(step_path(folder, 0), columns=["values"])["values"].to_pylist()
    assert all(value != value for row in values for value in row), "without a critic there are no values"
    assert (folder / "report.html").stat().st_size > 10_000
    shown = subprocess.run(
        [sys.executable, "-m", "sao.cli", "inspect", str(folder), "--step", "0"], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert shown.returncode == 0, shown.stderr
