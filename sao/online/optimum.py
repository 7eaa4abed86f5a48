"""What each phase of a stream could pay at best, as its environment says: what regret is measured against."""

from __future__ import annotations

import math

from sao.config import Config
from sao.errors import ConfigError
from sao.tasks.source import environment_args, load_environment
from sao.tasks.target import one_line, place_of


def optima(config: Config) -> dict[str, float] | None:
    """Expected reward of the best answer by phase, from the environment's class method `optimum(**args)`; None where it has none or returns None.

    Raises ConfigError when that method raises or returns something else than a finite number.
    """
    environment = load_environment(config.env.target)
    optimum = getattr(environment, "optimum", None)
    if optimum is None or not config.online.phases:
        return None
    args, best = environment_args(config.env, config.reward), {}
    for phase in config.online.phases:
        name = f"{environment.__name__}.optimum of phase {phase.name!r}"
        try:
            value = optimum(**args | phase.args)
        except Exception as error:
            raise ConfigError(f"{name} raised {one_line(error)}{place_of(error)}; mend it, or take it out and do without regret") from error
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise ConfigError(f"{name} returned {value!r}; it must return a finite number, or None where nobody knows it")
        best[phase.name] = float(value)
    return best
