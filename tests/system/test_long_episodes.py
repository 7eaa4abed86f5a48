"""Episodes longer than their context, in a whole run; and environments that hold its workers up."""

from __future__ import annotations

import json

import pytest

from sao.report.store import read_trajectories, stored_steps
from tests.system.faults import Run, account
from tests.system.scripted_run import options

pytestmark = pytest.mark.system
LONG = [
    "env=tests.system.scripted_run:Walk", "rollout.max_turns=12", "rollout.max_tokens=600", "rollout.compaction=summary", "rollout.summary_tokens=12",
    "rollout.summary_prompt=sum", "rollout.max_compactions=3", "rollout.retries=0", "data.shuffle=false", "logger.report=true",
]  # fmt: skip


def test_a_run_of_compacted_episodes_whose_environments_block(tmp_path):
    folder = tmp_path / "run"
    arguments = [text for text in options(tmp_path, steps=3) if not text.startswith(("env=", "logger.report="))]
    run = Run([*arguments, *LONG, f"run.dir={folder}"], folder, scripted=True, log=tmp_path / "log")
    assert run.wait() == 0, run.log.read_text()[-3000:]
    found = account(folder)
    assert found["closes"] and found["dropped"] == {"worker_lost": 1}, found
    episodes = [stored for step in stored_steps(folder) for stored in read_trajectories(folder, [step])]
    assert len(episodes) == 32 and any(len(stored.trajectory.segments) > 1 for stored in episodes)
    for stored in episodes:
        segments, metrics = stored.trajectory.segments, stored.trajectory.metrics
        assert len(segments) == 1 + metrics.get("segments/compacted", 0) and all(len(segment) <= 128 for segment in segments)
        records = [record.mask_reason for record in stored.records if record is not None]
        assert len(records) == len(segments)
    assert found["tokens"]["trained"] == sum(segment.sampled_tokens for stored in episodes for segment in stored.trajectory.segments)
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert any(row.get("rollout/compactions", 0) > 0 for row in rows)
    assert any(row.get("rollout/blocked_s/walk", 0) > 0.05 for row in rows)
    driver, worker = ((folder / "logs" / f"{name}.log").read_text() for name in ("driver", "worker-0"))
    assert "worker-0 is replaced: worker-0 did not answer within 5 s" in driver and "it was running Walk.step of episode train-20.0, for " in driver
    assert "Walk.step held the event loop for " in worker and "scripted_run.py:" in worker
    assert "Long episodes" in (folder / "report.html").read_text()
