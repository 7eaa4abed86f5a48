"""When supervision gives up."""

from __future__ import annotations

import asyncio
import time
from unittest.mock import MagicMock

import pytest

from sao.config import Config
from sao.errors import SystemFailure
from sao.runtime.cluster import Cluster
from sao.runtime.remote import lost


def test_an_actor_that_dies_in_every_start_is_given_up_by_name(tmp_path, monkeypatch):
    cluster = Cluster(Config(), [], "model", tmp_path, on_event=lambda text: None)
    cluster.actors["learner"] = dead = object()
    cluster._began -= 3600.0  # it had lived long before
    starts = 0

    async def start_again(name: str) -> None:
        nonlocal starts
        starts += 1
        assert starts < 50, "it never gives up"
        raise lost(SystemFailure, "died while starting")

    monkeypatch.setattr(cluster, "_start_again", start_again)
    with pytest.raises(SystemFailure, match="learner was lost"):
        asyncio.run(cluster.replace("learner", dead, "killed"))
    assert starts == Config().launcher.restarts


def test_losses_of_a_learner_are_in_a_row_until_it_has_trained_a_step(tmp_path, monkeypatch):
    """Killed half a minute after every start, it would never end; killed now and then, it goes on."""
    cluster = Cluster(Config(), [], "model", tmp_path, on_event=lambda text: None)
    cluster.actors["learner"] = object()

    async def start_again(name: str) -> None:
        cluster.actors[name] = object()
        cluster._born[name] = time.monotonic() - 3600.0

    async def killed(times: int) -> None:
        for _ in range(times):
            await cluster.replace("learner", cluster.actors["learner"], "killed")

    monkeypatch.setattr(cluster, "_start_again", start_again)
    asyncio.run(killed(5))
    cluster.forgive("learner")
    asyncio.run(killed(5))
    with pytest.raises(SystemFailure, match="learner was lost 6 times, with no training step done between"):
        asyncio.run(killed(1))


def test_a_death_by_the_kernels_hand_is_told_with_the_key_to_lower(tmp_path, monkeypatch):
    heard: list[str] = []
    cluster = Cluster(Config(), [], "model", tmp_path, on_event=heard.append)
    cluster.actors["worker-0"] = dead = object()

    async def start_again(name: str) -> None:
        cluster.actors[name] = object()

    monkeypatch.setattr(cluster, "_start_again", start_again)
    monkeypatch.setattr("sao.runtime.cluster.kernel_oom_kills", lambda: cluster._oom_kills + 1)
    asyncio.run(cluster.replace("worker-0", dead, "worker-0 died"))
    assert "lower rollout.max_running" in heard[0]


def test_a_start_that_the_kernel_ended_is_told_with_the_key_to_lower(tmp_path, monkeypatch):
    async def dies(*_: object) -> None:
        raise lost(SystemFailure, "engine-0 died")

    cluster = Cluster(Config(), [], "model", tmp_path)
    monkeypatch.setattr("sao.runtime.cluster.call", dies)
    monkeypatch.setattr("sao.runtime.cluster.kernel_oom_kills", lambda: cluster._oom_kills + 1)
    with pytest.raises(SystemFailure, match=r"engine-0 died; the kernel killed .*: lower engine\.kv_cache_mb") as caught:
        asyncio.run(cluster._ready({"engine-0": MagicMock()}))
    assert caught.value.lost
