"""What is refused of the keys that decide which task comes next."""

from __future__ import annotations

import difflib

from sao.config import Config, DataConfig
from sao.errors import ConfigError

CURRICULA = ("off", "learnable", "frontier")


def check_curriculum(config: Config) -> None:
    """Refuse a curriculum that is not there, that cannot work, or keys of one that is off."""
    data, default = config.data, DataConfig()
    _refuse(not 0 < data.curriculum_floor <= 1, f"data.curriculum_floor={data.curriculum_floor} must lie in (0, 1]: without it a task can be starved")
    if data.curriculum == "off":
        for key in ("curriculum_args", "curriculum_floor", "curriculum_recent", "curriculum_column"):
            value = getattr(data, key)
            _refuse(value != getattr(default, key), f"data.{key}={value} does nothing with data.curriculum=off; choose learnable or frontier")
        return
    if data.curriculum not in CURRICULA and ":" not in data.curriculum:
        close = difflib.get_close_matches(data.curriculum, CURRICULA, n=1)
        hint = f"did you mean {close[0]!r}?" if close else "or name a class of yours as package.module:Class"
        raise ConfigError(f"data.curriculum={data.curriculum} is not one of {', '.join(CURRICULA)}; {hint}")
    _refuse(bool(config.online.phases), "data.curriculum and online.phases both decide which task comes next; leave one out")
    _refuse(
        data.curriculum == "frontier" and data.pool > 0,
        f"data.curriculum=frontier goes by levels, which the {data.pool} tasks of data.pool do not have; use learnable, or set data.pool=0",
    )


def _refuse(condition: bool, message: str) -> None:
    if condition:
        raise ConfigError(message)
