"""The stream of the paper (section 4.5) on the live system: how soon each method regains reward after a change. Four methods, five seeds.

Resumable run by run: `python benchmarks/online.py --keep DIR` uses the finished runs in DIR, goes on with one that was cut off, and makes the rest; after a
change of the code, give it an empty DIR.

What is counted, fixed before the first run:
    level        mean of the last 40 rewards before a shift, in training order
    regained     the first training step at which the mean of the last 40 rewards after the shift is at least 80 % of the level
    unlearned    the level is below 0.5: there is nothing to regain; such a pair is left out and counted
    censored     80 % was not regained before the phase ended; its length is then a lower bound
    ratio        steps of sao / steps of running_mean, pairs of one seed and one shift; the claim is their median. Where both are censored the pair is
                 left out and counted. Where only sao is, the pair counts as infinite; where only running_mean is, its lower bound is used, which makes
                 the ratio an upper bound.
    interval     the middle 95 % of that median when the five seeds are drawn anew, with their pairs; pairs of one seed are not independent
Each method regains 80 % of its OWN level; the levels stand beside the pairs. Every method trains 245 batches of 16, the first five of sao with its actor
frozen. `frozen` is the warm start left alone (learning rate 0).

Each method that learns gets the learning rate, of three, with the best mean reward of a stream of seed 100, which is used for nothing else; the critic's
rate is twice the policy's. These nine streams are in the result under detail.sweep.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

from common import ROOT, counters, sao, save_figure, write_result
from online_figure import draw

from sao.online.history import History, read_history, recoveries, summary
from sao.online.measures import moving_average

IDS = ["online_recovery_ratio"]
SAME_PROMPTS = "train.steps=245"  # sao's 240 and its five of the critic alone
METHODS = {
    "sao": [],
    "running_mean": ["algo=running_mean_global", SAME_PROMPTS],
    "batch_mean": ["algo=batch_mean", SAME_PROMPTS],
    "frozen": ["algo=batch_mean", SAME_PROMPTS],
}
SEEDS, TUNING_SEED = (0, 1, 2, 3, 4), 100
RATES = (2.5e-4, 5e-4, 1e-3)
FIGURE = ROOT / "docs" / "images" / "online.svg"


def run(folder: Path, method: str, seed: int, rate: float) -> None:
    """One run, unless it is finished; the warm start of its seed is made first, so that no method waits for it and all begin alike."""
    outcome = folder / "outcome.json"
    if outcome.exists() and json.loads(outcome.read_text())["state"] == "complete":
        return
    if (folder / "config.yaml").exists():
        sao("online", f"resume={folder}")
        return
    own = [f"seed={seed}", f"warmstart.seed={seed}"]
    base = ["experiment=style_stream", *METHODS[method], *own, f"optim.policy.lr={rate:g}", f"optim.critic.lr={2 * rate:g}"]
    subprocess.run([sys.executable, "-m", "sao.cli", "warmstart", *base], cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    sao("online", *base, f"run.dir={folder}", "run.progress=plain", "logger.report=false", "logger.wandb=disabled")


def sweep(keep: Path) -> list[dict[str, Any]]:
    """The stream of the tuning seed for each method that learns and each rate: {method, rate, reward: mean of the stream, steps after each shift}."""
    rows = []
    for method in METHODS:
        for rate in RATES if method != "frozen" else ():
            folder = keep / "sweep" / f"{method}-{rate:g}"
            run(folder, method, TUNING_SEED, rate)
            history = read_history(folder)
            assert history is not None
            facts = summary(history)
            steps = [shift.get("steps") for shift in facts["shifts"]]
            rows.append({"method": method, "rate": rate, "reward": facts["reward"], "steps_to_80_percent": steps})
            print(f"{method:<14} rate {rate:g}  mean reward {rows[-1]['reward']:.3f}", flush=True)
    return rows


def measured(folder: Path, method: str, seed: int) -> dict[str, Any]:
    """What a finished run says, and its curves by step for the figure."""
    history = read_history(folder)
    assert history is not None
    facts = summary(history)
    shifts = [
        {**row, "learned": found.learned, "censored": found.censored} if found is not None else row
        for row, (_, found) in zip(facts.pop("shifts"), recoveries(history), strict=True)
    ]
    steps = max(history.seconds) + 1
    return {
        "method": method,
        "seed": seed,
        **facts,
        "shifts": shifts,
        "seconds": history.seconds[steps - 1],
        "reward_by_step": by_step(history, steps),
        "accuracy_by_step": {name: [[s, round(v, 4)] for s, v in values] for name, values in history.accuracy.items()},
        "counters": counters(folder),
    }


def by_step(history: History, steps: int) -> list[float | None]:
    """The moving average of reward at the end of each step; None until its window is full."""
    last: list[float | None] = [None] * steps
    for step, value in zip(history.stream.steps, moving_average(history.stream.rewards), strict=True):
        last[step] = round(float(value), 4) if math.isfinite(value) else None
    return last


def ratios(runs: list[dict[str, Any]], baseline: str = "running_mean", unit: str = "steps") -> tuple[list[dict[str, Any]], dict[str, int]]:
    """A pair for each seed and shift that can be compared, and how many cannot and why. unit: steps, tokens or seconds until 80 %."""
    of = {(r["method"], r["seed"]): r["shifts"] for r in runs}
    pairs, left_out = [], {"unlearned": 0, "both_censored": 0, "not_measured": 0}
    for seed in SEEDS:
        for ours, theirs in zip(of["sao", seed], of[baseline, seed], strict=True):
            if "level" not in ours or "level" not in theirs:
                left_out["not_measured"] += 1
            elif not (ours["learned"] and theirs["learned"]):
                left_out["unlearned"] += 1
            elif ours["censored"] and theirs["censored"]:
                left_out["both_censored"] += 1
            else:
                ratio = math.inf if ours["censored"] else ours[unit] / theirs[unit]
                censored = "sao" if ours["censored"] else baseline if theirs["censored"] else ""
                pairs.append({"seed": seed, "shift": f"{ours['before']} -> {ours['after']}", "ratio": ratio, "censored": censored})
                pairs[-1] |= {f"sao_{unit}": ours[unit], f"{baseline}_{unit}": theirs[unit]}
                pairs[-1] |= {"sao_level": ours["level"], f"{baseline}_level": theirs["level"]}
    return pairs, left_out


def beside(runs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The same median against each baseline that learns, also in tokens and seconds; None where it is infinite. Seconds are those of a shared machine."""
    rows = []
    for baseline in ("running_mean", "batch_mean"):
        for unit in ("steps", "tokens", "seconds"):
            values = [pair["ratio"] for pair in ratios(runs, baseline, unit)[0]]
            median = statistics.median(values) if values else math.inf
            rows.append({"baseline": baseline, "unit": unit, "median": median if math.isfinite(median) else None, "pairs": len(values)})
    return rows


def interval(pairs: list[dict[str, Any]], draws: int = 10_000) -> list[float | None]:
    """95 % bootstrap interval of the median ratio over seeds, None where an end of it is infinite."""
    of_seed = [[p["ratio"] for p in pairs if p["seed"] == seed] for seed in sorted({p["seed"] for p in pairs})]
    generator = random.Random(0)
    samples = (generator.choices(of_seed, k=len(of_seed)) for _ in range(draws))
    medians = sorted(statistics.median(ratio for ratios in sample for ratio in ratios) for sample in samples)
    ends = medians[round(0.025 * draws)], medians[round(0.975 * draws) - 1]
    return [end if math.isfinite(end) else None for end in ends]


def report(runs: list[dict[str, Any]], tuning: list[dict[str, Any]]) -> None:
    save_figure(draw(runs), FIGURE)
    pairs, left_out = ratios(runs)
    for method in METHODS:
        of = [r for r in runs if r["method"] == method]
        shifts = [f"{s['steps']}{'+' if s['censored'] else ''}" if s.get("learned") else "-" for r in of for s in r["shifts"]]
        print(f"{method:<14} reward {statistics.fmean(r['reward'] for r in of):.3f}  steps to 80 % {' '.join(shifts)}", flush=True)
    detail = {
        "pairs": [p | {"ratio": None if math.isinf(p["ratio"]) else p["ratio"]} for p in pairs],
        "left_out": left_out,
        "beside": beside(runs),
        "sweep": tuning,
        "minutes": sum(r["seconds"] for r in runs) / 60,
        "runs": runs,
    }
    values = [p["ratio"] for p in pairs]
    if not values or math.isinf(statistics.median(values)):
        (ROOT / "benchmarks" / "results" / "online_runs.json").write_text(json.dumps(detail, indent=1) + "\n")
        raise SystemExit(f"online_recovery_ratio is not a number: {len(values)} pairs, {left_out}; the runs are in results/online_runs.json")
    largest = max(v for v in values if math.isfinite(v))
    write_result(
        "online_recovery_ratio",
        "steps to regain 80 % of reward after a change of the rewarded style, sao over the running mean of 128, median over shifts and seeds",
        statistics.median(values),
        1.0,
        higher_is_better=False,
        values=[min(v, largest) for v in values],
        detail=detail | {"infinite": sum(map(math.isinf, values)), "interval": interval(pairs)},
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--keep", type=Path, required=True, help="where the run folders are and stay")
    args = parser.parse_args()
    keep = args.keep.resolve()
    tuning = sweep(keep)
    rates = {
        method: max((row for row in tuning if row["method"] == method), key=lambda row: row["reward"])["rate"]
        for method in METHODS
        if method != "frozen"
    }
    for seed in SEEDS:
        for method in METHODS:
            run(keep / f"{method}-{seed}", method, seed, rates.get(method, 0.0))
    report([measured(keep / f"{method}-{seed}", method, seed) for seed in SEEDS for method in METHODS], tuning)


if __name__ == "__main__":
    main()
