"""A worker holds many episodes; when it is lost, the one that took it with it has failed and the others have not."""

from __future__ import annotations

import asyncio
import subprocess
import sys

import pytest

from sao.config import Config
from sao.environment import Task
from sao.errors import SystemFailure
from sao.loop import TrainingLoop
from sao.rollout.episodes import EpisodeFailure, EpisodeRequest
from sao.rollout.last_words import Recorder, Words, last_words, named, path_of
from sao.rollout.staleness import Finished
from sao.runtime.cluster import Cluster
from sao.runtime.remote import RemoteWorkers
from sao.trajectory import EpisodeId, Purpose
from tests.fakes import CountingLearner, CountingSource, FakeEngines, SilentObserver, make_trajectory
from tests.unit.test_loop import make_config
from tests.virtual_time import run

START_S = 5.0  # of a replacement
CRASH = """
import asyncio, os, sys
from pathlib import Path
from sao.rollout.last_words import Recorder, named

async def episode(ordinal):
    await asyncio.sleep(0.05)
    if ordinal == 3:
        {crash}
    await asyncio.sleep(30)

async def main():
    record = Recorder(Path(sys.argv[1]))
    await asyncio.gather(*(named(episode(i), f"train-{{i}}.0", record) for i in range(6)))

asyncio.run(main())
"""


@pytest.mark.parametrize(
    ("crash", "says"),
    [
        ("os._exit(139)", "train-3.0"),
        ("import ctypes; ctypes.string_at(0)", "train-3.0"),
        ("os.kill(os.getpid(), 9)", "train-3.0"),
        ("asyncio.get_running_loop().call_later(0.1, os._exit, 9)", ""),  # everybody waits, as when somebody kills a worker that has nothing to do
    ],
)
def test_what_a_process_says_when_it_dies(tmp_path, crash, says):
    done = subprocess.run([sys.executable, "-c", CRASH.format(crash=crash), str(tmp_path / "file")], capture_output=True, timeout=60)
    assert done.returncode != 0 and last_words(tmp_path / "file").episode == says, done.stderr


def test_naming_changes_nothing_of_what_is_awaited():
    heard = []

    async def work():
        assert await asyncio.sleep(0, "value") == "value"
        with pytest.raises(ZeroDivisionError):
            await fails()
        try:
            await asyncio.sleep(30)
        except asyncio.CancelledError:
            heard.append("cancelled")
            raise

    async def fails():
        await asyncio.sleep(0)
        raise ZeroDivisionError

    async def main():
        task = asyncio.create_task(named(work(), "x", heard.append))
        await asyncio.sleep(0.01)
        task.cancel()
        await task

    with pytest.raises(asyncio.CancelledError):
        asyncio.run(main())
    assert heard == ["x", ""] * (len(heard) // 2) + ["cancelled", ""] or heard[-3:] == ["x", "cancelled", ""]
    assert set(heard) == {"x", "", "cancelled"}


def test_no_file_is_no_word(tmp_path):
    assert last_words(tmp_path / "nowhere") == Words() and str(Words()) == ""


class Actor:
    """A worker's process: episodes take a second; the task of a poisonous one ends it, when nobody else does so before."""

    def __init__(self, cluster, name: str) -> None:
        self.cluster, self.name, self.dead = cluster, name, asyncio.Event()
        self.record = Recorder(path_of(cluster.run_dir / "logs", name))
        self.run = self

    def options(self, **_):
        return self

    def remote(self, request: EpisodeRequest):
        return self._outcome(request), self._trajectory(request)

    async def _outcome(self, request: EpisodeRequest):
        import ray.exceptions as rx

        work = asyncio.create_task(self._episode(request))
        died = asyncio.create_task(self.dead.wait())
        await asyncio.wait({work, died}, return_when=asyncio.FIRST_COMPLETED)
        if self.dead.is_set():
            work.cancel()
            raise rx.ActorDiedError
        return work.result()

    async def _episode(self, request: EpisodeRequest):
        await asyncio.sleep(self.cluster.poison.get(request.task.task_id, 1.0))
        if request.task.task_id in self.cluster.poison:
            self.die(self.cluster.word or request.name)
        return Finished(self._trajectory(request).meta(), None)

    def _trajectory(self, request: EpisodeRequest):
        return make_trajectory(request.episode_id, task=request.task.task_id, versions=(request.version, request.version))

    def die(self, word: str = "") -> None:
        self.record(word, "Poison.step")
        self.dead.set()


class Workers(Cluster):
    """The real supervision with actors that are none."""

    def __init__(self, run_dir, config: Config, poison: dict[str, float], word: str = "") -> None:
        self.events: list[str] = []
        super().__init__(config, [], "model", run_dir, on_event=self.events.append)
        (run_dir / "logs").mkdir()
        self.poison, self.word = poison, word
        self.lost = 0
        self.actors = {"worker-0": Actor(self, "worker-0")}

    async def _start_again(self, name: str) -> None:
        self.lost += 1
        await asyncio.sleep(START_S)
        self.actors[name] = Actor(self, name)

    def remote(self) -> RemoteWorkers:
        return RemoteWorkers(self, ["worker-0"], 90.0, self.run_dir / "logs")


def request(ordinal: int, purpose: Purpose = "train") -> EpisodeRequest:
    return EpisodeRequest(EpisodeId(ordinal), Task(f"task-{ordinal}", "fake", {}), 0, purpose)


@pytest.mark.parametrize("after", [0.5, 22.0])
def test_a_task_that_takes_its_worker_with_it_is_tried_twice_and_dropped(tmp_path, after):
    """Two such tasks in a run, fast or slow to crash, under the default number of restarts: nothing else is dropped or tried as a failure."""
    config = make_config(staleness=1, batch=8, steps=6)

    async def main():
        cluster = Workers(tmp_path, config, {"task-7": after, "task-20": after + 1.5})
        engines, observer = FakeEngines(), SilentObserver()
        loop = TrainingLoop(config, CountingSource(), cluster.remote(), CountingLearner(config), engines, observer)
        await loop.run()
        return cluster, loop.ledger.audit()

    cluster, audit = run(main())
    assert audit["prompts"]["dropped"] == {"worker_lost": 2} and audit["prompts"]["retried"] == {"worker_lost": 2} and audit["closes"]
    assert {entry["task"] for entry in audit["dropped_by_task"]} == {"task-7", "task-20"}
    assert cluster.lost == 4


def test_workers_killed_by_chance_fail_no_episode(tmp_path):
    """Twenty kills, each while the same episodes are in flight, say nothing about any of them."""
    config = Config()
    config.launcher.restarts = 1000

    async def main():
        cluster = Workers(tmp_path, config, {})
        workers = cluster.remote()

        async def kill():
            for _ in range(20):
                await asyncio.sleep(0.5)
                cluster.actors["worker-0"].die()
                await asyncio.sleep(START_S)

        outcomes, _ = await asyncio.gather(asyncio.gather(*(workers.run(request(i)) for i in range(8))), kill())
        return cluster, outcomes

    cluster, outcomes = run(main())
    assert cluster.lost == 20 and all(isinstance(outcome, Finished) for outcome in outcomes)


@pytest.mark.parametrize("after", [0.5, 25.0])
def test_a_worker_that_dies_and_names_nobody_ends_the_run(tmp_path, after):
    """A crash in a thread, say: however long it takes each time, it does not go on for ever."""

    async def main():
        cluster = Workers(tmp_path, Config(), {"task-1": after}, word="somebody else")
        outcome = await cluster.remote().run(request(0))
        assert isinstance(outcome, Finished)
        await cluster.remote().run(request(1))

    with pytest.raises(SystemFailure, match="worker-0 was lost 6 times, with no episode done between"):
        run(main())


def test_an_episode_that_does_not_end_has_failed_and_not_its_neighbours(tmp_path):
    """An environment that swallows its cancellation holds a worker that is otherwise well."""

    async def main():
        cluster = Workers(tmp_path, Config(), {"task-1": 1e6})
        workers = cluster.remote()
        stuck = asyncio.create_task(workers.run(request(1)))
        await asyncio.sleep(89.5)
        return await asyncio.gather(stuck, workers.run(request(0)))

    stuck, other = run(main())
    assert isinstance(stuck, EpisodeFailure) and stuck.reason == "worker_lost" and "did not answer within 90 s" in stuck.message
    assert isinstance(other, Finished)


def test_who_took_the_worker_with_it_is_named_by_method(tmp_path):
    """In the event of the replacement, which screen and driver.log show, and in the failure."""

    async def main():
        cluster = Workers(tmp_path, Config(), {"task-1": 0.5})
        return cluster.events, await cluster.remote().run(request(1))

    events, outcome = run(main())
    assert isinstance(outcome, EpisodeFailure) and "it was running Poison.step of episode train-1.0, for " in outcome.message
    assert events[0].startswith("worker-0 is replaced: ") and "it was running Poison.step of episode train-1.0, for " in events[0]


def test_an_episode_of_an_evaluation_is_tried_twice_too(tmp_path):
    """Nobody retries it outside."""

    async def main():
        cluster = Workers(tmp_path, Config(), {"task-1": 0.5})
        workers = cluster.remote()
        outcomes = await asyncio.gather(*(workers.run(request(i, "eval")) for i in range(3)))
        return cluster, outcomes

    cluster, (first, second, third) = run(main())
    assert isinstance(first, Finished) and isinstance(third, Finished)
    assert isinstance(second, EpisodeFailure) and second.reason == "worker_lost" and cluster.lost == 2
