"""The `online` section checked at the door: one sentence for each mistake, before anything starts."""

from __future__ import annotations

import difflib
from itertools import pairwise

from sao.config import Config, OnlineConfig
from sao.errors import ConfigError

DRIFTS = ("abrupt", "gradual", "recurring")


def _refuse(condition: bool, message: str) -> None:
    if condition:
        raise ConfigError(message)


def check_online(config: Config) -> None:
    """Refuse a stream that contradicts itself, keys that would do nothing, and guards that cannot work."""
    online = config.online
    if online.drift not in DRIFTS:
        near = difflib.get_close_matches(online.drift, DRIFTS, n=1)
        raise ConfigError(f"online.drift={online.drift} is not one of {', '.join(DRIFTS)}" + (f"; did you mean {near[0]!r}?" if near else ""))
    for key in ("ramp", "period", "shadow_drop", "rollback_fall"):
        _refuse(getattr(online, key) < 0, f"online.{key}={getattr(online, key)} must not be negative (0 is off)")
    for key in ("shadow_tasks", "rollback_window"):
        _refuse(getattr(online, key) <= 0, f"online.{key}={getattr(online, key)} must be above 0")
    for key, switch in (("shadow_tasks", "shadow_drop"), ("rollback_window", "rollback_fall")):
        value = getattr(online, key)
        _refuse(
            getattr(online, switch) == 0 and value != getattr(OnlineConfig(), key),
            f"online.{key}={value} does nothing with online.{switch}=0; set online.{switch}, for instance with online=safe, or leave it out",
        )
    if online.phases:
        _check_phases(online)
        _check_source(config)
    else:
        _refuse(online.ramp > 0 or online.period > 0, "online.ramp and online.period shape a stream, but online.phases is empty; add phases")
    guarded = online.shadow_drop > 0 or online.rollback_fall > 0
    _refuse(
        guarded and config.run.phase == "critic",
        "online.shadow_drop and online.rollback_fall guard a policy that changes, which it does not with run.phase=critic; set both to 0",
    )


def _check_phases(online: OnlineConfig) -> None:
    phases = online.phases
    for index, phase in enumerate(phases):
        _refuse(not phase.name, f"online.phases[{index}] has no name; give it one, for instance {{name: cute, start: 0}}")
        _refuse("/" in phase.name, f"online.phases[{index}] is called {phase.name!r}; a name must not hold a slash")
        first = next(p for p in phases if p.name == phase.name)
        _refuse(
            first.args != phase.args, f"two phases are called {phase.name!r} but have different args; a name stands for one thing that is rewarded"
        )
    if online.drift == "recurring":
        _refuse(
            online.period == 0, "online.drift=recurring needs online.period, the prompts of one phase before the next, for instance online.period=960"
        )
        _refuse(len(phases) < 2, "online.drift=recurring needs at least two phases to come round")
        _refuse(any(p.start for p in phases), "online.drift=recurring takes the lengths from online.period; leave start out of online.phases")
    else:
        _refuse(
            online.period > 0,
            f"online.period={online.period} does nothing with online.drift={online.drift}; set online.drift=recurring or leave it out",
        )
        _refuse(phases[0].start != 0, f"online.phases[0] ({phases[0].name}) starts at {phases[0].start}; the first phase must start at 0")
        for before, after in pairwise(phases):
            _refuse(
                after.start <= before.start,
                f"online.phases: {after.name} starts at {after.start}, which is not after {before.name} at {before.start}; put the shift points in order",
            )
    if online.drift == "gradual":
        shortest = min((b.start - a.start for a, b in pairwise(phases)), default=0)
        _refuse(online.ramp == 0, "online.drift=gradual needs online.ramp, the prompts over which a new phase fades in, for instance online.ramp=320")
        _refuse(
            len(phases) > 1 and online.ramp > shortest,
            f"online.ramp={online.ramp} is longer than the shortest phase ({shortest} prompts); lower it",
        )
    else:
        _refuse(online.ramp > 0, f"online.ramp={online.ramp} does nothing with online.drift={online.drift}; set online.drift=gradual or leave it out")


def _check_source(config: Config) -> None:
    for key, value in (("data.path", config.data.path), ("env.data_path", config.env.data_path)):
        _refuse(bool(value), f"{key}={value} is set beside online.phases, which draw from the environment's generator; empty one of the two")
    _refuse(
        config.rollout.rollouts_per_prompt != 1,
        f"rollout.rollouts_per_prompt={config.rollout.rollouts_per_prompt} cannot run on a stream, where no prompt comes twice; set 1 and an algo= without groups",
    )
    _refuse(config.data.pool > 0, f"data.pool={config.data.pool} is set beside online.phases: in a stream no prompt comes twice; set it to 0")
    _refuse(bool(config.data.mixture), "data.mixture is set beside online.phases: a stream has one environment; empty one of the two")
    _refuse(config.run.phase == "critic", "run.phase=critic fits the critic on one frozen policy and has no use for online.phases; empty them")
