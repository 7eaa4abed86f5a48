"""One thread per process, as every actor of a run has: two cores are shared by an engine, a learner and the tests themselves."""

from __future__ import annotations

import os

import hypothesis

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("MKL_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("WANDB_MODE", "offline")

# No time limit per example: the machine is shared, and speed is measured in benchmarks/.
hypothesis.settings.register_profile("sao", deadline=None)
hypothesis.settings.load_profile("sao")
