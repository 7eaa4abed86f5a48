"""Which losses and advantages there are, what each needs of the run, and how one of the user's own is found. Imports no torch.

    algo.loss=NAME        LossInputs -> TokenLoss                      (sao/algorithms/policy_loss.py, sao/algorithms/losses/)
    algo.advantage=NAME   gae, or (Outcomes, state) -> (per episode, state)   (sao/algorithms/outcome.py)

NAME is one of the tables below, or `package.module:function` of the user's. What a function needs beyond its inputs is declared here, or by the decorator
`needs` on a function of the user's: the critic is built, groups are drawn and old log-probs are computed only for those who ask.
"""

from __future__ import annotations

import difflib
import functools
import importlib
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from sao.config import AlgoConfig, Config
from sao.errors import ConfigError, LearnerFailure
from sao.tasks.target import load_target, one_line, place_of

Function = TypeVar("Function", bound=Callable[..., Any])

CRITIC = "critic"  # a value model, its K steps, its values and returns
GROUPS = "groups"  # rollout.rollouts_per_prompt of at least 2
OLD = "old"  # LossInputs.old: log-probs under the weights that sampled each token
CAN_NEED = {"loss": frozenset({OLD}), "advantage": frozenset({GROUPS})}
DIS = "dis"  # the loss of SAO, whose band is in `algo` itself
GAE = "gae"  # the advantage of the critic, computed by sao/learner/credit.py from the keys of `algo`


@dataclass(frozen=True)
class Entry:
    """One loss or advantage. target: `package.module:function`. arguments: its keywords and their defaults. keys: keywords read from `algo` itself."""

    target: str
    needs: frozenset[str] = frozenset()
    arguments: Mapping[str, Any] = field(default_factory=dict)
    keys: tuple[str, ...] = ()


_CLIP = {"eps_low": 0.2, "eps_high": 0.28}

LOSSES: dict[str, Entry] = {
    DIS: Entry("sao.algorithms.policy_loss:dis_sum", keys=("eps_low", "eps_high", "detach_ratio")),
    "reinforce": Entry("sao.algorithms.losses.reinforce:reinforce"),
    "ppo_clip": Entry("sao.algorithms.losses.ppo_clip:ppo_clip", arguments=_CLIP),
    "tis": Entry("sao.algorithms.losses.tis:tis", arguments={"cap": 2.0}),
    "icepop": Entry("sao.algorithms.losses.icepop:icepop", frozenset({OLD}), {"mask_low": 0.5, "mask_high": 5.0} | _CLIP),
    "vapo": Entry("sao.algorithms.losses.vapo:vapo", arguments=_CLIP | {"nll_coef": 0.1}),
}

ADVANTAGES: dict[str, Entry] = {
    GAE: Entry("sao.learner.credit:policy_advantages", frozenset({CRITIC})),
    "group": Entry("sao.algorithms.outcome:group", frozenset({GROUPS})),
    "running_mean": Entry("sao.algorithms.outcome:running_mean", arguments={"window": 8, "per_task": True}),
    "batch_mean": Entry("sao.algorithms.outcome:batch_mean"),
    "outcome": Entry("sao.algorithms.outcome:outcome"),
}

TABLES = {"loss": LOSSES, "advantage": ADVANTAGES}


def needs(*what: str) -> Callable[[Function], Function]:
    """Decorator for a loss or an advantage of the user's: `@needs("old")` on a loss, `@needs("groups")` on an advantage."""

    def mark(function: Function) -> Function:
        function.needs = frozenset(what)  # type: ignore[attr-defined]
        return function

    return mark


def find(kind: str, name: str) -> Entry:
    """The entry of `algo.<kind>=name`, kind being `loss` or `advantage`; a function of the user's is imported and its signature read.

    Raises ConfigError for an unknown name, a function that cannot be imported or called with keywords, or a need that does not exist.
    """
    table, key = TABLES[kind], f"algo.{kind}"
    if name in table:
        return table[name]
    if ":" not in name:
        close = difflib.get_close_matches(name, table, n=1)
        hint = f"did you mean {close[0]!r}?" if close else f"there are {', '.join(table)}"
        raise ConfigError(f"{key}={name} is unknown; {hint} (a function of yours is written package.module:function)")
    function = load_target(name, key)
    positional = ("inputs",) if kind == "loss" else ("outcomes", "state")
    shape = f"write `def {name.rpartition(':')[2]}({', '.join(positional)}, *, option=1.0)`"
    if inspect.isclass(function) or not callable(function):
        raise ConfigError(f"{key}={name} is not a function; {shape}")
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):
        raise ConfigError(f"{key}={name} has no signature to read; {shape}") from None
    first, rest = parameters[: len(positional)], parameters[len(positional) :]
    if len(first) < len(positional) or any(p.kind is not p.POSITIONAL_OR_KEYWORD for p in first) or any(p.kind is not p.KEYWORD_ONLY for p in rest):
        raise ConfigError(f"{key}={name} takes other arguments; {shape}")
    asked = frozenset(getattr(function, "needs", ()))
    if not asked <= CAN_NEED[kind]:
        known = ", ".join(sorted(CAN_NEED[kind]))
        raise ConfigError(f"{key}={name} needs {', '.join(sorted(asked - CAN_NEED[kind]))}, which there is not; one of this kind can need {known}")
    return Entry(name, asked, {p.name: p.default for p in rest})


def arguments(kind: str, algo: AlgoConfig) -> dict[str, Any]:
    """Keyword arguments for the configured loss or advantage: defaults, then `algo.<kind>_args`, and the keys of `algo` that it reads.

    Raises ConfigError for one that the function does not take, or one without a default that is not given.
    """
    name: str = getattr(algo, kind)
    given: Mapping[str, Any] = {"loss": algo.loss_args, "advantage": algo.advantage_args}[kind]
    entry = find(kind, name)
    for argument in given:
        if argument in entry.keys:
            raise ConfigError(f"algo.{kind}_args.{argument}: {name} reads algo.{argument}; set that")
        if argument not in entry.arguments:
            close = difflib.get_close_matches(argument, entry.arguments, n=1)
            hint = f"did you mean {close[0]!r}?" if close else f"it takes {', '.join(entry.arguments) or 'none'}"
            raise ConfigError(f"algo.{kind}_args.{argument}: {name} has no such argument; {hint}")
    merged = {**entry.arguments, **given} | {key: getattr(algo, key) for key in entry.keys}
    missing = [argument for argument, value in merged.items() if value is inspect.Parameter.empty]
    if missing:
        raise ConfigError(f"algo.{kind}={name} must be given {missing[0]}; set algo.{kind}_args.{missing[0]}")
    return merged


def function_of(kind: str, algo: AlgoConfig) -> Callable[..., Any]:
    """The configured loss or advantage itself. Imports torch for those that ship. What one of the user's raises is a LearnerFailure that names it."""
    name = getattr(algo, kind)
    entry = find(kind, name)
    if entry.target == name:
        return _of_the_user(load_target(name, f"algo.{kind}"), f"algo.{kind}={name}")
    module, _, attribute = entry.target.partition(":")
    return getattr(importlib.import_module(module), attribute)


def _of_the_user(function: Function, key: str) -> Callable[..., Any]:
    @functools.wraps(function)
    def named(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except Exception as error:
            raise LearnerFailure(f"{key} raised {one_line(error)}{place_of(error)}") from error

    return named


def needs_critic(algo: AlgoConfig) -> bool:
    return CRITIC in find("advantage", algo.advantage).needs


def needs_groups(algo: AlgoConfig) -> bool:
    return GROUPS in find("advantage", algo.advantage).needs


def needs_old(algo: AlgoConfig) -> bool:
    return OLD in find("loss", algo.loss).needs


def critic_only_steps(config: Config) -> int:
    """First steps of the run in which the actor is frozen; none without a critic to train meanwhile."""
    return config.critic.critic_only_steps if needs_critic(config.algo) else 0
