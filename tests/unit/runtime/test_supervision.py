"""When supervision gives up."""

from __future__ import annotations

import asyncio

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
