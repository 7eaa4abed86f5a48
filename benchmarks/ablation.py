"""The ablation: SAO, SAO with any one part off, and the baselines, on three tasks, at equal rollouts.

    python benchmarks/ablation.py             # the cells at the published rates, the report; two processes of one thread
    python benchmarks/ablation.py --tune      # the learning-rate sweep first, then the cells at the rates it finds
    python benchmarks/ablation.py --report    # results, tables and figure from the cells that are there

Killed at any moment, the same command goes on: a cell is one JSON in --work, written when it is complete, and a pure function of its spec.

**What is measured.** A transformer of 30,000 parameters (examples/reference_sao.py), warm-started to mediocre skill on each (task, seed), learns by the
framework's own pure functions under the framework's own configuration of each method (conf/algo/NAME.yaml). Every step trains on 32 rollouts: 32 prompts,
or 4 prompts of 8 rollouts for the methods with groups. At one step every method has seen the same number of rollouts: curves and finals are at EQUAL
ROLLOUTS. The equal-steps view beside it is grpo_x8 and grpo_dis_x8: 32 prompts of 8 rollouts, the same number of optimiser steps and of prompts, 8 times
the rollouts. The first 10 steps of value-based methods train the critic alone; their rollouts count.

**Staleness.** The batch of version v was sampled with the weights of version v - bound, every token of it: the worst case that the bound admits, and the
same for all. The sampler holds its weights in bfloat16, as engines do, so that ratios differ from 1 at bound 0 as well. NOT simulated: time (and
with it the extra wait of a group for its slowest member, which favours the group methods here), versions that change inside an episode, episodes of
unlike age in one batch, retries and drops. Whitening is off for all: it would give every method a batch mean on top of the baseline it is named after.

**Tuning.** Each method gets the learning rate, of three, with the best mean final reward on each task over two seeds that are not used afterwards, at bound
4, with the rollouts of the main cells (the critic's rate is 5 times the policy's, as in the paper). The sweep is published in the results' JSON, and the cells
take their rates from there. Bounds 0 and 16 use the rates of bound 4; the x8 methods those of their namesakes.

**Collapse**, defined before the first run, on the held-out curve (an evaluation at the start and every 25 steps):
- best: the highest value so far, the warm start's included. A run is FALLEN at an evaluation whose value is below half of the best so far.
- collapsed: fallen at three evaluations in a row (50 steps); the collapse is dated at the first of them. A gradient that is not finite is a collapse.
- recovered: the first later evaluation at 80 % of the best before the collapse. Otherwise the time to recovery is right-censored at the end of the run.
- censored: fallen at the last evaluation or the last two, but not at three: too late to tell. Such a run counts neither as collapsed nor as not; the rate
  is collapsed / (runs - censored), and the rate with the censored counted as collapsed stands beside it. No collapse is right-censored at the end too: the
  rate is that of 500 steps, and says nothing of later ones.

**Tests.** Paired bootstrap over the 15 pairs of seed and task: sao and the other method start from the same weights and meet the same prompts (running_mean
draws its own from a pool of 64). The smallest true difference that the test would find in 80 % of such studies stands beside each p.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

from ablation_parts import analysis, page
from ablation_parts.cell import Plan, Spec, run_to_file
from ablation_parts.methods import EIGHTFOLD, METHODS
from ablation_parts.tasks import TASKS
from common import RESULTS, ROOT, save_figure, write_result

IDS = ("ablation_sao_collapse_rate", "ablation_grpo_collapse_rate", "ablation_sao_vs_running_mean_p", "ablation_sao_vs_single_dis_p")
SEEDS, TUNING_SEEDS = (0, 1, 2, 3, 4), (100, 101)
RATES = (1e-4, 3e-4, 1e-3)
BOUND, OTHER_BOUNDS = 4, (0, 16)
AT_ALL_BOUNDS = ("sao", "grpo", "grpo_dis", "ppo_clip", "running_mean", "single_dis")
IN_FIGURE = ("sao", "grpo", "grpo_dis", "ppo_clip", "running_mean", "single_dis", "vapo", "sao_no_dis")
PAGE, FIGURE = ROOT / "docs" / "concepts" / "ablation.md", ROOT / "docs" / "images" / "ablation.svg"


def tuning_specs(plan: Plan, methods: Sequence[str]) -> list[Spec]:
    """A cell holds all rates and seeds of a method on a task; the x8 methods take what their namesakes found."""
    tuned = dict.fromkeys(method.removesuffix("_x8") for method in methods)
    pairs = [(rate, seed) for rate in RATES for seed in TUNING_SEEDS]
    seeds, lrs = tuple(s for _, s in pairs), tuple(r for r, _ in pairs)
    return [Spec(method, task, BOUND, seeds, lrs, plan) for method in tuned for task in TASKS]


def main_specs(plan: Plan, rates: dict[str, float], methods: Sequence[str]) -> list[Spec]:
    bounds = [(method, BOUND) for method in methods] + [(method, bound) for bound in OTHER_BOUNDS for method in methods if method in AT_ALL_BOUNDS]
    pairs = [(method, task, bound) for method, bound in bounds for task in TASKS]
    return [Spec(m, task, bound, SEEDS, (rates[f"{m.removesuffix('_x8')}-{task}"],) * len(SEEDS), plan) for m, task, bound in pairs]


def _work(spec: Spec, folder: Path) -> tuple[str, dict[str, Any]]:
    import torch

    torch.set_num_threads(1)
    return spec.key, run_to_file(spec, folder)


def run_all(specs: list[Spec], folder: Path, processes: int) -> dict[str, dict[str, Any]]:
    """Every record by key; what is there already is read. The costly cells go first, so that no process idles at the end."""
    started, records = time.monotonic(), {}
    order = sorted(specs, key=lambda spec: (spec.method not in EIGHTFOLD, spec.key))
    with ProcessPoolExecutor(processes) as pool:
        waiting = [pool.submit(_work, spec, folder) for spec in order]
        for done in as_completed(waiting):
            key, record = done.result()
            records[key] = record
            finals = " ".join(f"{copy['final']:.2f}" for copy in record["copies"])
            print(f"{len(records):3d}/{len(specs)} {time.monotonic() - started:6.0f} s  {key:32s} {finals}", flush=True)
    return records


def read(folder: Path) -> dict[str, dict[str, Any]]:
    found = [json.loads(path.read_text()) for path in sorted((folder / "cells").glob("*.json"))]
    return {f"{r['spec']['method']}-{r['spec']['task']}-{r['spec']['bound']}": r for r in found}


def conclude(records: dict[str, dict[str, Any]]) -> tuple[dict[str, dict[str, Any]], dict[str, dict[str, Any]]]:
    """(rows by `method-task-bound`, task `all` for the whole; paired tests of sao against every method at the main bound)."""
    rows: dict[str, dict[str, Any]] = {}
    for method in METHODS + EIGHTFOLD:
        for bound in (BOUND, *OTHER_BOUNDS):
            found = {task: records[f"{method}-{task}-{bound}"] for task in TASKS if f"{method}-{task}-{bound}" in records}
            rows |= {f"{method}-{task}-{bound}": analysis.summarise([record]) for task, record in found.items()}
            if len(found) == len(TASKS):
                rows[f"{method}-all-{bound}"] = analysis.summarise(list(found.values()))
    tests = {}
    mine = rows.get(f"sao-all-{BOUND}")
    for method in METHODS[1:] + EIGHTFOLD:
        other = rows.get(f"{method}-all-{BOUND}")
        if mine and other:
            differences = [a - b for a, b in zip(mine["finals"], other["finals"], strict=True)]
            tests[method] = vars(analysis.paired_bootstrap(differences)) | {"differences": differences}
    return rows, tests


def found_by(sweep: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """What is published of a sweep: the rate of each method on each task, and every final reward behind it."""
    return {
        "rates": list(RATES),
        "seeds": list(TUNING_SEEDS),
        "chosen": analysis.best_rates(list(sweep.values())),
        "finals": {f"{r['spec']['method']}-{r['spec']['task']}": [[c["lr"], c["seed"], c["final"]] for c in r["copies"]] for r in sweep.values()},
    }


def published() -> dict[str, Any]:
    tuning: dict[str, Any] = json.loads((RESULTS / f"{IDS[0]}.json").read_text())["detail"]["tuning"]
    return tuning


def report(folder: Path, tuning: dict[str, Any]) -> None:
    records = read(folder / "main")
    rows, tests = conclude(records)
    shared = {"method": "measured on an in-process sampler with a fixed delay of weights", "plan": vars(Plan())}
    for name, method in (("ablation_sao_collapse_rate", "sao"), ("ablation_grpo_collapse_rate", "grpo")):
        row = rows.get(f"{method}-all-16")
        if row is None or row["collapse_rate"] is None:
            print(f"{name}: cells are missing; run the ablation to its end")
            continue
        write_result(
            name,
            f"{method} at staleness bound 16: share of 15 runs (3 tasks x 5 seeds) whose held-out reward collapsed; {row['censored']} censored",
            row["collapse_rate"],
            1.0 if method == "sao" else 0.0,
            higher_is_better=method != "sao",
            values=row["collapse_interval"],
            detail=shared
            | {
                "spread is": "Wilson's 95 % interval",
                "row": row,
                "rows": rows if method == "sao" else {},
                "tuning": tuning if method == "sao" else {},
            },
        )
    for name, method in (("ablation_sao_vs_running_mean_p", "running_mean"), ("ablation_sao_vs_single_dis_p", "single_dis")):
        if method not in tests:
            print(f"{name}: cells are missing; run the ablation to its end")
            continue
        test = tests[method]
        write_result(
            name,
            f"sao minus {method}, final held-out reward at equal rollouts, bound 4: two-sided p of a paired bootstrap over 15 seed x task pairs "
            f"(mean {test['mean']:+.3f}; {test['detectable']:.3f} would be found in 80 %)",
            test["p"],
            1.0,
            higher_is_better=False,
            values=test["differences"],
            detail=shared | {"spread is": "the 15 differences", "test": test, "all tests": tests},
        )
    write_page(records, rows, tests, tuning)


def write_page(records: dict[str, Any], rows: dict[str, Any], tests: dict[str, Any], tuning: dict[str, Any]) -> None:
    tasks = list(TASKS)
    page.replace(PAGE, "main table", page.main_table(rows, METHODS, BOUND, tasks))
    page.replace(PAGE, "equal steps", page.main_table(rows, ("sao", *EIGHTFOLD), BOUND, tasks))
    page.replace(PAGE, "bounds", page.bounds_table(rows, AT_ALL_BOUNDS, (0, BOUND, 16)))
    page.replace(PAGE, "tests", page.tests_table(tests))
    chosen = "; ".join(f"{method} " + ", ".join(f"{tuning['chosen'].get(f'{method}-{task}', 0):g}" for task in tasks) for method in METHODS)
    page.replace(PAGE, "rates", f"Chosen rates ({', '.join(tasks)}): {chosen}.")
    curves = {
        task: {m: [c["curve"] for c in records[f"{m}-{task}-{BOUND}"]["copies"]] for m in IN_FIGURE if f"{m}-{task}-{BOUND}" in records}
        for task in tasks
    }
    curves = {task: lines for task, lines in curves.items() if lines}
    if curves:
        plan = next(iter(records.values()))["spec"]["plan"]
        rollouts = [plan["rollouts"] * step for step in range(0, plan["steps"] + 1, plan["eval_every"])]
        save_figure(page.figure(curves, rollouts), FIGURE)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tune", action="store_true", help="run the learning-rate sweep and use its rates in place of the published ones")
    parser.add_argument("--report", action="store_true", help="write results and page from the cells that are there")
    parser.add_argument("--work", type=Path, default=ROOT / "runs" / "ablation", help="where cells are kept")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--only", default="", help="comma-separated methods; then no report is written")
    options = parser.parse_args()
    plan, folder, everyone = Plan(), options.work, METHODS + EIGHTFOLD
    methods = tuple(filter(None, options.only.split(","))) or everyone
    if unknown := set(methods) - set(everyone):
        sys.exit(f"--only {sorted(unknown)[0]} is no method; choose among {', '.join(everyone)}")
    if options.tune:
        run_all(tuning_specs(plan, methods), folder / "tune", options.processes)
    tuning = found_by(read(folder / "tune")) if options.tune else published()
    if not options.report:
        run_all(main_specs(plan, tuning["chosen"], methods), folder / "main", options.processes)
    if methods == everyone:
        report(folder, tuning)


if __name__ == "__main__":
    main()
