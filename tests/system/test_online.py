"""`sao online` on real Ray, vLLM and torch: across a change of the rewarded style, and with an update that is poisoned."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

pytestmark = pytest.mark.system
ROOT = Path(__file__).resolve().parents[2]
SMALL = [
    "experiment=style_stream", "train.batch_size=8", "critic.critic_only_steps=1", "warmstart.steps=120", "eval.tasks=12", "eval.at_start=false",
    "run.progress=plain", "logger.wandb=disabled",
]  # fmt: skip


def rows(run: Path, axis: str) -> list[dict]:
    return [r for r in map(json.loads, (run / "metrics.jsonl").read_text().splitlines()) if r["axis"] == axis]


def start(module: str, folder: Path, *overrides: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", module, "online", *SMALL, f"run.dir={folder}", f"warmstart.cache_dir={folder.parent}/cache", *overrides]
    return subprocess.run(command, cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT)} | environment, capture_output=True, text=True, timeout=500)


def inspect(run: Path, *arguments: str) -> str:
    return subprocess.run(
        [sys.executable, "-m", "sao.cli", "inspect", str(run), *arguments], cwd=ROOT, check=True, capture_output=True, text=True
    ).stdout


def test_a_stream_that_changes_with_every_version_checked_before_it_serves(tmp_path):
    run = tmp_path / "run"
    phases = "[{name: cute, start: 0, args: {style: cute}}, {name: chuunibyou, start: 48, args: {style: chuunibyou}}]"
    done = start("sao.cli", run, "train.steps=11", f"online.phases={phases}", "eval.every=5", "online.shadow_drop=0.9", "online.shadow_tasks=6")
    assert done.returncode == 0, done.stdout + done.stderr
    ledger = json.loads((run / "ledger.json").read_text())
    assert ledger["closes"] and {name: w["trained"] for name, w in ledger["workloads"].items()} == {"cute": 48, "chuunibyou": 48}
    evals = [json.loads(line) for line in (run / "eval.jsonl").read_text().splitlines()]
    assert [e["version"] for e in evals] == [5, 10] and all(set(e["by_workload"]) == {"cute", "chuunibyou"} for e in evals)
    shadows = [r for r in rows(run, "eval") if "eval/shadow/mean" in r]
    assert [r["step"] for r in shadows] == list(range(1, 12)) and all(r["eval/shadow/passed"] for r in shadows)
    assert [r["step"] for r in rows(run, "publish")] == list(range(1, 12))
    assert max(r["off_policy/staleness_max"] for r in rows(run, "train")) <= 2
    gaps = [r["logprob_gap/same_version_max"] for r in rows(run, "train") if "logprob_gap/same_version_max" in r]
    assert gaps and max(gaps) <= 5e-4  # turns that were handed back for a shadow evaluation went on under weights the trainer knows
    assert "cute -> chuunibyou" in done.stdout and "The stream" in (run / "report.html").read_text()


@pytest.mark.parametrize(
    ("guard", "counted"),
    [
        pytest.param(["online.shadow_drop=0.5", "online.shadow_tasks=16"], "online/refused", id="shadow"),
        pytest.param(["online.rollback_fall=0.5", "online.rollback_window=16"], "online/rolled_back", id="fall", marks=pytest.mark.long),
    ],
)
def test_a_poisoned_update_is_undone(tmp_path, guard, counted):
    run = tmp_path / "run"
    steps = ["train.steps=16", "eval.every=0", "reward=tests.system.poisoned_run:fluent", "checkpoint.every=0"]
    done = start("tests.system.poisoned_run", run, *steps, *guard, POISON_STEP="8")
    assert done.returncode == 0, done.stdout + done.stderr
    train = rows(run, "train")
    assert train[-1][counted] == 1.0 and train[-1]["train/version"] == 16
    ledger = json.loads((run / "ledger.json").read_text())
    assert ledger["closes"] and ledger["prompts"]["dropped"]["rolled_back"] > 0
    assert inspect(run, "--dropped").count("rolled_back") >= ledger["prompts"]["dropped"]["rolled_back"]
    assert (run / "checkpoints/good/policy/model.safetensors").exists() and list((run / "checkpoints").glob("step-*"))
    rewards = [r["reward/mean"] for r in train]
    assert np.mean(rewards[-3:]) > 0.4  # noise pleases the judge never
    gaps = [r["logprob_gap/same_version_max"] for r in train if "logprob_gap/same_version_max" in r]
    assert gaps and max(gaps) <= 5e-4  # engine and trainer mean the same weights by every number
    if counted == "online/refused":
        assert min(rewards) > 0.2  # nothing was ever sampled under the poisoned weights
        assert [r["step"] for r in rows(run, "eval") if r.get("eval/shadow/passed") == 0.0] == [8]
