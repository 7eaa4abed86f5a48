"""The ablation's conclusions against hand-made curves, one tiny cell of every method, and that a killed ablation goes on to the same result."""

from __future__ import annotations

import json
import math
import shutil

import ablation
import numpy as np
import pytest
from ablation_parts import analysis, cell, methods, page
from ablation_parts.analysis import Collapse, collapse, paired_bootstrap
from ablation_parts.cell import Plan, Spec, run_to_file
from ablation_parts.tasks import TASKS

TINY = Plan(steps=13, rollouts=16, eval_every=4, heldout=8, final=8)


# Collapse


@pytest.mark.parametrize(
    ("curve", "expected"),
    [
        ([0.4, 0.6, 0.8, 0.9], Collapse("none")),
        ([0.4, 0.8, 0.41, 0.4, 0.4], Collapse("none")),  # at half of the best is not below it
        ([0.4, 0.8, 0.3, 0.3, 0.5, 0.8], Collapse("none")),  # two in a row, then back
        ([0.4, 0.8, 0.3, 0.2, 0.1, 0.1], Collapse("collapsed", 2)),
        ([0.4, 0.8, 0.3, 0.2, 0.1, 0.63, 0.65], Collapse("collapsed", 2, 6)),
        ([0.4, 0.1, 0.1, 0.1], Collapse("collapsed", 1)),  # from the warm start's own level
        ([0.4, 0.8, 0.3], Collapse("censored", 2)),
        ([0.4, 0.8, 0.9, 0.3, 0.2], Collapse("censored", 3)),
    ],
)
def test_collapse_and_its_censoring(curve, expected):
    assert collapse(curve) == expected


def test_a_gradient_that_is_not_finite_is_a_collapse():
    assert collapse([0.4, 0.5, 0.6], diverged=True) == Collapse("collapsed", 2)
    assert collapse([0.4, 0.8, 0.1, 0.1, 0.1], diverged=True).at == 2


def test_time_to_recovery_is_censored_at_the_end():
    assert collapse([0.4, 0.8, 0.3, 0.2, 0.1, 0.63, 0.65, 0.7]).waited(8) == 4
    assert collapse([0.4, 0.8, 0.3, 0.2, 0.1, 0.1]).waited(6) == 3
    assert collapse([0.4, 0.8]).waited(2) is None and collapse([0.4, 0.8, 0.3]).waited(3) is None


def record(curves, finals=None, **more):
    copies = [
        {"seed": i, "lr": 1e-3, "final": (finals or [c[-1] for c in curves])[i], "curve": c, "diverged_at": None, "windows": {}, "masked": {}} | more
        for i, c in enumerate(curves)
    ]
    return {"spec": {"method": "sao", "task": "chain", "bound": 16}, "copies": copies}


def test_a_censored_run_counts_neither_way():
    row = analysis.summarise([record([[0.8, 0.1, 0.1, 0.1], [0.8, 0.8, 0.8, 0.8], [0.8, 0.8, 0.8, 0.1]])])
    assert (row["runs"], row["collapsed"], row["censored"]) == (3, 1, 1)
    assert row["collapse_rate"] == 0.5 and row["collapse_if_censored_count"] == pytest.approx(2 / 3)
    only_censored = analysis.summarise([record([[0.8, 0.1]])])
    assert only_censored["collapse_rate"] is None and only_censored["collapse_interval"] == (0.0, 1.0)


# Intervals and tests


def test_area_is_the_mean_height():
    assert analysis.area([0.0, 1.0]) == 0.5 and analysis.area([0.2, 0.4, 0.4]) == pytest.approx(0.35) and analysis.area([0.7]) == 0.7


def test_intervals_against_known_values():
    mean, low, high = analysis.student_interval([1.0, 2.0, 3.0, 4.0, 5.0])
    assert mean == 3 and high - mean == pytest.approx(1.9634, abs=1e-3) and mean - low == pytest.approx(high - mean)
    assert analysis.wilson(0, 15) == pytest.approx((0.0, 0.2039), abs=1e-4) and analysis.wilson(15, 15)[1] == pytest.approx(1.0)


def test_bootstrap_has_the_size_it_claims():
    """Under no difference p < 0.05 comes up in about 5 % of studies (a little more at 15 pairs, as is known of the bootstrap)."""
    generator = np.random.default_rng(1)
    found = [paired_bootstrap(generator.normal(size=15), seed=i, resamples=500).p < 0.05 for i in range(200)]
    assert 0.02 <= np.mean(found) <= 0.13


def test_bootstrap_finds_a_difference_and_says_how_small_a_one_it_would():
    generator = np.random.default_rng(2)
    noise = generator.normal(scale=0.1, size=15)
    noise -= noise.mean()
    clear, none = paired_bootstrap(noise + 0.2), paired_bootstrap(noise)
    assert clear.p < 0.001 and clear.low > 0 and none.p > 0.9
    assert clear.mean == pytest.approx(0.2) and clear.low < clear.mean < clear.high
    spread = noise.std(ddof=1) / math.sqrt(15)
    assert 2.2 * spread < clear.detectable < 3.6 * spread  # normal theory: 2.8 standard errors
    assert paired_bootstrap(-noise - 0.2).p == pytest.approx(clear.p, abs=1e-3)


def test_bootstrap_of_equal_differences():
    assert paired_bootstrap([0.0] * 15).p == 1.0
    assert paired_bootstrap([0.1] * 15).p < 1e-4


def test_masked_shares_are_of_their_own_sign():
    masked = {"4": [100, 10, 50, 20, 25, 5], "0": [0, 0, 10, 1, 1, 0]}
    row = analysis.masked_by_gap([{"masked": masked}, {"masked": {"4": [100, 0, 50, 0, 0, 0]}}])
    assert list(row) == ["0", "4"]
    assert row["4"] == {"tokens": 300, "positive": 0.05, "negative": 0.2, "low": pytest.approx(25 / 300), "high": pytest.approx(5 / 300)}
    assert row["0"]["positive"] is None and row["0"]["negative"] == 0.1


def test_the_sweep_chooses_by_the_mean_and_the_smaller_rate_at_equality():
    copies = [{"lr": lr, "final": final} for lr, final in ((1e-3, 0.5), (1e-3, 0.5), (3e-3, 0.9), (3e-3, 0.1), (3e-4, 0.2), (3e-4, 0.2))]
    assert analysis.best_rates([{"spec": {"method": "sao", "task": "dial"}, "copies": copies}]) == {"sao-dial": 1e-3}


# Tables


def test_tables_say_what_the_rows_say():
    rows = {f"sao-{task}-4": analysis.summarise([record([[0.2, 0.5], [0.2, 0.7]])]) for task in ("chain", "all")}
    lines = page.main_table(rows, ("sao", "grpo"), 4, ["chain", "dial"]).splitlines()
    assert len(lines) == 3 and lines[2].startswith("| sao | 0.600 ± 1.271 | not run | 0.600 ± 1.271 |")
    assert {line.count("|") for line in lines} == {lines[0].count("|")}
    table = page.bounds_table(rows, ("sao",), (0, 4)).splitlines()
    assert "not run" in table[2] and "0.600" in table[2]


def test_the_page_keeps_what_stands_outside_its_markers(tmp_path):
    path = tmp_path / "page.md"
    begin, end = page.BEGIN.format(name="tests"), page.END.format(name="tests")
    path.write_text(f"before\n{begin}\nold\n{end}\nafter \\1\n")
    page.replace(path, "tests", r"new \1 row")
    assert path.read_text() == f"before\n{begin}\nnew \\1 row\n{end}\nafter \\1\n"
    with pytest.raises(SystemExit, match="no lines"):
        page.replace(path, "bounds", "")


def test_the_documentation_has_every_marker():
    text = ablation.PAGE.read_text()
    for name in ("main table", "equal steps", "bounds", "tests", "rates"):
        assert page.BEGIN.format(name=name) in text and page.END.format(name=name) in text


def test_the_figure_holds_a_line_for_every_seed_and_a_mean():
    drawn = page.figure({"chain": {"sao": [[0.1, 0.5], [0.3, 0.7]]}, "dial": {"sao": [[0.0, 1.0], [0.0, 1.0]]}}, [0, 100])
    assert [len(axes.lines) for axes in drawn.axes] == [3, 3]
    assert list(drawn.axes[0].lines[-1].get_ydata()) == pytest.approx([0.2, 0.6])


# Cells


def spec(name: str, task: str = "chain", bound: int = 2) -> Spec:
    return Spec(name, task, bound, (0, 1), (1e-3, 1e-3), TINY)


@pytest.fixture(scope="module")
def warm(tmp_path_factory):
    """Warm starts of a few steps, enough for some reward; made once."""
    folder = tmp_path_factory.mktemp("warm")
    with pytest.MonkeyPatch.context() as patch:
        for task, steps in (("chain", 60), ("lookup", 120)):
            patch.setattr(TASKS[task], "warm_steps", steps)
            cell.warm_weights(TASKS[task], (0, 1), folder)
    return folder / "warm"


@pytest.fixture
def folder(warm, tmp_path):
    shutil.copytree(warm, tmp_path / "warm")
    return tmp_path


@pytest.mark.parametrize("name", methods.METHODS + methods.EIGHTFOLD)
def test_one_tiny_cell_of_every_method(name, folder):
    found = run_to_file(spec(name), folder)
    chosen = methods.method(name)
    eightfold = name in methods.EIGHTFOLD
    assert found["rollouts_per_step"] == TINY.rollouts * (8 if eightfold else 1)
    assert found["actor_steps"] == TINY.steps - chosen.critic_only_steps
    for copy in found["copies"]:
        assert len(copy["curve"]) == 1 + TINY.steps // TINY.eval_every and copy["diverged_at"] is None
        assert ("explained_variance" in copy["windows"]) == (name in methods.VALUE_BASED) == bool(chosen.critic_updates)
        assert max(map(int, copy["masked"])) == 2
        assert any(x and x > 0 for x in copy["windows"]["grad_norm"])
    row = analysis.summarise([found])
    assert row["runs"] == 2 and 0 <= row["final"] <= 1


def test_methods_are_what_their_names_say():
    made = {name: methods.method(name) for name in methods.METHODS}
    assert made["sao"].critic_updates == 2 and made["sao_k1"].critic_updates == 1
    assert made["sao"].frozen and not made["sao_full_critic"].frozen
    assert made["grpo"].group == made["grpo_dis"].group == 8 and made["running_mean"].pool == 64
    assert {name for name, m in made.items() if m.loss.__name__ == "dis_sum"} == {
        "sao", "sao_k1", "sao_full_critic", "sao_fixed_lambda", "sao_no_skip", "sao_step_values",
        "grpo_dis", "running_mean", "running_mean_global", "batch_mean", "single_dis",
    }  # fmt: skip


def test_parts_that_are_off_change_the_outcome(folder):
    """Every variant of sao departs from it in its weights: no switch is dead. Variants of the advantage alone share the critic's path."""
    seen = {}
    for name in ("sao", "sao_no_dis", "sao_k1", "sao_full_critic", "sao_fixed_lambda", "sao_no_skip", "sao_step_values"):
        job = cell.Run(spec(name, "lookup"), folder)
        for step in range(TINY.steps):
            job.step(step)
        seen[name] = job.policy["embed"].detach().numpy().tobytes()
    assert len(set(seen.values())) == len(seen)


def test_every_method_meets_the_same_prompts_and_starts_from_the_same_weights(folder):
    jobs = [cell.Run(spec(name), folder) for name in ("sao", "single_dis")]
    left, right = ([job._draw(copy)[0] for copy in (0, 1)] for job in jobs)
    assert all((a == b).all() for a, b in zip(left, right, strict=True)) and (left[0] != left[1]).any()
    assert all((jobs[0].policy[name] == jobs[1].policy[name]).all() for name in jobs[0].policy)


def test_the_sampler_is_as_old_as_the_bound_says(folder):
    job = cell.Run(spec("single_dis", bound=2), folder)
    past = [job.policy["embed"].detach().clone()]
    for step in range(5):
        assert (job.recent[0]["embed"] == past[max(0, job.version - 2)]).all()
        job.step(step)
        past.append(job.policy["embed"].detach().clone())


class Killed(BaseException):
    pass


def test_a_killed_ablation_goes_on_to_the_same_json(folder, monkeypatch):
    """Killed inside the second of three cells: the first is kept as it is, a half-made one leaves nothing that counts."""
    specs = [spec(name, bound=1) for name in ("sao", "grpo", "running_mean")]
    for name in ("whole", "killed"):
        shutil.copytree(folder / "warm", folder / name / "warm")
    whole = {s.key: run_to_file(s, folder / "whole") for s in specs}
    run_to_file(specs[0], folder / "killed")
    with monkeypatch.context() as patch:
        step = cell.Run.step
        patch.setattr(cell.Run, "step", lambda self, index: (_ for _ in ()).throw(Killed) if index == 6 else step(self, index))
        with pytest.raises(Killed):
            run_to_file(specs[1], folder / "killed")
        run_to_file(specs[0], folder / "killed")  # read, not run: it would be killed too
    assert [p.name for p in (folder / "killed" / "cells").iterdir()] == ["sao-chain-1.json"]
    for s in specs:
        run_to_file(s, folder / "killed")
    for s in specs:
        left, right = ((folder / where / "cells" / f"{s.key}.json").read_bytes() for where in ("whole", "killed"))
        assert left == right
    assert json.loads(left) == whole[specs[-1].key]


def test_a_cell_of_another_plan_is_made_again(folder):
    run_to_file(spec("single_dis"), folder)
    other = Spec("single_dis", "chain", 2, (0, 1), (2e-3, 2e-3), TINY)
    assert run_to_file(other, folder)["copies"][0]["lr"] == 2e-3


def test_the_plan_of_the_whole():
    rates = {f"{m}-{t}": 1e-3 for m in methods.METHODS for t in TASKS}
    specs = ablation.main_specs(Plan(), rates, methods.METHODS + methods.EIGHTFOLD)
    assert len(specs) == len({s.key for s in specs}) == 3 * (18 + 2 + 12)
    assert all(s.seeds == (0, 1, 2, 3, 4) and not set(s.seeds) & set(ablation.TUNING_SEEDS) for s in specs)
    sweep = ablation.tuning_specs(Plan(), methods.METHODS + methods.EIGHTFOLD)
    assert len(sweep) == 54 and {tuple(zip(s.lrs, s.seeds, strict=True)) for s in sweep} == {
        tuple((rate, seed) for rate in ablation.RATES for seed in ablation.TUNING_SEEDS)
    }


def test_conclusions_pair_seeds_and_tasks():
    records = {}
    for task in TASKS:
        for method, shift in (("sao", 0.3), ("running_mean", 0.0)):
            made = record([[0.2, 0.5]] * 5, finals=[shift + 0.1 * i for i in range(5)])
            records[f"{method}-{task}-4"] = made
    rows, tests = ablation.conclude(records)
    assert tests["running_mean"]["pairs"] == 15 and tests["running_mean"]["mean"] == pytest.approx(0.3)
    assert set(tests) == {"running_mean"} and rows["sao-all-4"]["runs"] == 15
