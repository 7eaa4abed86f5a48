"""Hydra needs a third of a second to compose conf/ on a slow core, and hundreds of unit tests start from one of a few dozen configurations."""

from __future__ import annotations

import copy

import pytest

from sao import config_load


@pytest.fixture(scope="session", autouse=True)
def composed_once():
    """The same overrides give the same configuration, so each list of them is composed once in a process and copied afterwards."""
    compose, known = config_load._compose_raw, {}

    def remembered(overrides):
        key = tuple(overrides)
        if key not in known:
            known[key] = compose(overrides)
        return copy.deepcopy(known[key])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(config_load, "_compose_raw", remembered)
        yield
