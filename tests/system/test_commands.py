"""Whole commands as a user types them, on real Ray and vLLM, at the smallest size that still does everything."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

pytestmark = pytest.mark.system

SMALL = [
    "experiment=demo", "warmstart.steps=40", "train.steps=4", "train.batch_size=8", "critic.critic_only_steps=1", "rollout.staleness=2",
    "eval.tasks=8", "run.progress=plain", "engine.max_num_seqs=16",
]  # fmt: skip


def sao(*arguments: str, cwd: Path, timeout: float = 500) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "sao.cli", *arguments], cwd=cwd, capture_output=True, text=True, timeout=timeout)


def alive(pids: list[int]) -> list[int]:
    return [pid for pid in pids if psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE]


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Path:
    """One small run of the demo, shared by the tests that look at its folder."""
    root = tmp_path_factory.mktemp("project")
    done = sao("train", *SMALL, "eval.every=2", "run.dir=run", f"warmstart.cache_dir={root}/cache", cwd=root)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "warm start" in done.stdout and "held-out after" in done.stdout
    return root / "run"


def rows(run: Path, axis: str) -> list[dict]:
    return [r for r in map(json.loads, (run / "metrics.jsonl").read_text().splitlines()) if r["axis"] == axis]


def test_the_run_folder_is_complete(trained):
    for name in (
        "config.yaml",
        "plan.txt",
        "actors.json",
        "metrics.jsonl",
        "ledger.json",
        "eval.jsonl",
        "report.html",
        "logs/driver.log",
        "logs/engine-0.log",
    ):
        assert (trained / name).stat().st_size > 0, name
    assert (trained / "checkpoints/final/policy/model.safetensors").exists()
    assert (trained / "checkpoints/final/critic").is_dir()
    assert len(list((trained / "trajectories").glob("*.parquet"))) == 5
    assert any((trained / "wandb").rglob("*.wandb"))


def test_the_ledger_closes_and_the_bound_held(trained):
    ledger = json.loads((trained / "ledger.json").read_text())
    assert ledger["closes"] and ledger["prompts"]["trained"] == 40 and ledger["prompts"]["running"] == 0
    assert max(r["off_policy/staleness_max"] for r in rows(trained, "train")) <= 2
    assert [r["train/version"] for r in rows(trained, "train")] == [0, 1, 2, 3, 4]


def test_engine_and_trainer_agree(trained):
    gaps = [
        (r["logprob_gap/same_version_mean"], r["logprob_gap/same_version_max"])
        for r in rows(trained, "train")
        if "logprob_gap/same_version_mean" in r
    ]
    assert gaps and max(mean for mean, _ in gaps) <= 2e-5 and max(largest for _, largest in gaps) <= 5e-4
    published = rows(trained, "publish")
    assert [r["step"] for r in published] == [1, 2, 3, 4]
    assert max(r["publish/canary_gap"] for r in published) <= 5e-4
    assert rows(trained, "engine")[-1]["engine/aborted_requests"] == 0


def test_every_sampled_token_carries_version_and_logprob(trained):
    import numpy as np

    from sao.report.store import read_trajectories

    for episode in read_trajectories(trained):
        for segment in episode.trajectory.segments:
            assert (segment.versions[segment.action_mask] >= 0).all()
            assert np.isfinite(segment.logprobs[segment.action_mask]).all()


def test_no_process_is_left(trained):
    pids = [entry["pid"] for entry in json.loads((trained / "actors.json").read_text()).values()]
    deadline = time.monotonic() + 5
    while alive(pids) and time.monotonic() < deadline:
        time.sleep(0.2)
    assert not alive(pids)


def test_inspect_and_report_read_it(trained):
    shown = sao("inspect", str(trained), cwd=trained.parent)
    assert shown.returncode == 0 and "calculator" in shown.stdout, shown.stderr
    assert sao("report", str(trained), cwd=trained.parent).returncode == 0
    assert sao("inspect", str(trained.parent), cwd=trained.parent).returncode == 2


def evaluations(run: Path) -> list[tuple[str, int, float]]:
    return [(r["eval"], r["version"], r["temperature"]) for r in map(json.loads, (run / "eval.jsonl").read_text().splitlines())]


def test_a_run_evaluates_before_while_and_after_it_trains(trained):
    """The last version is a multiple of eval.every too; the evaluation after training has it."""
    assert evaluations(trained) == [(name, version, t) for name, version in (("before", 0), ("during", 2), ("after", 4)) for t in (1.0, 0.0)]
    assert [r["step"] for r in rows(trained, "eval") if "eval/during_t1/mean" in r] == [2]
    held = [r["timing_s/held_by_eval"] for r in rows(trained, "train")]
    assert held[0] == held[2] == 0.0 and held[1] > 0  # step 0 fits the critic; step 1 publishes version 1, which waits for `before`


def test_a_checkpoint_is_evaluated_and_exported(trained):
    """Greedy answers of the checkpoint are those of the weights that were in the engine when the run ended."""
    ledger = (trained / "ledger.json").read_bytes()
    done = sao("eval", f"run={trained}", "n=2", "tasks=8", "temperature=0", cwd=trained.parent)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "mean@2" in done.stdout
    result = json.loads((trained / "evals/final-calculator-t0-n2.json").read_text())
    after = json.loads((trained / "eval.jsonl").read_text().splitlines()[-1])
    assert (after["eval"], after["temperature"]) == ("after", 0.0) and result["mean"] == after["mean"]
    assert result["episodes"] == 16 and [len(p["rewards"]) for p in result["problems"]] == [2] * 8
    actors = json.loads((trained / "evals/final-calculator-t0-n2/actors.json").read_text())
    assert set(actors) == {"driver", "engine-0", "worker-0"}
    assert not alive([entry["pid"] for entry in actors.values()])
    assert (trained / "ledger.json").read_bytes() == ledger

    done = sao("export", f"run={trained}", "to=exported", cwd=trained.parent)
    assert done.returncode == 0, done.stderr
    from transformers import AutoModelForCausalLM, AutoTokenizer

    AutoModelForCausalLM.from_pretrained(trained.parent / "exported/policy")
    AutoTokenizer.from_pretrained(trained.parent / "exported/policy")
    assert (trained.parent / "exported/critic").is_dir()


def test_an_evaluation_that_is_killed_leaves_nothing_behind_and_can_be_asked_for_again(trained):
    asked = ["eval", f"run={trained}", "n=2", "tasks=12", "temperature=0"]
    folder = trained / "evals/final-calculator-t0-n2-2"  # the first of this title is the test's before
    process = subprocess.Popen([sys.executable, "-m", "sao.cli", *asked], cwd=trained.parent, stdout=subprocess.DEVNULL)
    deadline = time.monotonic() + 200
    while not (folder / "actors.json").exists() and time.monotonic() < deadline:
        time.sleep(0.1)
    pids = [entry["pid"] for entry in json.loads((folder / "actors.json").read_text()).values()]
    process.kill()
    process.wait()
    deadline = time.monotonic() + 5
    while alive(pids) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not alive(pids) and not folder.with_suffix(".json").exists()
    assert sao(*asked, cwd=trained.parent).returncode == 0
    assert (trained / "evals/final-calculator-t0-n2-3.json").exists()


@pytest.mark.long
def test_a_lent_replica_evaluates_while_the_other_trains(trained, tmp_path):
    done = sao("train", *SMALL, "engine.replicas=2", "launcher.oversubscribe=true", "eval.placement=replica", "eval.every=2", "eval.at_end=false",
               "eval.temperatures=[1.0]", "run.dir=run", f"warmstart.cache_dir={trained.parent}/cache", cwd=tmp_path)  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    run = tmp_path / "run"
    missed = [r["step"] for r in rows(run, "eval") if "eval/missed" in r]
    evaluated = [version for _, version, _ in evaluations(run)]
    assert evaluated[0] == 0 and sorted(evaluated + missed) == [0, 2, 4]
    assert all(r["failed"] == 0 for r in map(json.loads, (run / "eval.jsonl").read_text().splitlines()))
    assert all(r["timing_s/held_by_eval"] == 0.0 for r in rows(run, "train"))
    assert min(r["publish/engines"] for r in rows(run, "publish")) == 1  # a publication passed the lent engine by
    assert rows(run, "engine")[-1]["engine/aborted_requests"] == 0
    assert json.loads((run / "ledger.json").read_text())["closes"]
    assert max(r["off_policy/staleness_max"] for r in rows(run, "train")) <= 2


@pytest.mark.long
def test_a_sweep_runs_every_combination(trained, tmp_path):
    done = sao("train", "-m", *SMALL, "train.steps=1", "critic.critic_only_steps=0", "eval.at_start=false", "eval.at_end=false", "rollout.staleness=0,1",
               f"warmstart.cache_dir={trained.parent}/cache", cwd=tmp_path)  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert "2 of 2 runs ended well" in done.stdout
    assert len(list((tmp_path / "runs").glob("*/ledger.json"))) == 2


def test_a_dataset_and_a_function_are_enough(trained, tmp_path):
    """`env=single_turn data.path=... reward=module:function`, two environments in a mixture beside it."""
    model = next(p.parent for p in (trained.parent / "cache").rglob("config.json"))
    (tmp_path / "tasks.jsonl").write_text("".join(json.dumps({"prompt": f"Say {i}", "answer": str(i)}) + "\n" for i in range(32)))
    (tmp_path / "scoring.py").write_text("def score(completion, row):\n    return float(row['answer'] in completion)\n")
    done = sao(
        "train", "env=single_turn", "data.path=tasks.jsonl", "reward=scoring:score", f"model.path={model}", "train.steps=2", "train.batch_size=8",
        "critic.critic_only_steps=0", "rollout.max_tokens=160", "rollout.max_turn_tokens=8", "run.progress=plain", "run.dir=run",
        "data.mixture={single_turn: 0.5, calculator: 0.5}", cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    trained_rows = rows(tmp_path / "run", "train")
    assert {"reward/mean/single_turn", "reward/mean/calculator"} <= set().union(*trained_rows)
    assert json.loads((tmp_path / "run" / "ledger.json").read_text())["closes"]
