"""Two environments mixed 70 to 30, one of them ten times slower: what is trained keeps the mixture's shares.

Everything is real: vLLM, Ray, the learner, the ledger. Each run is longer than what is measured, so that the first 3,000 trained episodes are not simply all
that were drawn. Both ways round: the slow environment has the smaller share, then the larger one.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

from common import ROOT, counters, read_jsonl, sao, write_result
from slow_calculator import SlowCalculator

from sao.environment import Action, Context, Message, StepResult, Task
from sao.report.store import read_columns, stored_steps

IDS = ["mixture_error_points"]
SHARE, MEASURED = 0.7, 3000
BATCH, BOUND, STEPS = 32, 4, 125  # 4,000 episodes, up to 160 of them in flight
QUICK_S, SLOW_S, SIGMA = 0.2, 9.0, 0.5  # of an environment's start, before the engine's second or less
SETTLED = 500  # episodes before which a share is not looked at: a third of them may be the first ones in flight


class Timed(SlowCalculator):
    """Says how long an episode took, under the name of its environment."""

    def __init__(self, task: Task, **args: Any) -> None:
        super().__init__(task, **args)
        self.environment = task.environment
        self.began = 0.0

    async def reset(self, context: Context) -> Sequence[Message]:
        self.began = time.monotonic()
        return await super().reset(context)

    async def step(self, action: Action) -> StepResult:
        result = await super().step(action)
        return StepResult(result.observation, result.reward, result.terminated, info={f"seconds_{self.environment}": time.monotonic() - self.began})


def variant(name: str, latency: float) -> str:
    return f"data.variants.{name}={{base: calculator, target: 'mixture:Timed', args: {{latency_s: {latency}, sigma: {SIGMA}}}}}"


def run(folder: Path, slow_share: float, steps: int) -> dict[str, Any]:
    shares = {"quick": 1 - slow_share, "slow": slow_share}
    sao(
        "train", "experiment=demo", "model.warmstart=false", *(f"data.mixture.{name}={share:g}" for name, share in shares.items()), variant("quick", QUICK_S),
        variant("slow", SLOW_S), f"train.steps={steps}", f"train.batch_size={BATCH}", "critic.critic_only_steps=0", f"rollout.staleness={BOUND}",
        "optim.policy.lr=0", "engine.step_interval_ms=5", "eval.at_start=false", "eval.at_end=false", "checkpoint.every=0", "logger.wandb=disabled",
        "logger.report=false", "run.progress=plain", f"run.dir={folder}",
    )  # fmt: skip
    return read(folder, slow_share)


def read(folder: Path, slow_share: float) -> dict[str, Any]:
    """Errors of the slow environment's share, in points, over the trained episodes in the order of the batches."""
    order = [name for step in sorted(stored_steps(folder)) for name in trained(folder, step)]
    slow = [0, *accumulate(name == "slow" for name in order)]
    error = [abs(count / max(1, taken) - slow_share) * 100 for taken, count in enumerate(slow)]
    windows = [abs((slow[end] - slow[end - MEASURED]) / MEASURED - slow_share) * 100 for end in range(MEASURED, len(slow))]
    rows = [r for r in read_jsonl(folder / "metrics.jsonl") if r["axis"] == "train"]
    seconds = {name: statistics.fmean(r[key] for r in rows if key in r) for name in ("quick", "slow") for key in [f"env/seconds_{name}"]}
    return {
        "slow_share": slow_share,
        "trained": len(order),
        "error_points": error[MEASURED],
        "largest_after_a_batch": max(error[taken] for taken in range(SETTLED, len(error)) if taken % BATCH == 0),
        "largest_over_prefixes": max(error[SETTLED:]),
        "largest_over_windows": max(windows),
        "episode_s": seconds,
        "slower": seconds["slow"] / seconds["quick"],
        "counters": counters(folder),
    }


def trained(folder: Path, step: int) -> list[str]:
    """The environments of one step's episodes, one entry for each episode."""
    table = read_columns(folder, [step], ["episode_ordinal", "environment"])
    return list(dict(zip(table["episode_ordinal"].to_pylist(), table["environment"].to_pylist(), strict=True)).values())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=STEPS)
    args = parser.parse_args()
    os.environ["PYTHONPATH"] = str(ROOT / "benchmarks")
    root = Path(tempfile.mkdtemp(prefix="sao-mixture-"))
    runs = [run(root / f"slow{share:g}", share, args.steps) for share in (1 - SHARE, SHARE)]
    for made in runs:
        print({name: value for name, value in made.items() if name != "counters"}, flush=True)
    errors = [made["error_points"] for made in runs]
    write_result(
        "mixture_error_points", f"two environments mixed 70 to 30, one ten times slower: error of the trained share at {MEASURED} episodes, the larger of "
        "both ways round, in points", max(errors), 1.0, higher_is_better=False, values=errors,
        detail={"batch": BATCH, "staleness_bound": BOUND, "start_s": [QUICK_S, SLOW_S], "sigma": SIGMA, "prefixes_from": SETTLED, "runs": runs},
    )  # fmt: skip
    shutil.rmtree(root)


if __name__ == "__main__":
    main()
