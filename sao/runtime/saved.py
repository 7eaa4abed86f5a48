"""Runs that are there already, as `sao eval` and `sao export` take them: `run=FOLDER checkpoint=NAME` on the command line."""

from __future__ import annotations

import difflib
import json
from collections.abc import Sequence
from pathlib import Path

from sao.config import Config
from sao.errors import ConfigError, UserError
from sao.report.jsonl import read_jsonl
from sao.report.steps import numbered
from sao.runtime.checkpoints import FINAL, FOLDER, MANIFEST, STATE, damage
from sao.runtime.models import tensor_sizes


def own_arguments(arguments: Sequence[str], names: Sequence[str], *, verb: str, others: bool) -> tuple[dict[str, str], list[str]]:
    """Split `key=value` arguments into those the verb knows itself and the rest, which are overrides of the configuration.

    Without `others` the rest must be empty. Raises ConfigError for a word without `=`, a name given twice, and a likely misspelling of a name.
    """
    own: dict[str, str] = {}
    rest: list[str] = []
    for text in arguments:
        key, separator, value = text.partition("=")
        if not separator:
            raise ConfigError(f"{text!r} is not of the form key=value; sao {verb} takes {', '.join(f'{name}=' for name in names)}")
        if key in own:
            raise ConfigError(f"{key}= is given twice; give it once")
        if key in names:
            own[key] = value
            continue
        near = difflib.get_close_matches(key, names, n=1, cutoff=0.75)
        if near or not others:
            hint = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(names)}"
            raise ConfigError(f"sao {verb} knows no key {key!r}; {hint}")
        rest.append(text)
    return own, rest


def run_folder(path: str, key: str = "") -> Path:
    """The folder of a run that has been started, resolved. `key` is how the command line names it: `run=`."""
    folder = Path(path).expanduser().resolve()
    if not folder.is_dir():
        raise UserError(f"{key}{path} does not exist; name the folder of a run")
    if not (folder / "config.yaml").is_file():
        raise UserError(f"{key}{path} is no run folder: it has no config.yaml")
    return folder


def checkpoints(run: Path) -> list[str]:
    """Names of the checkpoints that hold a policy, sorted. Folders that begin with a dot are still being written."""
    found = (path.parent.parent for path in (run / FOLDER).glob("*/policy/config.json"))
    return sorted(path.name for path in found if not path.name.startswith("."))


def checkpoint(run: Path, name: str) -> Path:
    """The folder of a whole checkpoint by its name. Raises UserError with the names that exist, or when its files are not what was written."""
    names = checkpoints(run)
    if not names:
        raise UserError(f"{run} has no checkpoint yet; let the run write one (it writes {FINAL} when it ends)")
    if name not in names:
        raise UserError(f"{run} has no checkpoint {name!r}; there are {', '.join(names)}: set checkpoint={names[-1]}")
    folder = run / FOLDER / name
    fault = fault_of(folder)
    if fault:
        others = f"; name another: {', '.join(f'checkpoint={other}' for other in names if other != name)}" if len(names) > 1 else ""
        raise UserError(f"{folder} is damaged, {fault}{others}")
    return folder


def fault_of(folder: Path) -> str | None:
    """What is wrong with a checkpoint of any name, or None; `damage`, but for a final one that an older version wrote without a manifest."""
    return damage(folder) if (folder / MANIFEST).exists() or folder.name != FINAL else _damage_without_manifest(folder)


def _damage_without_manifest(folder: Path) -> str | None:
    """What can be seen to be wrong with a final checkpoint of an older version, which wrote its parts in place and state.json last."""
    for name in ("policy", "critic", STATE):
        if not (folder / name).exists():
            return f"{name} is missing, so it was never completed"
    for file in sorted(folder.glob("*/*.safetensors")):
        try:
            tensor_sizes(file)
        except (OSError, ValueError, KeyError, TypeError, MemoryError) as error:
            return f"{file.relative_to(folder)} is not whole ({error})"
    return None


def batches_done(run: Path) -> int:
    """Training steps that a resume finds done: in the newest checkpoint or in the batches stored after it. By their names; nothing is read."""
    stored = [step + 1 for step in numbered(run / "trajectories", ".parquet")]
    return max([*numbered(run / FOLDER), *stored], default=0)


def final_step(run: Path) -> int | None:
    """Training steps in the final checkpoint; None when there is none, or it was cut off."""
    return _counter(run / FOLDER / FINAL, "batches_done")


def version(folder: Path) -> int | None:
    """Actor steps in a checkpoint's weights, where it says so."""
    return _counter(folder, "version")


def evaluated(run: Path, name: str, version: int, temperatures: Sequence[float]) -> bool:
    """Whether eval.jsonl has the evaluation `name` of `version` at every temperature."""
    there = {record.get("temperature") for record in read_jsonl(run / "eval.jsonl") if (record.get("eval"), record.get("version")) == (name, version)}
    return there.issuperset(temperatures)


def evaluation_due(run: Path, config: Config, version: int) -> bool:
    """Whether the run asks for an evaluation after training and has none of `version`, its last."""
    return config.eval.at_end and not evaluated(run, "after", version, config.eval.temperatures)


def _counter(folder: Path, name: str) -> int | None:
    """What a checkpoint's state says under `name`; None when it says nothing."""
    try:
        return int(json.loads((folder / STATE).read_text())[name])
    except (OSError, ValueError, KeyError, TypeError):
        return None
