"""SmolLM2-135M-Instruct before and after `sao train experiment=smollm2`: held-out accuracy, mean@4, on questions it never trained on."""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from common import counters, read_jsonl, sao, write_result

if TYPE_CHECKING:
    from sao.environment import Task

IDS = ["smollm2_gain"]
QUESTIONS, SAMPLES, DRAWS = 300, 4, 10_000
TIME_LIMIT_S = 1800


def questions() -> list[Task]:
    """QUESTIONS different expressions of the held-out split; tasks are drawn with replacement, so more are drawn."""
    from sao.config_load import compose, environments
    from sao.tasks.source import build_held_out

    config = compose(["experiment=smollm2"])
    drawn = {task.payload["expression"]: task for task in build_held_out(config, environments(config), 20 * QUESTIONS)}
    assert len(drawn) >= QUESTIONS, f"experiment=smollm2 has only {len(drawn)} held-out questions"
    return list(drawn.values())[:QUESTIONS]


def best_constant(tasks: Sequence[Task]) -> float:
    """Accuracy of the one answer that is right most often: what a policy that ignores the question could reach."""
    from sao.envs.arithmetic.expressions import value

    return max(Counter(value(task.payload["expression"]) for task in tasks).values()) / len(tasks)


async def rewards(model_path: str, tasks: Sequence[Task]) -> np.ndarray[Any, Any]:
    """Rewards [tasks, SAMPLES] at temperature 1 of a model directory: the worker and the engine that train, without Ray around them."""
    from sao.config_load import compose, environments
    from sao.inference.pool import LocalHandle
    from sao.inference.vllm_engine import VllmEngine
    from sao.rollout.episodes import EpisodeFailure, EpisodeRequest
    from sao.rollout.worker import EpisodeWorker
    from sao.trajectory import EpisodeId

    config = compose(["experiment=smollm2"])
    env_configs = environments(config)
    engine = VllmEngine(model_path, config.engine, config.weights, name="eval")
    worker = EpisodeWorker(config, env_configs, model_path, [LocalHandle(engine, "eval")])

    gate = asyncio.Semaphore(config.engine.max_num_seqs)

    async def one(index: int) -> float:
        request = EpisodeRequest(EpisodeId(index), tasks[index // SAMPLES], 0, purpose="eval", temperature=1.0, pinned=True)
        async with gate:
            outcome, _ = await worker.run(request)
        if isinstance(outcome, EpisodeFailure):
            raise RuntimeError(f"{outcome.reason}: {outcome.message}")
        return outcome.meta.reward

    try:
        return np.array(await asyncio.gather(*(one(i) for i in range(len(tasks) * SAMPLES)))).reshape(len(tasks), SAMPLES)
    finally:
        await engine.close()


def gain_interval(before: np.ndarray[Any, Any], after: np.ndarray[Any, Any]) -> tuple[float, float]:
    """95 % percentile bootstrap of mean(after) - mean(before), each [questions]; questions are drawn in pairs."""
    difference = after - before
    means = np.random.default_rng(0).choice(difference, size=(DRAWS, len(difference))).mean(axis=1)
    return float(np.quantile(means, 0.025)), float(np.quantile(means, 0.975))


def training(run: Path, seconds: float) -> dict[str, Any]:
    """What the run folder says about how the gain came about."""
    metrics = read_jsonl(run / "metrics.jsonl")
    steps = [r for r in metrics if r["axis"] == "train"]
    keys = ("logprob_gap/same_version_mean", "logprob_gap/same_version_max", "sao/ess", "sao/dis_masked_frac_low", "sao/dis_masked_frac_high")
    return {
        "seconds": seconds,
        "batches": len(steps),
        "reward_first_20": statistics.fmean(r["reward/mean"] for r in steps[:20]),
        "reward_last_20": statistics.fmean(r["reward/mean"] for r in steps[-20:]),
        "step_seconds_median": statistics.median(r["timing_s/step"] for r in steps),
        **{key: statistics.fmean(r[key] for r in steps if key in r) for key in keys if any(key in r for r in steps)},
        "counters": counters(run),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--keep", type=Path, help="keep the run folder here, and use the finished one that is there")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="sao-bench-") as scratch:
        run = args.keep or Path(scratch) / "run"
        sao("train", "experiment=smollm2", "run.dry_run=true")  # the model is fetched and converted before the clock starts
        seconds = 0.0
        if not (run / "ledger.json").exists():
            seconds = sao("train", "experiment=smollm2", f"run.dir={run}", "run.progress=plain", timeout_s=2 * TIME_LIMIT_S)
        seconds = seconds or read_jsonl(run / "metrics.jsonl")[-1]["t"]
        base = json.loads((run / "command.json").read_text())["model"]
        asked = questions()
        before, after = (asyncio.run(rewards(path, asked)) for path in (base, str(run / "checkpoints" / "final" / "policy")))
        detail = training(run, seconds)
    low, high = gain_interval(before.mean(axis=1), after.mean(axis=1))
    gain = float(after.mean() - before.mean())
    write_result(
        "smollm2_gain",
        f"held-out accuracy of SmolLM2-135M-Instruct on arithmetic questions, mean@{SAMPLES}: gain by one training run of at most 30 minutes on 2 cores",
        gain,
        0.15,
        higher_is_better=True,
        values=[low, gain, high],
        detail={
            "interval_95": [low, high],
            "interval_bar": 0.05,
            "within_30_minutes": seconds <= TIME_LIMIT_S,
            "before": float(before.mean()),
            "after": float(after.mean()),
            "questions": QUESTIONS,
            "samples": SAMPLES,
            "best_constant_answer": best_constant(asked),
            "training": detail,
        },
    )


if __name__ == "__main__":
    main()
