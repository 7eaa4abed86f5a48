"""`sao train resume=RUN`: the configuration a run goes on with, and what may be changed about it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from sao.config import Config
from sao.config_load import check, leaf_keys, overlay, value_of
from sao.config_yaml import from_yaml
from sao.errors import ConfigError, UserError
from sao.loop import total_batches
from sao.runtime.checkpoints import FINAL, FOLDER
from sao.runtime.run_folder import read_command, started_by
from sao.runtime.saved import batches_done, evaluation_due, final_step, run_folder, version

PREFIX = "resume="
# What the trained weights, the account of prompts and the staleness bound rest on. Everything else may differ from one sitting to the next.
FIXED = (
    "seed", "run.", "train.batch_size", "algo.", "model.", "critic.", "env.", "data.", "online.phases", "online.drift", "online.ramp", "online.period",
    "rollout.staleness", "rollout.overdue", "rollout.rollouts_per_prompt", "warmstart.",
)  # fmt: skip


def split(overrides: Sequence[str]) -> tuple[str | None, list[str]]:
    """The run to resume, if one is named, and the other overrides."""
    named = [text.removeprefix(PREFIX) for text in overrides if text.startswith(PREFIX)]
    if len(named) > 1:
        raise UserError("resume is given twice; name one run folder")
    return (named[0] if named else None), [text for text in overrides if not text.startswith(PREFIX)]


def _written_config(folder: Path) -> Config:
    """The configuration a run was started with. One that this version cannot read was most likely written by another, which is then named."""
    try:
        return from_yaml(folder / "config.yaml")
    except ConfigError as error:
        by = read_command(folder).get("sao", "an unknown version")
        if by == started_by():
            raise UserError(f"resume={folder}: {error}") from None
        raise UserError(
            f"resume={folder}: the run was started by SAO {by}, this is {started_by()}, and the configuration differs ({error})"
        ) from None


def _refuse_without_work(folder: Path, config: Config) -> None:
    """A run that has ended, evaluation included, or has gone further than it is asked to, has nothing to go on with."""
    total, done, critic_only = total_batches(config), batches_done(folder), total_batches(config) - config.train.steps
    if done > total:
        raise UserError(f"train.steps={config.train.steps} has been passed: {done - critic_only} are done; set train.steps higher")
    trained = version(folder / FOLDER / FINAL)
    if done == total == final_step(folder) and not (trained is not None and evaluation_due(folder, config, trained)):
        raise UserError(f"resume={folder}: the run has ended, its {config.train.steps} steps are done; set train.steps higher to go on")


def load(run: str, overrides: Sequence[str]) -> tuple[Config, list[str]]:
    """The configuration of a run folder with `overrides` applied, and one line for each key that differs. Refuses changes of FIXED keys."""
    folder = run_folder(run, PREFIX)
    before = _written_config(folder)
    config = overlay(before, overrides)
    check(config)
    changes = []
    for key in leaf_keys():
        old, new = value_of(before, key), value_of(config, key)
        if old == new:
            continue
        if key not in ("run.progress", "run.dry_run") and any(key == fixed or (fixed.endswith(".") and key.startswith(fixed)) for fixed in FIXED):
            raise UserError(f"{key}={new} cannot be changed on resume, the run was started with {old}; leave it out or start a new run")
        changes.append(f"{key}: {old} -> {new}")
    _refuse_without_work(folder, config)
    config.run.dir = str(folder)
    return config, changes
