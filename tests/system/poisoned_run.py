"""`sao` with a learner whose weights are spoiled once, everything else real. For fault tests only.

Use: POISON_STEP=4 python -m tests.system.poisoned_run online ... (the arguments of `sao`).
"""

from __future__ import annotations

import os
import sys
from typing import Any

from sao.runtime import cluster
from sao.runtime.actors import LearnerActor


class PoisonedLearnerActor(LearnerActor):
    """The learner of a run; after the step that POISON_STEP names, the policy's weights are noise."""

    def step(self, step: int, *trajectories: Any) -> Any:
        report = super().step(step, *trajectories)
        if step == int(os.environ["POISON_STEP"]):
            import torch

            with torch.no_grad():
                for parameter in self.learner.policy.model.parameters():
                    parameter.normal_(0.0, 0.5)
        return report


async def fluent(completion: str, row: dict[str, Any]) -> float:
    """A judge that every warm-started policy pleases and noise does not: text of plain words."""
    return float(len(completion.split()) >= 2 and all(c.isalpha() or c in " ,.!~\n" for c in completion) and completion.isascii())


if __name__ == "__main__":
    from sao.cli import main
    from tests.system.poisoned_run import PoisonedLearnerActor as Actor  # by its importable name, so that Ray's workers find it

    cluster.LearnerActor = Actor  # type: ignore[misc]
    os.environ["PYTHONPATH"] = os.pathsep.join([os.getcwd(), os.environ.get("PYTHONPATH", "")])
    sys.exit(main(sys.argv[1:]))
