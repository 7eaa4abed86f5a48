"""A user's reward function: finding it, calling it by the signature it has, and judging what it returns."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from numbers import Real
from typing import Any

from sao.environment import Message
from sao.errors import ConfigError, RewardFailure
from sao.tasks.target import load_target, one_line, place_of

KEY = "reward.function"
SHAPES = "write `def reward(completion, row)` or verl's `def compute_score(data_source, solution_str, ground_truth, extra_info)`"
NO_GOLD = "the row has no column "  # how the KeyError of gold_of begins; sao.rewards.preflight looks for it
VERL_PARAMETERS = {"solution_str", "ground_truth"}


@dataclass(frozen=True)
class RewardFunction:
    """An imported function and how to call it.

    style: `row` for (completion, row) or `verl` for compute_score's parameters. keywords: which of messages, data_source, extra_info it is given.
    """

    name: str
    function: Callable[..., Any]
    style: str
    is_async: bool
    keywords: frozenset[str]

    def __call__(self, completion: str, row: Mapping[str, Any], messages: Sequence[Message] | None = None) -> Any:
        """Whatever the function returns for one completion: a value, or an awaitable of one."""
        extra: dict[str, Any] = {"messages": messages, "data_source": row.get("data_source", ""), "extra_info": row.get("extra_info")}
        extra = {name: value for name, value in extra.items() if name in self.keywords}
        if self.style == "row":
            return self.function(completion, row, **extra)
        return self.function(solution_str=completion, ground_truth=gold_of(row), **extra)


def gold_of(row: Mapping[str, Any]) -> Any:
    """The reference answer of a row: `answer`, else `ground_truth`, else verl's `reward_model.ground_truth`. Raises KeyError without one."""
    for column in ("answer", "ground_truth"):
        if row.get(column) is not None:
            return row[column]
    reward_model = row.get("reward_model")
    if isinstance(reward_model, Mapping) and reward_model.get("ground_truth") is not None:
        return reward_model["ground_truth"]
    raise KeyError(f"{NO_GOLD}answer, ground_truth or reward_model.ground_truth")


def load_reward(target: str, key: str = KEY) -> RewardFunction:
    """Import `package.module:function` and find out how it wants to be called.

    Raises ConfigError naming `key`: empty, not importable, a class, not callable, or parameters of neither shape.
    """
    if not target:
        raise ConfigError(f"{key} is empty; set it to package.module:function")
    function = load_target(target, key)
    if inspect.isclass(function) or not callable(function):
        kind = "a class" if inspect.isclass(function) else f"of type {type(function).__name__}"
        raise ConfigError(f"{key}={target} is {kind}, not a function; {SHAPES}")
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        raise ConfigError(f"{key}={target} has no signature to read; wrap it in a Python function: {SHAPES}") from None
    parameters = signature.parameters
    if "completions" in parameters:
        raise ConfigError(f"{key}={target} takes a list of completions; it must score one: {SHAPES}")
    style = "verl" if parameters.keys() >= VERL_PARAMETERS else "row"
    accepted = {"messages", "data_source", "extra_info"} if style == "verl" else {"messages"}
    takes_any = style == "verl" and any(item.kind is item.VAR_KEYWORD for item in parameters.values())
    keywords = frozenset(name for name in accepted if name in parameters or (takes_any and name != "messages"))
    try:
        if style == "verl":
            signature.bind(solution_str="", ground_truth="", **dict.fromkeys(keywords))
        else:
            signature.bind("", {}, **dict.fromkeys(keywords))
    except TypeError:
        raise ConfigError(f"{key}={target} takes {signature}, which we cannot call; {SHAPES}") from None
    is_async = inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(getattr(function, "__call__", None))  # noqa: B004
    return RewardFunction(target, function, style, is_async, keywords)


def as_score(value: Any, style: str = "row") -> float:
    """The float a reward function meant: a real number, a bool (1 or 0), a 0-dimensional array, or with verl's signature a dict's `score`.

    Raises ValueError with the reason for anything else, NaN and the infinities included.
    """
    if style == "verl" and isinstance(value, Mapping) and "score" in value:
        value = value["score"]
    if getattr(value, "shape", None) == () and hasattr(value, "item"):
        value = value.item()
    if not isinstance(value, Real | Decimal):
        raise ValueError(f"returned a value of type {type(value).__name__}, not a number")
    try:
        score = float(value)
    except (OverflowError, ValueError) as error:
        raise ValueError(f"returned a number that is no float ({one_line(error, 80)})") from error
    if not math.isfinite(score):
        raise ValueError(f"returned {score}, not a finite number")
    return score


def raised(name: str, error: BaseException) -> RewardFailure:
    """The failure of a function that raised, with the place in the user's file."""
    return RewardFailure(f"{KEY}={name} raised {one_line(error)}{place_of(error)}", "raised")
