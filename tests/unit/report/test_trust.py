"""Whether the critic is a guide yet: the verdict, and that screen, log and report say it."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from rich.console import Console

from sao.config import Config
from sao.learner.protocol import StepReport
from sao.loop_seams import StepRow
from sao.observer import RunObserver
from sao.report.figures import learning
from sao.report.live import PlainProgress
from sao.report.rundata import RunData
from sao.report.screen import RichProgress
from sao.report.trust import EXPLAINED, LOSS, judge, untrusted_spans, verdicts
from sao.rollout.staleness import Finished
from sao.runtime.run_folder import RunFolder
from tests.fakes import make_trajectory


@pytest.mark.parametrize(
    ("window", "trusted", "said"),
    [
        ([None], False, "every reward of the last step was the same"),
        ([None] * 9, False, "every reward of the last 5 steps was the same"),
        ([-0.2, -0.1, 0.0], False, "no better than a constant"),
        ([0.05, 0.05, 0.09], False, "explains 5% of the returns' variance, where 10% are wanted"),
        ([-0.001, -0.001, -0.001], False, "explains 0% of the returns' variance, no better than a constant"),
        ([0.6, 0.6], False, "in too few steps to count on"),
        ([0.2, 0.3, 0.4], True, "explains 30% of the returns' variance (median of 3 steps)"),
        ([0.9, 0.9, 0.9, *[-0.1] * 5], False, "no better than a constant"),
        ([None, 0.3, None, 0.3, 0.3], True, "median of 3 steps"),
    ],
)
def test_the_verdict_and_its_sentence(window, trusted, said):
    verdict = judge(window, 0.1)
    assert verdict.trusted == trusted and said in verdict.text and "\n" not in verdict.text
    if not trusted:
        assert "critic.critic_only_steps" in verdict.text or "check the reward" in verdict.text


def records(explained: list[float | None], actor_from: int = 2) -> list[dict]:
    rows = []
    for step, value in enumerate(explained):
        row = {"axis": "train", "step": step, LOSS: 0.2}
        row |= {} if value is None else {EXPLAINED: value}
        rows.append(row | ({"actor/pg_loss": 0.1} if step >= actor_from else {}))
    return rows


def test_the_spans_are_those_of_the_verdicts():
    found = verdicts(records([None, 0.0, 0.0, 0.0, *[0.5] * 6]), 0.1)
    assert [verdict.trusted for _, verdict in found] == [False] * 6 + [True] * 4
    assert untrusted_spans(found) == [(0.0, 5.0)]
    assert verdicts([{"axis": "train", "step": 0, "reward/mean": 1.0}], 0.1) == [], "an algorithm without a critic is not judged"


def figures_of(explained: list[float | None]) -> str:
    return learning(RunData(Path("run"), config={"critic": {"trust_above": 0.1}}, metrics=records(explained)))


def test_the_report_shades_what_was_not_to_be_trusted_and_says_so_at_the_end():
    never = figures_of([0.0] * 12)
    assert 'class="shade"' in never and "banner" in never and "no better than a constant" in never and "10 of the actor&#x27;s 10 steps" in never
    always = figures_of([*[0.5] * 30])
    assert "banner" not in always and always.count('class="shade"') == 1
    late = figures_of([*[0.0] * 12, *[0.5] * 6])
    assert "banner" in late and "by now, but" in late
    assert "undefined: every return of every batch was the same" in figures_of([None] * 4)
    without = learning(RunData(Path("run"), metrics=[{"axis": "train", "step": 0, "actor/pg_loss": 0.1}]))
    assert "banner" not in without and "shade" not in without


def test_the_screens_say_it_in_a_line():
    out = io.StringIO()
    plain = PlainProgress(4, out=out, min_interval_s=0)
    plain.update(step=1, critic=judge([0.02] * 5, 0.1))
    plain.update(step=2, critic=judge([0.5] * 5, 0.1))
    first, second = out.getvalue().splitlines()
    assert "critic not trusted yet (explains 2%)" in first and "critic" not in second
    rich = RichProgress(4, console=Console(width=120, height=40, file=io.StringIO(), force_terminal=True))
    rich.update(step=1, critic=judge([0.02] * 5, 0.1))
    frame = Console(width=120, file=io.StringIO(), record=True)
    frame.print(rich.frame())
    rich.close()
    assert "2% not trusted yet" in frame.export_text()


class Loop(SimpleNamespace):
    """What the observer asks of the loop."""

    def __init__(self) -> None:
        nothing = SimpleNamespace(metrics=lambda: {}, dropped={})
        super().__init__(ledger=nothing, source=nothing, max_staleness=0)


def observed(folder: Path, explained: list[float | None], first: int = 0, *, resume: bool = False, critic: bool = True) -> list[dict]:
    config = Config()
    config.run.progress, config.logger.wandb = "plain", "disabled"
    (folder / "config.yaml").parent.mkdir(exist_ok=True)
    with RunFolder(folder, resume=resume) as opened:
        observer = RunObserver(opened, config, 0.0)
        observer.attach(Loop())  # type: ignore[arg-type]
        for step, value in enumerate(explained, first):
            metrics = {LOSS: 0.1} if critic else {}
            metrics |= {} if value is None else {EXPLAINED: value}
            trajectory = make_trajectory(step)
            report = StepReport(step, max(0, step - 1), metrics)
            observer.step(StepRow(step, report, [Finished(trajectory.meta(), None)], max(0, step - 2), 0.0, 1.0, 0.0, 1.0))
        observer.close()
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_an_environment_that_holds_the_event_loop_is_named_once(tmp_path, capsys):
    config = Config()
    config.run.progress, config.logger.wandb = "plain", "disabled"
    with RunFolder(tmp_path / "run") as opened:
        observer = RunObserver(opened, config, 0.0)
        observer.attach(Loop())  # type: ignore[arg-type]
        for step, name in enumerate(["maze", "maze", "shop"]):
            held = replace(make_trajectory(step), metrics={"blocked_s": 3.0, f"blocked_s/{name}": 3.0})
            observer.step(StepRow(step, StepReport(step, step, {}), [Finished(held.meta(), None)], step, 0.0, 1.0, 0.0, 1.0))
        observer.close()
    out = capsys.readouterr().out
    assert out.count("step 0: environment maze held its worker's event loop, 3.0 s per trajectory") == 1
    assert "step 2: environment shop held" in out and out.count("held its worker's") == 2


def test_the_observer_counts_it_and_warns_once(tmp_path, capsys):
    rows = observed(tmp_path / "run", [0.0] * 6 + [0.5] * 6)
    assert [row["critic/trusted"] for row in rows] == [0.0] * 8 + [1.0] * 4
    out, log = capsys.readouterr().out, (tmp_path / "run/logs/driver.log").read_text()
    assert out.count("from step 2 on the actor trains, but the critic is not to be trusted yet") == 1 == log.count("not to be trusted yet")
    assert log.count("step 8: the critic explains 50%") == 1


def test_a_resumed_run_judges_by_the_steps_that_count(tmp_path):
    observed(tmp_path / "run", [0.5] * 6)
    rows = observed(tmp_path / "run", [-1.0, -1.0, -1.0], first=3, resume=True)
    assert [(row["step"], row["critic/trusted"]) for row in rows[6:]] == [(3, 1.0), (4, 1.0), (5, 0.0)]


def test_without_a_critic_there_is_nothing_to_trust(tmp_path, capsys):
    rows = observed(tmp_path / "run", [None] * 3, critic=False)
    assert all("critic/trusted" not in row for row in rows) and "the critic" not in capsys.readouterr().out
