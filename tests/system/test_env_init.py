"""What `sao env init` writes trains as it is, on real Ray and vLLM."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.system


def sao(*arguments: str, cwd: Path, timeout: float = 500) -> str:
    done = subprocess.run([sys.executable, "-m", "sao.cli", *arguments], cwd=cwd, capture_output=True, text=True, timeout=timeout)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def held_out(run: Path) -> dict[str, float]:
    """Mean reward of each evaluation, by its name."""
    return {row["eval"]: row["mean"] for row in map(json.loads, (run / "eval.jsonl").read_text().splitlines())}


def test_a_few_steps_of_a_new_environment(tmp_path):
    sao("env", "init", "my_game", cwd=tmp_path)
    sao("train", "env=my_game", "train.steps=6", "train.batch_size=8", "critic.critic_only_steps=1", "eval.at_start=false", "eval.tasks=16",
        "run.dir=run", "run.progress=plain", "logger.wandb=disabled", f"warmstart.cache_dir={tmp_path}/cache", cwd=tmp_path)  # fmt: skip
    run = tmp_path / "run"
    ledger = json.loads((run / "ledger.json").read_text())
    assert ledger["closes"] and ledger["prompts"]["trained"] == 7 * 8
    assert (run / "report.html").stat().st_size > 0 and (run / "checkpoints/final/policy/model.safetensors").exists()


@pytest.mark.long
def test_a_new_environment_is_learned_within_minutes(tmp_path):
    sao("env", "init", "my_game", cwd=tmp_path)
    sao("train", "env=my_game", "run.dir=run", "run.progress=plain", "logger.wandb=disabled", f"warmstart.cache_dir={tmp_path}/cache", cwd=tmp_path)
    found = held_out(tmp_path / "run")
    assert found["before"] < 0.8 and found["after"] > found["before"] + 0.15
