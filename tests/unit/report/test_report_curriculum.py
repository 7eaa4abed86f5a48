"""The curriculum's section of report.html, from the metrics of a curriculum that was really played."""

from __future__ import annotations

import json
from pathlib import Path

from sao.report import curriculum
from sao.report.rundata import RunData, load_run
from tests.unit.tasks.test_curriculum import build, play, rows


def run_of(folder: Path, source: object, rewards: list[float]) -> RunData:
    (folder / "config.yaml").write_text("data:\n  curriculum: frontier\n")
    with (folder / "metrics.jsonl").open("w") as file:
        for step in range(4):
            play(source, rewards)  # type: ignore[arg-type]
            values = source.metrics()  # type: ignore[attr-defined]
            file.write(json.dumps({"t": float(step), "wall": "2026-01-01", "axis": "train", "step": step, **values}) + "\n")
    return load_run(folder)


def test_levels_have_their_shares_and_rewards(tmp_path: Path) -> None:
    run = run_of(tmp_path, build("frontier", curriculum_recent=4), [1.0, 0.0] * 6)
    assert curriculum.concerns(run)
    page = curriculum.section(run)
    assert all(title in page for title in ("Levels drawn, stairs", "Reward by level, stairs", "Mean level, stairs", "level 4"))
    assert "missing" not in page


def test_single_tasks_are_told_by_what_they_earn(tmp_path: Path) -> None:
    page = curriculum.section(run_of(tmp_path, build(source=rows(5)), [1.0, 0.0] * 6))
    assert "Tasks by recent reward, rows" in page and "hardly ever solved" in page and "which in the end were 100% of all" in page


def test_a_run_without_one_has_no_section(tmp_path: Path) -> None:
    assert not curriculum.concerns(load_run(tmp_path))
    (tmp_path / "config.yaml").write_text("data:\n  curriculum: frontier\n")
    assert "no draw was recorded" in curriculum.section(load_run(tmp_path))
