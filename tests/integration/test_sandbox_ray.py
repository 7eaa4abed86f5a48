"""Sandboxes from Ray actors: one daemon for all of them, whichever thread or loop asks, and an actor's sandboxes go with it."""

from __future__ import annotations

import asyncio
import os
import shutil
import time

import pytest

from sao.config import SandboxConfig
from sao.sandbox.client import Sandboxes
from sao.sandbox.episode import sandbox_for, spec_of

pytestmark = [pytest.mark.integration, pytest.mark.skipif(shutil.which("bwrap") is None, reason="needs bubblewrap")]


class Wants:
    sandbox = True


class Worker:
    """As the episode worker: an async actor, many episodes at once, a sandbox each."""

    async def episodes(self, n):
        async def episode(i):
            async with sandbox_for(Wants, SandboxConfig()) as sandbox:
                result = await sandbox.exec(f"echo {i} > mine; sleep 0.1; cat mine")
                assert result.rc == 0
                return int(result.out)

        return await asyncio.gather(*map(episode, range(n)))

    async def keep(self):
        self.kept = await Sandboxes("bwrap").create(spec_of(SandboxConfig()))

    async def daemon(self):
        answer, _ = await Sandboxes("bwrap").ask({"ask": "hello"})
        return answer["pid"], answer["boxes"]


def test_actors_share_a_daemon_that_closes_what_a_dead_one_leaves(monkeypatch):
    import ray

    monkeypatch.setenv("SAO_RUN_MARK", f"ray test {os.getpid()}")
    ours = Sandboxes("bwrap")
    asyncio.run(ours.start())
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, object_store_memory=80 << 20)
    try:
        actors = [ray.remote(Worker).options(num_cpus=0).remote() for _ in range(2)]
        assert ray.get([actor.episodes.remote(8) for actor in actors]) == [list(range(8))] * 2
        ray.get([actor.keep.remote() for actor in actors])
        pids = [pid for pid, _ in ray.get([actor.daemon.remote() for actor in actors])]
        assert pids[0] == pids[1] and ray.get(actors[0].daemon.remote())[1] == 2
        ray.kill(actors[1])
        deadline = time.monotonic() + 20
        while ray.get(actors[0].daemon.remote())[1] != 1 and time.monotonic() < deadline:
            time.sleep(0.2)
        assert ray.get(actors[0].daemon.remote())[1] == 1
    finally:
        ray.shutdown()
        asyncio.run(ours.end())
