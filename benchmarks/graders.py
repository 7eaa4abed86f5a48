"""Verdicts on answers written by hand, and what bombs cost those who wait: a wrong verdict trains or scores the wrong thing."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from typing import Any

from common import write_result
from grader_pairs import BOMBS, pairs

from sao.evals.symbolic import close_shared, grade, shared_grader

IDS = ["grader_table_wrong"]
GRADES, EVERY = 200, 20  # bombs come once in so many
TICK_S = 0.005


async def table() -> tuple[list[str], Counter[str]]:
    """The wrong verdicts, and how many pairs of each kind there are."""
    wrong: list[str] = []
    kinds: Counter[str] = Counter()
    for kind, answer, gold, expected in pairs():
        kinds[kind] += 1
        verdict = await grade(answer, gold)
        if verdict.kind != expected:
            wrong.append(f"{answer} || {gold}: {verdict.kind} ({verdict.reason}) instead of {expected}")
    return wrong, kinds


async def under_bombs() -> dict[str, Any]:
    """200 grades at once, bombs among them: seconds until the last, verdicts, and how late an event loop beside them is called."""
    lags: list[float] = []
    loop = asyncio.get_running_loop()

    async def beat() -> None:
        while True:
            due = loop.time() + TICK_S
            await asyncio.sleep(TICK_S)
            lags.append(loop.time() - due)

    honest = [pair for pair in pairs() if pair[3] in ("correct", "wrong")]
    asked = [(BOMBS[i // EVERY % len(BOMBS)], r"\sqrt{2}+1", "") if i % EVERY == 0 else honest[i % len(honest)][1:] for i in range(GRADES)]
    beating = asyncio.create_task(beat())
    await asyncio.sleep(2)
    idle, lags[:] = max(lags), []
    started = time.monotonic()
    verdicts = await asyncio.gather(*(grade(answer, gold) for answer, gold, _ in asked))
    seconds = time.monotonic() - started
    beating.cancel()
    wrong = sum(verdict.kind != expected for verdict, (_, _, expected) in zip(verdicts, asked, strict=True) if expected)
    lags.sort()
    return {
        "grades": GRADES,
        "bombs": sum(not expected for _, _, expected in asked),
        "seconds": round(seconds, 1),
        "verdicts_on_bombs": dict(Counter(v.kind for v, (_, _, expected) in zip(verdicts, asked, strict=True) if not expected)),
        "wrong_beside_bombs": wrong,
        "lag_ms_max_before": round(idle * 1000, 1),
        "lag_ms_max": round(lags[-1] * 1000, 1),
        "lag_ms_p99": round(lags[int(0.99 * len(lags))] * 1000, 1),
    }


def main() -> None:
    wrong, kinds = asyncio.run(table())
    print("\n".join(wrong), flush=True)
    bombs = asyncio.run(under_bombs())
    workers = len(shared_grader().pids)
    close_shared()
    print(bombs)
    write_result(
        "grader_table_wrong",
        f"wrong verdicts on {sum(kinds.values())} pairs of answer and gold, and on {GRADES} graded at once with {bombs['bombs']} bombs among them "
        f"({bombs['seconds']} s in all, event loop at most {bombs['lag_ms_max']} ms late)",
        len(wrong) + bombs["wrong_beside_bombs"],
        0,
        higher_is_better=False,
        values=[float(len(wrong) + bombs["wrong_beside_bombs"])],
        detail={"pairs": dict(kinds), "bombs": bombs, "wrong": wrong, "workers": workers},
    )


if __name__ == "__main__":
    main()
