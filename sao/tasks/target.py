"""Finding a class or function that a configuration names as `package.module:attribute`."""

from __future__ import annotations

import difflib
import importlib
import inspect
import os
import sys
import traceback
from typing import Any

from sao.errors import ConfigError

ENVIRONMENT = ("reset", "step", "tools", "close")  # methods of sao.environment.Environment
PROGRAM = ("prepare", "run", "score", "close")  # of sao.environment.AgentProgram


def one_line(error: BaseException, limit: int = 300) -> str:
    """`Type: message` of an exception, on one line and at most `limit` characters."""
    text = " ".join(f"{type(error).__name__}: {error}".split()).rstrip(":")
    return text if len(text) <= limit else text[: limit - 3] + "..."


def place_of(error: BaseException) -> str:
    """` at file.py:12`, the innermost line of Python that raised; empty when there is none."""
    frames = traceback.extract_tb(error.__traceback__)
    return f" at {os.path.basename(frames[-1].filename)}:{frames[-1].lineno}" if frames else ""


def load_target(target: str, key: str) -> Any:
    """Import `package.module:attribute` and return the attribute.

    The working directory is importable, as it is for `python script.py`. `key` is the configuration key that holds the target.

    Raises ConfigError naming the key: wrong form, no such module, a module that raises when imported, or no such attribute.
    """
    module_name, separator, attribute = target.partition(":")
    if not separator or not module_name or not attribute or not all(part.isidentifier() for part in module_name.split(".")):
        raise ConfigError(f"{key}={target} is not of the form package.module:name")
    here = os.getcwd()
    if here not in sys.path and "" not in sys.path:
        # Appended, not prepended: a console script lacks this entry, and a stray file in it must not shadow an installed package.
        sys.path.append(here)
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name and (module_name == error.name or module_name.startswith(error.name + ".")):
            mend = f"install it or start from the directory that holds it ({here} is searched)"
            raise ConfigError(f"{key}={target}: there is no module {error.name!r}; {mend}") from error
        raise ConfigError(f"{key}={target}: importing {module_name} needs the module {error.name!r}, which is not installed") from error
    except (Exception, SystemExit) as error:
        raise ConfigError(f"{key}={target}: importing {module_name} failed with {one_line(error)}") from error
    value: Any = module
    for part in attribute.split("."):
        if not hasattr(value, part):
            near = difflib.get_close_matches(part, [name for name in dir(value) if not name.startswith("_")], n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise ConfigError(f"{key}={target}: {module_name} has no {part!r}{hint}")
        value = getattr(value, part)
    return value


def load_environment(target: str, key: str = "env.target") -> type:
    """Import an environment class named `package.module:Class`.

    Raises ConfigError naming `key` when the target cannot be imported, is not a class, or lacks a method of `sao.environment.Environment`
    (or, where it has `run` and no `step`, of `sao.environment.AgentProgram`).
    """
    value = load_target(target, key)
    if not inspect.isclass(value):
        raise ConfigError(f"{key}={target} is not a class; name the class that implements reset, step, tools and close")
    methods = PROGRAM if callable(getattr(value, "run", None)) and not callable(getattr(value, "step", None)) else ENVIRONMENT
    missing = [name for name in methods if not callable(getattr(value, name, None))]
    if missing:
        kind = "an environment" if methods is ENVIRONMENT else "an agent program"
        see = "Environment" if methods is ENVIRONMENT else "AgentProgram"
        raise ConfigError(f"{key}={target} is not {kind}: it has no {', '.join(missing)}; see sao.environment.{see}")
    for name in methods:
        if name != "tools" and not inspect.iscoroutinefunction(getattr(value, name)):
            raise ConfigError(f"{key}={target}: {name} must be a coroutine; write `async def {name}`")
    return value


def is_program(environment: type) -> bool:
    """Whether a class that `load_environment` found is an agent program: it asks the policy instead of being asked."""
    return not callable(getattr(environment, "step", None))
