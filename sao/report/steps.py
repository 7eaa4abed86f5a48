"""Files and folders of a run that are named after a training step: `step-000040`, `step-000040.parquet`."""

from __future__ import annotations

import re
from pathlib import Path


def step_name(step: int) -> str:
    return f"step-{step:06d}"


def numbered(folder: Path, suffix: str = "") -> dict[int, Path]:
    """What lies in `folder` under the name of a step, by step, ascending; nothing when there is no folder.

    Whatever else a user has put there, a copy named `step-000040-backup` for instance, is none of ours.
    """
    found = ((re.fullmatch(rf"step-(\d+){re.escape(suffix)}", path.name), path) for path in folder.glob(f"step-*{suffix}"))
    return dict(sorted((int(match[1]), path) for match, path in found if match))
