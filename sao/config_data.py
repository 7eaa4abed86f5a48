"""The keys that decide which task comes next: the environments of a mixture, and what is refused of a curriculum."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Callable
from typing import Any, cast

from sao.config import Config, DataConfig, EnvConfig
from sao.errors import ConfigError

CURRICULA = ("off", "learnable", "frontier")


def environments_of(config: Config, load: Callable[[str], EnvConfig]) -> list[EnvConfig]:
    """The environments of a run. load: conf/env/<name>.yaml as an EnvConfig."""
    data = config.data
    if not data.mixture:
        _refuse(bool(data.variants), "data.variants changes environments of a mixture, but data.mixture is empty; set env.args, or data.mixture")
        return [config.env]
    strange = [name for name in data.variants if name not in data.mixture]
    _refuse(bool(strange), f"data.variants.{strange[0] if strange else ''} is not in data.mixture; give it a weight there or leave it out")
    twice = config.env.name in data.variants
    _refuse(twice, f"data.variants.{config.env.name} is the environment that env sets up already; set env.args, or choose another env")
    return [config.env if name == config.env.name else _variant(name, data.variants.get(name), load) for name in data.mixture]


def _variant(name: str, changes: Any, load: Callable[[str], EnvConfig]) -> EnvConfig:
    """The environment that a mixture calls `name`: its file, or the one that `base` names, with changes over it."""
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    key = f"data.variants.{name}"
    mapping = changes is None or isinstance(changes, dict)
    _refuse(not mapping, f"{key}={changes} must be a mapping of keys of env, for instance {{args: {{...}}}}")
    keys = dict(changes or {})
    base = str(keys.pop("base", name))
    known = [field.name for field in dataclasses.fields(EnvConfig) if field.name != "name"]
    for unknown in [str(word) for word in keys if word not in known]:
        near = difflib.get_close_matches(unknown, known, n=1)
        raise ConfigError(
            f"{key}.{unknown} is not a key of an environment; " + (f"did you mean {near[0]!r}?" if near else f"there are base, {', '.join(known)}")
        )
    try:
        node = OmegaConf.merge(OmegaConf.structured(load(base)), keys)
        return dataclasses.replace(cast(EnvConfig, OmegaConf.to_object(node)), name=name)
    except OmegaConfBaseException as error:
        raise ConfigError(f"{key}: {str(error).splitlines()[0]}") from None


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
