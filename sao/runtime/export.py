"""`sao export`: policy and critic of a checkpoint as plain Hugging Face directories, outside the run's folder."""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from pathlib import Path

from sao.errors import ConfigError, UserError
from sao.runtime import saved
from sao.runtime.checkpoints import FINAL
from sao.runtime.models import facts


def export_command(arguments: Sequence[str]) -> int:
    """`run=FOLDER to=FOLDER [checkpoint=NAME]`. Returns the exit code; raises UserError with the mend."""
    own, _ = saved.own_arguments(arguments, ("run", "checkpoint", "to"), verb="export", others=False)
    for key in ("run", "to"):
        if not own.get(key):
            raise ConfigError(f"sao export needs {key}=FOLDER")
    source = saved.checkpoint(saved.run_folder(own["run"], "run="), own.get("checkpoint", FINAL))
    target = Path(own["to"]).expanduser().resolve()
    parts = export(source, target)
    print("\n".join(f"{part}: {target / part}" for part in parts))
    return 0


def export(source: Path, target: Path) -> list[str]:
    """Copy `policy/` and, where one was trained, `critic/` of a checkpoint that was found whole (`saved.checkpoint`) into `target`, which must be empty or new.

    Returns the parts copied. The policy's configuration must be one transformers knows. The copy is made beside its place and renamed, so an
    interrupted export leaves no half directory under the name.
    """
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise UserError(f"to={target} exists and is not empty; name a new folder")
    parts = [part for part in ("policy", "critic") if (source / part).is_dir()]  # what the manifest has; some methods train no critic
    check_policy(source / "policy")
    scratch = target.with_name(f".{target.name}.making")
    shutil.rmtree(scratch, ignore_errors=True)
    try:
        for part in parts:
            shutil.copytree(source / part, scratch / part)
        os.replace(scratch, target)
    except OSError as error:
        shutil.rmtree(scratch, ignore_errors=True)
        raise UserError(f"to={target} cannot be written ({error.strerror or 'copying failed'}); choose another folder") from None
    return parts


def check_policy(path: Path) -> None:
    """The directory would load: transformers knows its configuration, and every weight file is as long as its header says. No weight is read."""
    facts(str(path))
    import transformers

    try:
        transformers.AutoConfig.from_pretrained(str(path))
    except (OSError, ValueError, KeyError) as error:
        raise UserError(f"{path} does not load as a Hugging Face model ({str(error).splitlines()[0]})") from None
