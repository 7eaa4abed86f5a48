"""Training a run's stored batches again, from the nearest checkpoint up to one step."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sao.errors import UserError
from sao.replay.compare import Comparison
from sao.report.metrics import read_metrics, surviving
from sao.report.steps import numbered, step_name
from sao.report.store import StoredEpisode, read_trajectories, stored_steps
from sao.runtime.checkpoints import FOLDER, damage
from sao.runtime.lineage import Stretch, made_on, roll_backs, stretch_of, stretches
from sao.runtime.models import make_base
from sao.runtime.saved import FINAL, fault_of, final_step

if TYPE_CHECKING:
    from sao.learner.learner import TorchLearner


@dataclass
class Replay:
    """What was replayed: `steps` from `start` (a checkpoint's name, or the initial weights) on, the last one asked for. `weights`: compared with."""

    steps: list[int]
    start: str
    found: Comparison
    weights: list[str] = field(default_factory=list)


def replay(run: Path, step: int, say: Callable[[str], None] = lambda text: None) -> Replay:
    """Train `step` of a run again and compare it, and every step on the way to it, with what the run recorded.

    step: 0-based, as the files are named. say: hears of the progress in one line at a time. The learner's process environment (threads) is the
    caller's to set before torch is imported. Raises UserError when the run folder does not hold what that takes.
    """
    lineage = stretches(run)
    gaps = roll_backs(run)
    start = _start(run, step, max((gap for gap in gaps if gap <= step), default=0), say)
    steps = list(range(start or 0, step + 1))
    _check_stored(run, step, steps)
    result = Replay(steps, "the initial weights" if start is None else f"checkpoint {step_name(start)}", Comparison())
    recorded = {int(record["step"]): record for record in surviving(read_metrics(run), "train")}
    with ExitStack() as cleanup:
        scratch = Path(cleanup.enter_context(tempfile.TemporaryDirectory(prefix="sao-replay-")))
        stretch = stretch_of(lineage, steps[0])
        learner = _learner(stretch, scratch, None if start is None else run / FOLDER / step_name(start))
        result.found.notes += _machine_notes(stretch)
        for at in steps:
            if stretch_of(lineage, at) is not stretch:
                stretch, learner = _hand_over(learner, stretch, stretch_of(lineage, at), scratch)
            say(f"step {at}, {step - at} more" if at < step else f"step {at}")
            stored = _batch(run, at)
            report = learner.step([episode.trajectory for episode in stored], at)
            result.found.records(at, stored, report.records)
            if at in recorded:
                result.found.metrics(at, recorded[at], report.metrics)
            else:
                result.found.notes.append(f"step {at}: its metrics were not written")
        if step + 1 in gaps:
            result.found.notes.append(f"a roll-back undid step {step}, so what was saved after it are earlier weights, not to be compared")
        else:
            _weights(result, run, step, learner, scratch)
    return result


def _start(run: Path, step: int, gap: int, say: Callable[[str], None]) -> int | None:
    """The newest sound checkpoint that at most `step` steps, and at least `gap`, had led to; None: the initial weights."""
    for at in reversed(numbered(run / FOLDER)):
        if not gap <= at <= step:
            continue
        fault = damage(run / FOLDER / step_name(at))
        if fault is None:
            return at
        say(f"checkpoint {step_name(at)} is not used: {fault}")
    if gap:
        raise UserError(f"--step {step} of {run} comes after a roll-back before step {gap}, and no checkpoint made since is left to start from")
    return None


def _check_stored(run: Path, step: int, steps: list[int]) -> None:
    there = stored_steps(run)
    if not there:
        raise UserError(f"{run} holds no stored trajectories to train again; train with logger.trajectories=all")
    if step not in there:
        raise UserError(f"--step {step} is not stored in {run}; it has steps {there[0]} to {there[-1]}")
    missing = [at for at in steps if at not in there]
    if missing:
        raise UserError(
            f"--step {step} of {run} needs the batches from step {steps[0]} on, and that of step {missing[0]} is not stored; "
            "train with logger.trajectories=all, or choose a step after a checkpoint"
        )


def _batch(run: Path, step: int) -> list[StoredEpisode]:
    stored = read_trajectories(run, [step])
    if not any(record is not None for episode in stored for record in episode.records):
        raise UserError(f"step {step} of {run} is stored without the per-token training record, so there is nothing to compare it with")
    return stored


def _learner(stretch: Stretch, scratch: Path, checkpoint: Path | None) -> TorchLearner:
    """A learner as that run's learner process made it: from the initial weights, or from a checkpoint, which holds all it needs but a KL term's reference."""
    from sao.learner.learner import TorchLearner

    config, model = stretch.config, stretch.model
    if checkpoint is not None and not config.algo.kl_coef:
        critic = checkpoint / "critic"
        model, config = str(checkpoint / "policy"), replace(config, critic=replace(config.critic, path=str(critic) if critic.exists() else ""))
    elif not model or not (Path(model) / "config.json").is_file():
        if config.model.warmstart or config.model.path or not config.model.factory:
            raise UserError(
                f"the model this run started from, {model or 'which it does not name'}, is not there any more; put it back, or choose a step after a checkpoint"
            )
        model = make_base(config, str(scratch / "model"))
    learner = TorchLearner(config, model, total_steps=config.train.steps)
    if checkpoint is not None:
        learner.restore(str(checkpoint))
    return learner


def _hand_over(learner: TorchLearner, before: Stretch, after: Stretch, scratch: Path) -> tuple[Stretch, TorchLearner]:
    """The next learner process began where this one stands, from a checkpoint; without a change of configuration that makes no difference."""
    if after.config == before.config:
        return after, learner
    folder = scratch / "handed-over"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    learner.save(str(folder))
    return after, _learner(after, scratch, folder)


def _machine_notes(stretch: Stretch) -> list[str]:
    """What differs between the machine of the run and this one, as far as the last bits of the arithmetic may depend on it."""
    if not stretch.made_on:
        return ["the run kept no record of its learner's machine, torch and threads (learner.jsonl); config.yaml is taken to hold for every step"]
    here: dict[str, Any] = made_on()
    return [f"{name}: the run had {was}, here it is {here[name]}" for name, was in stretch.made_on.items() if name in here and here[name] != was]


def _weights(result: Replay, run: Path, step: int, learner: TorchLearner, scratch: Path) -> None:
    """Compare with every checkpoint that was written right after `step` and is whole; what is wrong with another is a note."""
    from sao.replay.weights import compare_weights

    names = [step_name(step + 1)] if step + 1 in numbered(run / FOLDER) else []
    names += [FINAL] if final_step(run) == step + 1 else []
    faults = {name: fault_of(run / FOLDER / name) for name in names}
    result.found.notes += [f"checkpoint {name} is not compared: {fault}" for name, fault in faults.items() if fault]
    names = [name for name in names if not faults[name]]
    if not names:
        return
    folder = scratch / "saved"
    folder.mkdir()
    learner.save(str(folder))
    for name in names:
        compare_weights(result.found, step, run / FOLDER / name, folder)
        result.weights.append(name)
