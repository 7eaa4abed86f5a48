"""`sao online` at the door: one sentence, exit code 2, nothing started."""

from __future__ import annotations

import json

import numpy as np
import pytest

from sao.cli import main
from sao.config import Config
from sao.config_load import overlay
from sao.config_yaml import to_yaml
from sao.learner.protocol import SegmentRecord
from sao.online.history import closing_lines, read_history, summary
from sao.report.html import write_report
from sao.report.store import TrajectoryWriter
from sao.trajectory import EpisodeId, FinishReason, SamplingSpec, Segment, Trajectory

PHASES = "online.phases=[{name: cute, start: 0, args: {style: cute}}, {name: chuunibyou, start: 32, args: {style: %s}}]"


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (["experiment=demo"], "sao online needs a stream, but online.phases is empty"),
        (["experiment=style_stream", "online.drift=recuring"], "did you mean 'recurring'"),
        (["experiment=style_stream", "online.drift=recurring"], "needs online.period"),
        (["experiment=style_stream", "online.phases=[{name: a, start: 8}]"], "the first phase must start at 0"),
        (["experiment=style_stream", PHASES % "chunibyo"], "did you mean 'chuunibyou'"),
        (["experiment=style_stream", PHASES % "classical"], "is rewarded but is not among candidates"),
        (["experiment=style_stream", "reward=no_such_module:judge"], "there is no module 'no_such_module'"),
        (["experiment=style_stream", "reward=sao.rewards.builtin:nothing"], "has no 'nothing'"),
        (["experiment=style_stream", "algo=grpo"], "where no prompt comes twice"),
        (["experiment=style_stream", "online.shadow_dropp=1"], "did you mean 'online.shadow_drop'"),
        (["experiment=rule_stream", "env.args.noise=0.7"], r"noise=0.7"),
    ],
)
def test_a_mistake_is_one_sentence(overrides, says, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["online", *overrides, "run.dry_run=true"]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and error.startswith("error: ") and says in error, error
    assert list(tmp_path.iterdir()) == []


# ------------------------------------------------------------------ a stream's run folder, made up


STYLE_STREAM = "env.target=sao.envs.style_stream.environment:StyleStreamEnvironment"


def make_stream(folder, rewards_by_step, answers=None, noise=0.0, settings=(STYLE_STREAM,)):
    """Eight prompts a step; cute until prompt 400, then chuunibyou, with reward noise."""
    folder.mkdir(parents=True)
    phases = f"[{{name: cute, start: 0, args: {{style: cute}}}}, {{name: chuunibyou, start: 400, args: {{style: chuunibyou, noise: {noise}}}}}]"
    stream = [f"online.phases={phases}", "online.shadow_drop=0.2", "train.batch_size=8", "model.path=nowhere", *settings]
    (folder / "config.yaml").write_text(to_yaml(overlay(Config(), stream)))
    writer, ordinal, lines = TrajectoryWriter(folder), 0, []
    for step, reward in enumerate(rewards_by_step):
        batch, records = [], []
        for i in range(8):
            ids = np.array([1, 2, 3 + (ordinal % 50 if answers is None else answers)], np.int32)
            mask = np.array([False, True, True])
            segment = Segment(ids, mask, np.where(mask, -0.5, np.nan), np.where(mask, step, -1), SamplingSpec())
            batch.append(
                Trajectory(
                    EpisodeId(ordinal), f"t{ordinal}", "style_stream", (segment,), float(i < 8 * reward), FinishReason.terminal(), step, workload="x"
                )
            )
            floats = [np.where(mask, 0.1, np.nan).astype(np.float32)] * 4
            records.append(SegmentRecord(EpisodeId(ordinal), 0, *floats, mask.astype(np.uint8)))
            ordinal += 1
        writer.write(step, batch, records, step)
        row = {
            "t": 2.0 * step,
            "axis": "train",
            "step": step,
            "train/version": step + 1,
            "critic/vf_explained_var": 0.5,
            "online/refused": int(step > 60),
        }
        lines.append(json.dumps(row))
    evals = [
        {"eval": "during", "version": v, "temperature": 1.0, "mean": 0.5, "by_workload": {"cute": c, "chuunibyou": 0.1}}
        for v, c in ((10, 0.9), (60, 0.2))
    ]
    (folder / "eval.jsonl").write_text("".join(json.dumps(e) + "\n" for e in evals))
    (folder / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    return folder


def test_a_run_folder_is_measured(tmp_path):
    run = make_stream(tmp_path / "run", [1.0] * 50 + [0.0] * 10 + [1.0] * 20)
    facts = summary(read_history(run))
    (shift,) = facts["shifts"]
    assert (shift["before"], shift["after"], shift["step"]) == ("cute", "chuunibyou", 50)
    assert (shift["level"], shift["low"], shift["steps"], shift["censored"]) == (1.0, 0.0, 14, False)  # 32 of the last 40 rewards
    assert (shift["tokens"], shift["seconds"]) == (14 * 16.0, 28.0)
    assert facts["regret"] == 80.0 and facts["forgetting"]["cute"] == pytest.approx(0.7) and facts["refused"] == 1
    assert not facts["collapsed"]
    lines = closing_lines(run)
    assert "step 50: cute -> chuunibyou: reward 1.00, fell to 0.00, regained 80 % after 14 steps" in lines
    assert any("1 versions refused" in line for line in lines)


def test_regret_is_against_what_each_phase_could_pay(tmp_path):
    run = make_stream(tmp_path / "run", [1.0] * 50 + [0.75] * 20, noise=0.25)
    assert summary(read_history(run))["regret"] == 0.0
    assert any(line.startswith("regret 0 over 560 prompts") for line in closing_lines(run))


@pytest.mark.parametrize(
    "settings",
    [["env.target=sao.envs.arithmetic.environment:ArithmeticEnvironment"], ["env.target=not.there:Mine"], [STYLE_STREAM, "reward.function=my:judge"]],
)
def test_where_nobody_knows_what_was_possible_there_is_no_regret(tmp_path, settings):
    run = make_stream(tmp_path / "run", [1.0] * 50 + [0.0] * 20, settings=settings)
    assert summary(read_history(run))["regret"] is None and not any("regret" in line for line in closing_lines(run))
    page = write_report(run).read_text()
    assert "could not be made" not in page and "does not say what was possible" in page


@pytest.mark.parametrize(
    ("number", "body", "says"),
    [
        (0, "raise KeyError('style')", r"Mine.optimum of phase 'cute' raised KeyError: 'style' at optimum_0.py:7; mend it"),
        (1, "return 'much'", "Mine.optimum of phase 'cute' returned 'much'; it must return a finite number"),
        (2, "return float('nan')", "returned nan"),
    ],
)
def test_an_optimum_that_breaks_is_refused_before_anything_starts(number, body, says, tmp_path, monkeypatch, capsys):
    code = f"""
from sao.envs.style_stream.environment import StyleStreamEnvironment

class Mine(StyleStreamEnvironment):
    @classmethod
    def optimum(cls, **args):
        {body}
"""
    (tmp_path / f"optimum_{number}.py").write_text(code)
    monkeypatch.chdir(tmp_path)
    assert main(["online", "experiment=style_stream", f"env.target=optimum_{number}:Mine", f"run.dir={tmp_path / 'run'}"]) == 2
    assert says in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_a_constant_answer_is_reported_as_collapse(tmp_path):
    run = make_stream(tmp_path / "run", [0.5] * 52, answers=7)
    assert summary(read_history(run))["collapsed"] and any(line.startswith("collapsed: 100%") for line in closing_lines(run))
    assert "collapsed</span>" in write_report(run).read_text()


def test_the_report_shows_the_stream_and_the_guard(tmp_path):
    page = write_report(make_stream(tmp_path / "run", [1.0] * 50 + [0.0] * 20)).read_text()
    assert "could not be made" not in page
    for text in ("The stream", "Held-out accuracy by phase", "cute → chuunibyou, step 50", "&gt; 20", "refused by shadow evaluation", "at step 61"):
        assert text in page, text
