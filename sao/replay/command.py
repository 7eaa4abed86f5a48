"""`sao replay`: one learner step computed again, and what came of the comparison in words."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from sao.replay.compare import Comparison
from sao.replay.roll import Replay, replay
from sao.runtime.actors import thread_environment
from sao.runtime.lineage import stretch_of, stretches


def replay_command(run: Path, step: int, *, as_json: bool = False) -> int:
    """Print the result; 0 only when every number compared is the same to the last bit."""
    os.environ.update(thread_environment(stretch_of(stretches(run), step).config.learner.threads))  # read by torch when it is imported
    result = replay(run, step, lambda text: print(text, file=sys.stderr, flush=True))
    if as_json:
        facts = {"run": str(run), "step": step, "steps": result.steps, "start": result.start, "weights": result.weights}
        print(json.dumps(facts | result.found.as_json(), indent=2))
    else:
        print(text(result, step))
    return 0 if result.found.bit_equal else 1


def text(result: Replay, step: int) -> str:
    """The comparison as a table and one sentence."""
    found = result.found
    rolled = len(result.steps) - 1
    lines = [f"step {step}, from {result.start}" + (f" over {rolled} steps before it" if rolled else "")]
    lines += [f"note: {note}" for note in found.notes]
    lines.append(f"{'':<18}{'compared':>12}{'differ':>10}  largest difference")
    for name, tally in found.tallies.items():
        largest = "" if tally.largest is None else f"{tally.largest.difference:.3g} at {tally.largest}"
        lines.append(f"{name:<18}{tally.compared:>12,}{tally.differ:>10,}  {largest}".rstrip())
    if not result.weights:
        lines.append(f"weights: no whole checkpoint of right after step {step} is there to compare")
    return "\n".join([*lines, _verdict(found, result.weights)])


def _verdict(found: Comparison, weights: list[str]) -> str:
    if found.first is None:
        kept = f", and the weights of {' and '.join(weights)}" if weights else ""
        return f"bit-equal: {found.tokens:,} action tokens{kept}"
    return f"NOT bit-equal; it first departs at {found.first}"
