"""benchmarks/ is a folder of scripts, not a package: its modules are imported as the scripts import them."""

import sys
from pathlib import Path

BENCHMARKS = str(Path(__file__).resolve().parents[3] / "benchmarks")
if BENCHMARKS not in sys.path:
    sys.path.insert(0, BENCHMARKS)
