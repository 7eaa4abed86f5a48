"""What is trained keeps a mixture's shares, however slow one of its environments is: the real loop in virtual time (`benchmarks/mixture.py` measures it live)."""

from __future__ import annotations

import random
from itertools import accumulate

from sao.loop import TrainingLoop
from sao.tasks.mixture import Mixture
from sao.tasks.procedural import ProceduralSource
from tests.fakes import CountingLearner, FakeEngines, SilentObserver, TimedWorkers
from tests.unit.tasks.test_task_source import Sums
from tests.unit.test_loop import make_config
from tests.virtual_time import run

SHARE, BATCH = 0.3, 32


def error_points(overdue: str, episodes: int) -> float:
    """Error of the slow environment's share of the first `episodes` trained, in points, in a run that goes on after them."""
    config = make_config(staleness=4, batch=BATCH, steps=episodes // BATCH + 6, overdue=overdue)
    source = Mixture([ProceduralSource(Sums, name=name, seed=0) for name in ("quick", "slow")], {"quick": 1 - SHARE, "slow": SHARE})
    rng, engines, learner = random.Random(0), FakeEngines(0.1), CountingLearner(config)
    workers = TimedWorkers(engines, lambda request: (10.0 if request.task.environment == "slow" else 1.0) * rng.lognormvariate(-0.125, 0.5))
    loop = TrainingLoop(config, source, workers, learner, engines, SilentObserver())
    run(loop.run())
    assert max(learner.staleness) <= 4 and loop.ledger.audit()["closes"]
    slow = list(accumulate(t.task_id.startswith("slow/") for batch in learner.batches for t in batch))
    return abs(slow[episodes - 1] / episodes - SHARE) * 100


def test_the_trained_share_is_within_a_point_after_3000_episodes() -> None:
    assert error_points("wait", 3000) < 1.0


def test_the_measure_sees_shares_that_are_lost() -> None:
    """The guard removed: with overdue=drop slow tasks are dropped for their age."""
    assert error_points("drop", 1000) > 1.0
