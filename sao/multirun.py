"""`sao train -m`: every combination of a sweep, each in a process of its own, one after the other."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from sao.config_load import compose, expand_sweep
from sao.errors import INTERRUPTED, ConfigError
from sao.runtime import sweeper


def run_sweep(overrides: Sequence[str]) -> int:
    """Check all combinations, then run them. Returns 0 when all ended well, 130 when one was asked to stop (the later ones are not begun), else 1."""
    cells = expand_sweep(overrides)
    refuse_shared_folders([compose(cell).run.dir for cell in cells])
    sweeper.start()  # a run is not left behind by a sweep that is killed
    failed = 0
    for index, cell in enumerate(cells):
        print(f"[{index + 1}/{len(cells)}] sao train {' '.join(cell)}", flush=True)
        named = any(text.startswith(("run.dir=", "run.name=")) for text in cell)
        own = cell if named else [*cell, f"run.name=sweep{index:03d}"]
        code = run_cell([sys.executable, "-m", "sao.cli", "train", *own])
        if code == INTERRUPTED:
            print(f"stopped in run {index + 1} of {len(cells)}; the later ones were not begun")
            return INTERRUPTED
        failed += code != 0
    print(f"{len(cells) - failed} of {len(cells)} runs ended well")
    return 1 if failed else 0


def run_cell(command: Sequence[str]) -> int:
    """Exit code of one run. A signal that asks the sweep to stop is handed on, and the run's own end, checkpoint included, is waited for.

    The run has a session of its own: Ctrl-C in a terminal goes to every process there, and twice means to end at once.
    """
    run = subprocess.Popen(command, start_new_session=True)
    before = {number: signal.signal(number, lambda number, _: run.send_signal(number)) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        code = run.wait()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    return INTERRUPTED if code in (-signal.SIGINT, -signal.SIGTERM) else code


def refuse_shared_folders(folders: Sequence[str]) -> None:
    """Raise ConfigError where two runs of a sweep name one `run.dir`; an empty one becomes a fresh folder."""
    named = [(Path(folder).expanduser().resolve(), folder) for folder in folders if folder]
    seen: set[Path] = set()
    for path, folder in named:
        if path in seen:
            raise ConfigError(
                f"run.dir={folder} is given to more than one run of this sweep; leave run.dir out, and each run gets a folder of its own"
            )
        seen.add(path)
