"""kill -9 of every part of a run, Ctrl-C, and what is left. `benchmarks/faults.py` does the same ten times over, at random moments."""

from __future__ import annotations

import json
import signal
import sys
import time

import pytest

from sao.replay.roll import replay
from sao.report.store import read_columns
from tests.system.faults import ROOT, Run, account, gone_within, undisturbed, weights
from tests.system.scripted_run import options

pytestmark = pytest.mark.system
STEPS = 16

REAL = [
    "experiment=demo", "warmstart.steps=40", "train.steps=14", "train.batch_size=8", "critic.critic_only_steps=1", "eval.at_start=false", "eval.tasks=8",
    "engine.max_num_seqs=16", "run.progress=plain", "checkpoint.every=4",
]  # fmt: skip


@pytest.fixture(scope="module")
def calm(tmp_path_factory):
    """An undisturbed run to compare with."""
    return undisturbed(tmp_path_factory.mktemp("faults"), STEPS).parent


def whole(folder) -> dict:
    found = account(folder)
    assert found["closes"] and found["doubled"] == 0 and found["lost"] == 0 and found["steps_missing"] == 0, found
    assert found["trained"] == found["trained_by_store"], found
    return found


def test_every_part_is_killed_once_and_the_weights_are_those_of_an_undisturbed_run(calm):
    folder = calm / "disturbed"
    run = Run([*options(calm, steps=STEPS), f"run.dir={folder}"], folder, scripted=True, log=calm / "disturbed.log")
    for step, actor in ((2, "worker-0"), (5, "learner"), (7, "engine-0")):
        run.wait_for_step(step)
        assert run.kill(actor)
    run.wait_for_step(10)
    run.kill("driver")
    run.wait()
    assert gone_within(folder, 5) == []
    run = Run([f"resume={folder}"], folder, scripted=True, log=run.log)
    assert run.wait() == 0, run.log.read_text()
    assert whole(folder)["trained"] == 8 * (STEPS + 1)
    assert weights(folder) == weights(calm / "calm")
    assert gone_within(folder, 5) == []
    for step in (6, STEPS):  # in the stretch of the learner that was lost, and the last of all
        result = replay(folder, step)
        assert result.found.bit_equal, result.found.first
    assert result.weights == [f"step-{STEPS + 1:06d}", "final"] and result.found.notes == []


@pytest.mark.long
def test_a_silent_actor_is_noticed_within_seconds_and_replaced(calm):
    folder = calm / "silent"
    run = Run([*options(calm, steps=STEPS), f"run.dir={folder}"], folder, scripted=True, log=calm / "silent.log")
    for step, actor in ((2, "learner"), (6, "engine-0")):
        run.wait_for_step(step)
        assert run.kill(actor, signal.SIGSTOP)
    assert run.wait() == 0, run.log.read_text()
    whole(folder)
    assert weights(folder) == weights(calm / "calm")
    assert gone_within(folder, 5) == []


@pytest.mark.long
def test_a_curriculum_draws_on_after_kill_9_as_if_it_had_never_been_cut_off(tmp_path):
    def arguments(name: str) -> list[str]:
        return [*options(tmp_path, steps=STEPS), "data.pool=24", "data.curriculum=learnable", "checkpoint.every=6", f"run.dir={tmp_path / name}"]

    def drawn(name: str) -> list[str]:
        return read_columns(tmp_path / name, columns=["task_id"])["task_id"].to_pylist()

    assert Run(arguments("calm"), tmp_path / "calm", scripted=True, log=tmp_path / "calm.log").wait() == 0
    run = Run(arguments("killed"), tmp_path / "killed", scripted=True, log=tmp_path / "killed.log")
    run.wait_for_step(10)
    run.kill("driver")
    run.wait()
    assert gone_within(tmp_path / "killed", 5) == []
    assert Run([f"resume={tmp_path / 'killed'}"], tmp_path / "killed", scripted=True, log=run.log).wait() == 0, run.log.read_text()
    whole(tmp_path / "killed")
    assert drawn("killed") == drawn("calm") and len(set(drawn("calm"))) == 24
    assert weights(tmp_path / "killed") == weights(tmp_path / "calm")


def test_interrupted_once_it_ends_with_a_checkpoint_and_goes_on(calm):
    folder = calm / "stopped"
    run = Run([*options(calm, steps=STEPS), f"run.dir={folder}"], folder, scripted=True, log=calm / "stopped.log")
    run.wait_for_step(3)
    run.process.send_signal(signal.SIGINT)
    assert run.wait(60) == 130, run.log.read_text()
    assert gone_within(folder, 5) == []
    ledger = json.loads((folder / "ledger.json").read_text())
    assert ledger["closes"] and list((folder / "checkpoints").glob("step-*"))
    newest = sorted((folder / "checkpoints").glob("step-*"))[-1]
    (newest / "learner.pt").write_bytes((newest / "learner.pt").read_bytes()[:100])
    run = Run([f"resume={folder}"], folder, scripted=True, log=run.log)
    assert run.wait() == 0, run.log.read_text()
    whole(folder)
    assert weights(folder) == weights(calm / "calm"), "a damaged checkpoint is skipped, and what came after it is trained again"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interrupted_while_the_actors_start_it_ends_and_says_how_to_go_on(calm, number):
    folder = calm / f"early-{number.name}"
    run = Run([*options(calm, steps=STEPS), f"run.dir={folder}"], folder, scripted=True, log=calm / f"{folder.name}.log")
    deadline = time.monotonic() + 120
    while "Ray is up" not in run.log.read_text() and time.monotonic() < deadline:
        time.sleep(0.05)
    run.process.send_signal(number)
    assert run.wait(30) == 130, run.log.read_text()
    text = run.log.read_text()
    assert f"go on with `sao train resume={folder}`" in text and "Traceback" not in text
    assert json.loads((folder / "outcome.json").read_text())["state"] == "stopped"
    assert gone_within(folder, 5) == []


def test_interrupted_twice_it_ends_at_once(calm):
    folder = calm / "twice"
    run = Run([*options(calm, steps=500), f"run.dir={folder}"], folder, scripted=True, log=calm / "twice.log")
    run.wait_for_step(2)
    run.process.send_signal(signal.SIGINT)
    run.process.send_signal(signal.SIGTERM)
    assert run.wait(10) == 130
    assert gone_within(folder, 5) == []


@pytest.mark.long
def test_on_vllm_an_engine_and_the_learner_are_replaced(tmp_path):
    folder = tmp_path / "run"
    run = Run([*REAL, f"run.dir={folder}", f"warmstart.cache_dir={tmp_path}/cache"], folder, scripted=False, log=tmp_path / "log")
    run.wait_for_step(3)
    assert run.kill("engine-0")
    run.wait_for_step(6, 300)
    assert run.kill("learner")
    assert run.wait() == 0, run.log.read_text()
    whole(folder)
    text = run.log.read_text()
    assert "engine-0 is back" in text and "learner is back" in text
    assert gone_within(folder, 5) == []


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["resume=nowhere"], "does not exist"),
        (["resume={run}", "seed=7"], "seed=7 cannot be changed"),
        (["resume={run}", "algo=sao_coding"], "algo.name=sao_coding cannot be changed"),
        (["resume={run}", "train.stepz=7"], "train.steps"),
    ],
)
def test_a_resume_that_cannot_be_is_refused(calm, arguments, said):
    import subprocess

    command = [sys.executable, "-m", "sao.cli", "train", *(text.format(run=calm / "calm") for text in arguments)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2 and said in done.stderr and len(done.stderr.strip().splitlines()) == 1, done.stderr


@pytest.mark.long
def test_a_task_that_takes_its_worker_with_it_is_dropped_and_the_run_goes_on(calm):
    """A crash in an environment, as of a C library; the default number of restarts."""
    folder = calm / "poison"
    arguments = [text for text in options(calm, steps=20) if not text.startswith(("env=", "launcher.restarts="))]
    run = Run([*arguments, "env=tests.system.scripted_run:Poison", f"run.dir={folder}"], folder, scripted=True, log=calm / "poison.log")
    assert run.wait() == 0, run.log.read_text()
    found = whole(folder)
    assert found["trained"] == 8 * 21 and set(found["dropped"]) == set(found["retried"]) == {"worker_lost"}
    dropped = json.loads((folder / "ledger.json").read_text())["dropped_by_task"]
    assert 0 < len(dropped) <= 5 and all(entry["count"] == 1 for entry in dropped), dropped
