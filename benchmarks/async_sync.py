"""Asynchronous against synchronous: the same loop at staleness bound 8 and 0, the same cap on episodes in flight, stages calibrated equal alone.

Rollout alone: the closing evaluation of a run (held-out episodes at the cap, learner idle). Learner alone: its steps in a synchronous run, where the
engines idle meanwhile. The mean latency of the environment's start is set so that both make the same samples per second within 10 %. The critic is
updated twelve times a step: a learner that takes 50 ms a sample leaves the rollout time to wait for environments; with two updates both stages would
be nothing but arithmetic, and share two cores whatever the schedule.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import tempfile
from pathlib import Path
from typing import Any

from common import ROOT, counters, read_jsonl, sao, write_result
from demo import warm_start

IDS = ["async_sync_ratio", "async_bound_ratio"]
BATCH, SIGMA, LIMIT_S, BOUND, CRITIC_UPDATES = 32, 0.8, 60, 8, 12
INTERVAL_MS = 60  # the engine waits for requests to come together, which leaves the learner its core
PROBE = BATCH * 24  # episodes that measure the rollout stage alone; long against the last ones, which run with the cap not filled
SKIP = 4  # first steps, before the pipeline is full


def run(folder: Path, model: str, latency: float, staleness: int, steps: int) -> dict[str, Any]:
    """One run. After a synchronous one, held-out episodes measure the rollout stage alone, so that both stages are known at the same hour."""
    probe = PROBE if staleness == 0 else 0
    sao(
        "train", "experiment=demo", "model.warmstart=false", "model.factory=", f"model.path={model}", "env.target=slow_calculator:SlowCalculator",
        f"env.args={{latency_s: {latency:.4f}, sigma: {SIGMA}}}", f"train.steps={steps}", f"train.batch_size={BATCH}", "critic.critic_only_steps=0",
        f"critic.updates={CRITIC_UPDATES}",
        f"rollout.staleness={staleness}", f"rollout.max_running={BATCH}", f"rollout.time_limit_s={LIMIT_S}", f"engine.max_num_seqs={BATCH}",
        f"engine.step_interval_ms={INTERVAL_MS}", "optim.policy.lr=0", "eval.at_start=false", f"eval.at_end={'true' if probe else 'false'}", f"eval.tasks={max(probe, 1)}",
        "eval.temperatures=[1.0]", "checkpoint.every=0", "logger.wandb=disabled", "logger.report=false", "run.progress=plain", f"run.dir={folder}",
    )  # fmt: skip
    rows = [r for r in read_jsonl(folder / "metrics.jsonl") if r["axis"] == "train"][SKIP:]
    seconds = sum(r["timing_s/step"] for r in rows)
    found = {
        "samples_per_s": BATCH * len(rows) / seconds,
        "learn_s": statistics.fmean(r["timing_s/learn"] for r in rows),
        "wait_s": statistics.fmean(r["timing_s/wait_for_batch"] for r in rows),
        "publish_s": statistics.fmean(r["timing_s/publish"] for r in rows),
        "episode_s": statistics.fmean(r["timing_s/episode_mean"] for r in rows),
        "counters": counters(folder),
    }
    if probe:
        evaluation = read_jsonl(folder / "eval.jsonl")[-1]
        found["rollout_alone_per_s"] = evaluation["n"] / evaluation["seconds"]
        found["learner_alone_per_s"] = BATCH / (found["learn_s"] + found["publish_s"])
    print({k: v for k, v in found.items() if k != "counters"}, flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--steps", type=int, default=40)
    args = parser.parse_args()
    os.environ["PYTHONPATH"] = str(ROOT / "benchmarks")
    model = warm_start(0)
    root = Path(tempfile.mkdtemp(prefix="sao-async-"))
    latency, trials = 1.0, []
    for attempt in range(4):
        probe = run(root / f"probe{attempt}", model, latency, 0, SKIP + 8)
        rollout, learner = probe["rollout_alone_per_s"], probe["learner_alone_per_s"]
        trials.append({"latency_s": latency, "rollout_alone_per_s": rollout, "learner_alone_per_s": learner})
        if abs(rollout / learner - 1) <= 0.1:
            break
        latency = max(0.01, latency + BATCH / learner - BATCH / rollout)
    pairs = []
    for pair in range(args.pairs):
        order = (0, BOUND) if pair % 2 == 0 else (BOUND, 0)
        made = {staleness: run(root / f"pair{pair}-{staleness}", model, latency, staleness, SKIP + args.steps) for staleness in order}
        pairs.append({"sync": made[0], "async": made[BOUND]})
    ratios = [p["async"]["samples_per_s"] / p["sync"]["samples_per_s"] for p in pairs]
    bounds = [min(p["sync"]["rollout_alone_per_s"], p["sync"]["learner_alone_per_s"]) for p in pairs]
    shares = [p["async"]["samples_per_s"] / bound for p, bound in zip(pairs, bounds, strict=True)]
    detail = {
        "calibration": trials,
        "batch": BATCH,
        "cap_in_flight": BATCH,
        "sigma": SIGMA,
        "time_limit_s": LIMIT_S,
        "staleness_bound": BOUND,
        "critic_updates": CRITIC_UPDATES,
        "step_interval_ms": INTERVAL_MS,
        "pairs": pairs,
    }
    write_result(
        "async_sync_ratio", f"samples/s at staleness bound {BOUND} over bound 0, stages equal alone, same cap on episodes in flight", statistics.median(ratios),
        1.5, higher_is_better=True, values=ratios, detail=detail,
    )  # fmt: skip
    write_result(
        "async_bound_ratio", f"samples/s at staleness bound {BOUND} over the slower stage alone", statistics.median(shares), 0.85, higher_is_better=True,
        values=shares, detail={"bound_per_s": bounds, **detail},
    )  # fmt: skip
    shutil.rmtree(root)


if __name__ == "__main__":
    main()
