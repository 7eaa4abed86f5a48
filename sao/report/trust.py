"""Whether the critic is a guide yet.

Judged by the explained variance 1 - Var(R - V) / Var(R) of the last WINDOW steps, each read before that step's critic updates. Below the threshold the
values tell the actor little that the outcome alone would not, and with `values` worse than a constant they add noise. Where every return of a batch is the
same it is undefined, which speaks for nobody.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from statistics import median
from typing import Any

WINDOW = 5
ENOUGH = 3  # steps of the window with a value, before which nothing is trusted
EXPLAINED, LOSS = "critic/vf_explained_var", "critic/vf_loss"
MEND = "give it more steps before the actor moves (critic.critic_only_steps), more updates (critic.updates), or a fitted critic (run.phase=critic, then critic.path)"


@dataclass(frozen=True)
class Verdict:
    """explained: the window's median, None where no step has a value. text: one sentence; for a critic that is not trusted it says what to do."""

    trusted: bool
    explained: float | None
    text: str


def judge(window: Sequence[float | None], threshold: float) -> Verdict:
    """window: explained variance of the last steps, oldest first, None where it is undefined; only the last WINDOW count."""
    last = window[-WINDOW:]
    known = [value for value in last if value is not None]
    if not known:
        steps = "the last step" if len(last) == 1 else f"the last {len(last)} steps"
        return Verdict(
            False, None, f"the critic cannot be judged: every reward of {steps} was the same; check the reward, or mix easier and harder tasks"
        )
    middle = median(known)
    if middle > threshold and len(known) >= ENOUGH:
        return Verdict(True, middle, f"the critic explains {middle:z.0%} of the returns' variance (median of {len(known)} steps)")
    said = (
        "no better than a constant" if middle <= 0 else f"where {threshold:.0%} are wanted" if middle <= threshold else "in too few steps to count on"
    )
    return Verdict(False, middle, f"the critic is not to be trusted yet: it explains {middle:z.0%} of the returns' variance, {said}; {MEND}")


def verdicts(records: Sequence[Mapping[str, Any]], threshold: float) -> list[tuple[float, Verdict]]:
    """(step, verdict) after every training step that has a critic, from a run's records of the train axis."""
    found: list[tuple[float, Verdict]] = []
    window: list[float | None] = []
    for record in records:
        if LOSS in record or EXPLAINED in record:
            window.append(record.get(EXPLAINED))
            found.append((float(record["step"]), judge(window, threshold)))
    return found


def untrusted_spans(found: Sequence[tuple[float, Verdict]]) -> list[tuple[float, float]]:
    """Stretches of steps (first, last) in which the critic was not trusted."""
    spans = []
    for trusted, group in groupby(found, key=lambda pair: pair[1].trusted):
        steps = [step for step, _ in group]
        if not trusted:
            spans.append((steps[0], steps[-1]))
    return spans
