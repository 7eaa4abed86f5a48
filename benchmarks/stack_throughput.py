"""Tokens per second through the whole stack (driver, worker, routing, Ray, engine) against the same engine class driven directly, SmolLM2, 16 at once.

The direct side gets the token ids of the prompts that the stack rendered and, for each, the number of tokens that were sampled there.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import shutil
import statistics
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

from common import write_result

IDS = ["stack_throughput_ratio"]
CONCURRENT, TOKENS, REQUESTS = 16, 128, 64
SUBJECTS = ("a river", "the sea", "an old clock", "a train at night", "two sisters", "a lighthouse", "winter", "a lost letter")
OVERRIDES = [
    "model=smollm2", "env=single_turn", "reward=stack_throughput:nothing", f"rollout.max_turn_tokens={TOKENS}", "rollout.max_tokens=512",
    "engine.max_model_len=512", f"engine.max_num_seqs={CONCURRENT}", "engine.kv_cache_mb=768", "critic.freeze=[]",
]  # fmt: skip


def nothing(completion: str, row: dict[str, Any]) -> float:
    return 0.0


def through_the_stack(config: Any, model_path: str, tasks: list[Any], folder: Path) -> tuple[float, list[tuple[list[int], int]]]:
    """Tokens per second, and (prompt ids, sampled tokens) of every episode."""
    from sao.config_load import environments
    from sao.evals.heldout import evaluate
    from sao.runtime.cluster import Cluster

    handles: list[Any] = []

    class Keeping:
        def __init__(self, runner: Any) -> None:
            self.runner = runner

        async def run(self, request: Any) -> Any:
            outcome = await self.runner.run(request)
            handles.append(outcome.handle)
            return outcome

    async def main() -> Any:
        import ray

        async with Cluster(config, environments(config), model_path, folder, learner=False) as cluster:
            cluster.engines()
            workers = cluster.workers()
            options = {"version": 0, "temperature": 1.0, "concurrency": CONCURRENT}
            await evaluate(workers, tasks[:CONCURRENT], name="warm", **options)  # the first sampled batch costs seconds once
            result = await evaluate(Keeping(workers), tasks, name="measured", **options)
            return result, ray.get(handles)

    result, trajectories = asyncio.run(main())
    pairs = [(t.segments[0].token_ids[: int(t.segments[0].action_mask.argmax())].tolist(), t.sampled_tokens) for t in trajectories]
    return result.tokens / result.seconds, pairs


def directly(config: Any, model_path: str, pairs: list[tuple[list[int], int]]) -> float:
    """Tokens per second of the engine class in a plain process, the same prompts and lengths, as many at once."""
    import os

    from sao.runtime.actors import engine_environment

    os.environ.update(engine_environment(config.engine.threads))
    import numpy as np

    from sao.inference.pool import complete
    from sao.inference.protocol import GenerateRequest
    from sao.inference.vllm_engine import VllmEngine
    from sao.trajectory import SamplingSpec

    engine = VllmEngine(model_path, config.engine, config.weights, name="direct")

    async def run(chosen: list[tuple[list[int], int]], tag: str) -> float:
        gate = asyncio.Semaphore(CONCURRENT)

        async def one(index: int, ids: list[int], budget: int) -> None:
            async with gate:
                name = f"{tag}{index}"
                await complete(engine, GenerateRequest(name, np.array(ids, np.int32), SamplingSpec(max_tokens=budget), name))

        started = time.monotonic()
        await asyncio.gather(*(one(i, ids, budget) for i, (ids, budget) in enumerate(chosen)))
        return sum(budget for _, budget in chosen) / (time.monotonic() - started)

    async def main() -> float:
        await run(pairs[:CONCURRENT], "warm")
        return await run(pairs, "measured")

    return asyncio.run(main())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=3)
    args = parser.parse_args()
    from sao.config_load import compose, environments
    from sao.runtime.models import prepare
    from sao.tasks.source import build_source

    root = Path(tempfile.mkdtemp(prefix="sao-stack-"))
    rows = root / "prompts.jsonl"
    rows.write_text(
        "".join(
            json.dumps({"prompt": f"Tell a long story about {SUBJECTS[i % len(SUBJECTS)]}, part {i}.", "answer": ""}) + "\n" for i in range(REQUESTS)
        )
    )
    config = compose([*OVERRIDES, f"data.path={rows}"])
    model_path = prepare(config)
    source = build_source(config, environments(config))
    tasks = [source.next() for _ in range(REQUESTS)]
    measured = []
    for pair in range(args.pairs):
        stack, pairs = through_the_stack(config, model_path, tasks, root / f"run{pair}")
        with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
            direct = pool.submit(directly, config, model_path, pairs).result()
        tokens = sum(n for _, n in pairs)
        measured.append(
            {"stack_tokens_per_s": stack, "direct_tokens_per_s": direct, "ratio": stack / direct, "sampled_tokens": tokens, "requests": len(pairs)}
        )
        print(measured[-1], flush=True)
    ratios = [m["ratio"] for m in measured]
    write_result(
        "stack_throughput_ratio", "tokens/s through worker, routing, Ray and engine over the engine class driven directly (SmolLM2, 16 at once, 128 tokens)",
        statistics.median(ratios), 0.9, higher_is_better=True, values=ratios,
        detail={"pairs": measured, "dropped": 0, "truncated": "every answer ends at the token limit or at a stop token"},
    )  # fmt: skip
    shutil.rmtree(root)


if __name__ == "__main__":
    main()
