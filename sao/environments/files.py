"""An environment's own configuration file: `env=NAME` where a folder NAME here has a `sao.yaml`.

The file is a tree of the same keys as the command line (`sao config --keys`); a group is chosen by a value instead of a section (`model: demo`). Its values
come before those of the command, so whatever is written there wins.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from sao.errors import ConfigError

PROJECT_FILE = "sao.yaml"


def own_overrides(name: str, groups: Collection[str]) -> list[str] | None:
    """The file of the folder `name` as overrides; None when there is no such file. Raises ConfigError when it cannot be read."""
    path = Path(name) / PROJECT_FILE
    if not name.isidentifier() or not path.is_file():
        return None
    from omegaconf import OmegaConf
    from yaml import YAMLError

    try:
        tree: Any = OmegaConf.to_container(OmegaConf.load(path))
    except (OSError, UnicodeDecodeError, YAMLError) as error:
        raise ConfigError(f"{path} cannot be read ({' '.join(str(error).split())[:200]}); mend the file") from None
    if not isinstance(tree, Mapping) or not isinstance(tree.get("env"), Mapping) or "target" not in tree["env"]:
        raise ConfigError(f"{path} must have a section env with a target, package.module:Class")
    chosen = [f"{key}={value}" for key, value in tree.items() if key in groups and not isinstance(value, Mapping)]
    rest = {key: value for key, value in tree.items() if key not in groups or isinstance(value, Mapping)}
    return ["env=custom", f"env.name={name}", *chosen, *_leaves(rest)]


def _leaves(tree: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    for key, value in tree.items():
        if isinstance(value, Mapping) and value:
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}={_written(value)}"


def _written(value: Any) -> str:
    """A value as Hydra's grammar reads it."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, list):
        return f"[{','.join(map(_written, value))}]"
    if isinstance(value, str):
        escaped = re.sub(r"(\\*)('|$)", lambda found: found[1] * 2 + found[2].replace("'", "\\'"), value)  # a backslash escapes only before a quote
        return f"'{escaped}'"
    return "{}" if value == {} else str(value)
