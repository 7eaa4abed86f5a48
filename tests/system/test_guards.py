"""Every fault once more with its guard removed: what `test_faults.py` checks must fail then, or it checks nothing."""

from __future__ import annotations

import signal

import pytest

from tests.system.faults import Run, account, end, gone_within, undisturbed, weights
from tests.system.scripted_run import options

pytestmark = [pytest.mark.system, pytest.mark.long]
STEPS = 10


@pytest.fixture(scope="module")
def calm(tmp_path_factory):
    return undisturbed(tmp_path_factory.mktemp("guards"), STEPS).parent


@pytest.fixture
def start(calm, tmp_path):
    """Starts runs in one folder and ends what they leave."""
    folder = tmp_path / "run"

    def one(without: str, *own: str, resumed: bool = False) -> Run:
        arguments = [f"resume={folder}"] if resumed else [*options(calm, steps=STEPS), *own, f"run.dir={folder}"]
        return Run(arguments, folder, scripted=True, log=tmp_path / "log", without=without)

    yield one
    end(folder)


def killed_and_resumed(start, without: str) -> Run:
    run = start("")
    run.wait_for_step(6)
    run.kill("driver")
    run.wait()
    assert gone_within(run.folder, 5) == []
    return start(without, resumed=True)


def test_without_signs_of_life_a_silent_learner_stops_everything(start):
    run = start("signs of life")
    run.wait_for_step(2)
    assert run.kill("learner", signal.SIGSTOP)
    with pytest.raises(AssertionError, match="the run stands at step"):
        run.wait_for_step(STEPS, 60)
    assert run.process.poll() is None


def test_without_its_checkpoint_a_replaced_learner_is_another(start, calm):
    run = start("a replaced learner is restored")
    run.wait_for_step(5)
    assert run.kill("learner")
    assert run.wait() != 0 or weights(run.folder) != weights(calm / "calm")


def test_without_a_check_a_damaged_checkpoint_is_used(start):
    run = start("")
    run.wait_for_step(6)
    run.process.send_signal(signal.SIGINT)
    assert run.wait(60) == 130
    file = sorted((run.folder / "checkpoints").glob("step-*"))[-1] / "learner.pt"
    file.write_bytes(file.read_bytes()[:100])
    assert start("a checkpoint is checked", resumed=True).wait() != 0


def test_without_its_cursor_a_resumed_run_trains_tasks_twice(start):
    run = killed_and_resumed(start, "a checkpoint holds the task cursor")
    assert run.wait() != 0 or account(run.folder)["doubled"] > 0


@pytest.mark.parametrize(("without", "remains"), [("", False), ("the sweeper", True)])
def test_without_the_sweeper_what_an_episode_left_running_outlives_a_killed_driver(start, without, remains):
    run = start(without, "reward=tests.system.scripted_run:stray")
    run.wait_for_step(2)
    run.kill("driver")
    run.wait()
    assert bool(gone_within(run.folder, 5)) is remains
