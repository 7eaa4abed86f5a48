"""Which learner trained which steps: learner.jsonl, a line for every learner process that took over, appended before its first step.

    {"first_step": 20, "back_to": null, "model": "...", "config": {...}, "made_on": {"torch": ..., "threads": ..., ...}}

A run that is resumed, and one whose learner was lost, goes back to a checkpoint and trains what came after it again. So the step s of the
surviving lineage belongs to the last line with first_step <= s. A learner that took up earlier weights, those of version `back_to`, without training
those batches again (a roll-back) makes a gap: what it trains follows from a checkpoint, not from the step before, and the steps in between are undone.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, cast

from sao.config import Config
from sao.config_yaml import from_yaml
from sao.errors import ConfigError, UserError
from sao.report.jsonl import append_record, read_jsonl
from sao.runtime.run_folder import read_command, started_by

FILE = "learner.jsonl"


@dataclass(frozen=True)
class Stretch:
    """Steps from `first_step` on that one learner trained.

    model: directory of the policy the run started from. made_on: what numbers may depend on beside the configuration; empty where a run of an older
    version kept no record. back_to: the version whose weights it began with instead of those of the step before.
    """

    first_step: int
    config: Config
    model: str
    made_on: Mapping[str, Any] = field(default_factory=dict)
    back_to: int | None = None


def took_over(run_dir: Path, first_step: int, config: Config, model: str, *, back_to: int | None = None) -> None:
    """Record that this process trains the run from `first_step` on; `back_to`: with the weights of that version, which a roll-back took up again."""
    line = {"first_step": first_step, "back_to": back_to, "model": model, "config": asdict(config), "made_on": made_on()}
    append_record(run_dir / FILE, line)


def made_on() -> dict[str, Any]:
    """What the last bits of a learner's arithmetic depend on beside the configuration, of this process."""
    import torch

    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "none"
    return {
        "sao": started_by(),
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "processor": _processor(),
        "instructions": torch.backends.cpu.get_cpu_capability(),
        "gpu": device,
    }


def stretches(run_dir: Path) -> list[Stretch]:
    """The learners of a run in the order they took over; of a run without a record, one that trained everything under config.yaml.

    Raises UserError where a configuration or a line is of another version than this one reads.
    """
    command = read_command(run_dir)
    try:
        found = [Stretch(r["first_step"], _config(r["config"]), r["model"], r["made_on"], r["back_to"]) for r in read_jsonl(run_dir / FILE)]
        return found or [Stretch(0, from_yaml(run_dir / "config.yaml"), str(command.get("model", "")))]
    except (ConfigError, KeyError) as error:
        by, this = command.get("sao", "an unknown version"), started_by()
        what = f"a line of {FILE} has no {error}" if isinstance(error, KeyError) else f"the configuration differs ({error})"
        raise UserError(f"{run_dir} was made by SAO {by}, this is {this}, and {what}") from None


def stretch_of(found: list[Stretch], step: int) -> Stretch:
    """The learner that trained `step` in the surviving lineage."""
    return next((s for s in reversed(found) if s.first_step <= step), found[0])


def roll_backs(run_dir: Path) -> list[int]:
    """Training steps done at every roll-back that no later return to an older checkpoint has undone in its turn."""
    lines = read_jsonl(run_dir / FILE)
    found = ((line["first_step"], line.get("back_to"), lines[at + 1 :]) for at, line in enumerate(lines))
    return [step for step, version, later in found if version is not None and all(line["first_step"] >= step for line in later)]


def _config(values: Mapping[str, Any]) -> Config:
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    try:
        return cast(Config, OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(Config), OmegaConf.create(dict(values)))))
    except OmegaConfBaseException as error:
        raise ConfigError(str(error).splitlines()[0]) from None


def _processor() -> str:
    """The processor's name, as the kernel gives it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return "unknown"
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "unknown")
