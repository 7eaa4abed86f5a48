"""A run's resolved configuration as config.yaml, and back."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

from sao.config import Config
from sao.config_load import leaf_keys, one_sentence
from sao.errors import ConfigError


def to_yaml(config: Config) -> str:
    """The resolved configuration as YAML text: every key of the schema."""
    from omegaconf import OmegaConf

    return str(OmegaConf.to_yaml(OmegaConf.structured(config)))


def from_yaml(path: Path) -> Config:
    """Read back a run's config.yaml.

    Raises ConfigError when it is no YAML, has a key or value the schema does not know, or lacks a key: a file that was cut off between two lines
    is fine YAML, and the defaults it would be filled up with are not those of the run.
    """
    import yaml
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    try:
        loaded = OmegaConf.load(path)
        config = cast(Config, OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(Config), loaded)))
    except FileNotFoundError:
        raise ConfigError(f"{path} does not exist; is this a run folder?") from None
    except OmegaConfBaseException as error:
        raise ConfigError(f"{path}: {one_sentence(error)}") from None
    except (OSError, ValueError, yaml.YAMLError) as error:  # OmegaConf says OSError where the file holds no mapping
        raise ConfigError(f"{path} is damaged ({' '.join(str(error).split())[:200]}); bring it back from a copy") from None
    plain = OmegaConf.to_container(loaded)
    missing = [key for key in leaf_keys() if not _has(plain, key)]
    if missing:
        more = f" and {len(missing) - 1} more keys" if len(missing) > 1 else ""
        raise ConfigError(
            f"{path} lacks {missing[0]}{more}: it was cut off, or another version of SAO wrote it; bring it back from a copy, or add them"
        )
    return config


def _has(node: Any, key: str) -> bool:
    for part in key.split("."):
        if not isinstance(node, dict) or part not in node:
            return False
        node = node[part]
    return True
