"""benchmarks/ is a folder of scripts, not a package: its modules are imported as the scripts import them."""

from __future__ import annotations

import signal
import sys
from pathlib import Path

import pytest

BENCHMARKS = str(Path(__file__).resolve().parents[3] / "benchmarks")
if BENCHMARKS not in sys.path:
    sys.path.insert(0, BENCHMARKS)


@pytest.fixture(autouse=True)
def interruptible():
    """Ctrl-C reaches a test wherever it runs: also where the process that runs it was told to ignore it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)
