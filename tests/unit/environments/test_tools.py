"""Plain classes with tool methods: schemas, conversion, answers, rewards, failures."""

from __future__ import annotations

import json
import threading
from typing import Annotated, Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sao.config_load import compose
from sao.environment import Action
from sao.environments.signatures import BadArgument, convert, read_docstring, schema_of
from sao.environments.tools import ToolsEnvironment
from sao.errors import ConfigError, EnvironmentFailure, RewardFailure
from sao.tasks.source import build_source, check_arguments, environment_args
from tests.play_kit import call, make, play

HERE = __name__


class ToolError(Exception):
    """Anybody's own, known by its name."""


class Shop:
    """A class in TRL's convention: it knows nothing of this package."""

    def __init__(self, money: float = 10.0) -> None:
        self.money, self.bought, self.reward = money, [], 0.0
        self.loop = threading.get_ident()
        self.closed = 0

    def reset(self, **row: Any) -> str:
        self.want = row["want"]
        return f"You have {self.money:g}."

    def buy(self, item: str, count: int = 1, *, wrap: bool = False) -> dict[str, Any]:
        """Buy something.

        It costs one a piece.

        Args:
            item (str): what to buy,
                in one word
            count: how many

        Returns:
            What is left.
        """
        if count > self.money:
            raise ValueError(f"you have only {self.money:g}")
        if item == "gun":
            raise ToolError("not sold here")
        if item == "bomb":
            raise RuntimeError("the shop exploded")
        self.money -= count
        self.bought.append(item)
        self.reward = float(item == self.want)
        return {"left": self.money, "wrapped": wrap}

    def look(self) -> None:
        """Look around."""

    async def wait(self, seconds: float) -> str:
        """Wait."""
        return f"{seconds!r}"

    def close(self) -> None:
        self.closed += 1

    @property
    def size(self) -> int:
        return 3

    @classmethod
    def branch(cls) -> str:
        return "x"

    def _private(self) -> None: ...


class Ending(Shop):
    """Says itself when it is done, and scores by a method."""

    def reset(self, seed: int, want: str) -> list[dict[str, str]]:  # type: ignore[override]
        self.want, self.done = want, False
        return [{"role": "user", "content": f"seed {seed}"}]

    def leave(self) -> str:
        """Go."""
        self.done = True
        return "bye"

    def get_reward(self) -> float:
        return 0.25 * len(self.bought)


class Mute:
    def reset(self, **row: Any) -> None: ...

    def act(self) -> str:
        """Act."""
        return ""


class Late(Shop):
    def reset(self, **row: Any) -> str:
        self.reward = None  # type: ignore[assignment]
        return "go"


class Boasting(Shop):
    def get_reward(self) -> str:
        return "much"


class Silent(Shop):
    def reset(self, **row: Any) -> None: ...  # type: ignore[override]


class NoHint:
    def reset(self) -> str:
        return "go"

    def act(self, what) -> str:  # type: ignore[no-untyped-def]
        return what


class Strange(NoHint):
    def act(self, what: threading.Thread) -> str:
        return ""


class Spread(NoHint):
    def act(self, *what: str) -> str:
        return ""


class NoTools:
    def reset(self) -> str:
        return "go"


class OwnTasks(Shop):
    @classmethod
    def generate_payload(cls, rng: Any, split: str) -> dict[str, Any]:
        return {"want": rng.choice("ab"), "split": split}


def score(completion: str, row: dict[str, Any]) -> float:
    return float(row["want"] in completion)


ROW = {"want": "tea"}


def shop(cls: str = "Shop", payload: dict[str, Any] | None = None, **args: Any) -> ToolsEnvironment:
    environment = make(ToolsEnvironment, ROW if payload is None else payload, cls=f"{HERE}:{cls}", **args)
    assert isinstance(environment, ToolsEnvironment)
    return environment


def test_schemas_come_from_signatures_and_docstrings():
    tools = {tool["function"]["name"]: tool["function"] for tool in play(shop(), [])[1]}
    assert list(tools) == ["buy", "look", "wait"]
    assert tools["buy"] == {
        "name": "buy",
        "description": "Buy something.\n\nIt costs one a piece.",
        "parameters": {
            "type": "object",
            "properties": {
                "item": {"type": "string", "description": "what to buy, in one word"},
                "count": {"type": "integer", "description": "how many"},
                "wrap": {"type": "boolean"},
            },
            "required": ["item"],
        },
    }
    assert tools["look"]["parameters"] == {"type": "object", "properties": {}, "required": []}


def test_an_episode_is_calls_and_a_turn_without_one():
    environment = shop(kwargs={"money": 3}, system="Be brief.")
    opening, _, results = play(environment, [call("buy", item="tea", count=2), call("look"), call("wait", seconds=1), "done"])
    assert opening == [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "You have 3."}]
    assert results[0].observation == [{"role": "tool", "name": "buy", "content": '{"left": 1, "wrapped": false}', "tool_call_id": "call_0"}]
    assert [r.observation[0]["content"] for r in results[1:3]] == ["", "1.0"]
    assert [r.reward for r in results] == [1.0, 0.0, 0.0, 0.0] and results[-1].terminated
    assert environment.object.closed == 1


def test_several_calls_of_a_turn_are_answered_in_order():
    both = Action("", (*call("buy", item="a").tool_calls, *call("buy", item="tea").tool_calls))
    _, _, results = play(shop(), [both, "done"])
    assert [json.loads(m["content"])["left"] for m in results[0].observation] == [9, 8] and results[0].reward == 1.0


def test_a_row_brings_its_prompt_and_reset_ends_it():
    payload = {"want": "tea", "prompt": "Buy tea.", "_messages": [{"role": "user", "content": "Buy tea."}]}
    opening, _, _ = play(shop(payload=payload), [])
    assert opening == [{"role": "user", "content": "Buy tea.\nYou have 10."}]


def test_done_ends_the_episode_and_a_method_scores_it():
    opening, _, results = play(shop("Ending"), [call("buy", item="a"), call("buy", item="b"), call("leave"), "never"])
    assert opening == [{"role": "user", "content": "seed 7"}]
    assert [r.reward for r in results] == [0.25, 0.25, 0.0] and results[-1].terminated


@pytest.mark.parametrize(
    ("action", "said"),
    [
        (call("buy", item="tea", count=99), "error: you have only 10"),
        (call("buy", item="gun"), "error: not sold here"),
        (call("buy", item="tea", count=1.5), "error: buy: count must be integer"),
        (call("buy", item=3), "error: buy: item must be string"),
    ],
)
def test_errors_meant_for_the_policy_are_its_answer(action, said):
    _, _, results = play(shop(), [action, "done"])
    assert results[0].observation[0]["content"] == said and results[-1].info["errors"] == 1


def test_any_other_exception_is_the_environments_failure():
    environment = shop()
    with pytest.raises(RuntimeError, match="exploded"):
        play(environment, [call("buy", item="bomb")])
    assert environment.object.closed == 1


def test_the_runs_reward_function_wins():
    config = compose(["env=tools", f"env.args.cls={HERE}:Shop", "model.path=m", f"reward={HERE}:score"])
    args = environment_args(config.env, config.reward)
    _, _, results = play(make(ToolsEnvironment, ROW, **args), [call("buy", item="x"), "here is tea"])
    assert [r.reward for r in results] == [0.0, 1.0]
    with pytest.raises(RewardFailure):
        play(make(ToolsEnvironment, {}, **{**args, "cls": f"{HERE}:NoTools"}), ["x"])


def test_no_reward_and_no_words_are_failures_not_zero():
    with pytest.raises(EnvironmentFailure, match="has no reward after reset"):
        play(shop("Mute"), ["x"])
    with pytest.raises(EnvironmentFailure, match="no reward at the end"):
        play(shop("Late"), ["x"])
    with pytest.raises(EnvironmentFailure, match="not a number"):
        play(shop("Boasting"), ["x"])
    with pytest.raises(EnvironmentFailure, match="the task has no prompt"):
        play(shop("Silent"), ["x"])


@pytest.mark.parametrize(
    ("hint", "schema", "value", "converted"),
    [
        (list[int], {"type": "array", "items": {"type": "integer"}}, [1, 2.0], [1, 2]),
        (tuple[int, str], {"type": "array", "items": {"type": ["integer", "string"]}}, [1, "a"], (1, "a")),
        (set[str], {"type": "array", "items": {"type": "string"}}, ["a", "a"], {"a"}),
        (dict[str, float], {"type": "object"}, {"a": 1}, {"a": 1.0}),
        (str | None, {"type": ["string", "null"]}, None, None),
        (Literal["a", 2], {"type": ["string", "integer"], "enum": ["a", 2]}, 2, 2),
        (Literal["a", "b"] | None, {"type": ["string", "null"], "enum": ["a", "b", None]}, "b", "b"),
        (Annotated[int, "how many"], {"type": "integer"}, 4, 4),
        (Any, {}, {"x": [1]}, {"x": [1]}),
        (float, {"type": "number"}, 3, 3.0),
    ],
)
def test_hints_are_schemas_and_conversions(hint, schema, value, converted):
    assert schema_of(hint) == schema
    found = convert(value, hint, "x")
    assert found == converted and type(found) is type(converted)


@pytest.mark.parametrize(
    ("value", "hint"),
    [(True, int), ("1", int), ([1, "a"], list[int]), ({}, list[int]), ([1], tuple[int, int]), ([[1]], set), ("c", Literal["a"]), (True, Literal[1]),
     (10**400, float), ([], dict), (1.5, int | str)],
)  # fmt: skip
def test_what_a_hint_does_not_allow_is_a_bad_argument(value, hint):
    with pytest.raises(BadArgument):
        convert(value, hint, "x")


def test_docstrings_without_sections_or_with_others():
    assert read_docstring("Just this.") == ("Just this.", {})
    assert read_docstring("") == ("", {})
    assert read_docstring("A.\n\nReturns:\n    x: y\n\nArgs:\n    a: b\n      more\n    c (int): d") == ("A.", {"a": "b more", "c": "d"})


@pytest.mark.parametrize(
    ("cls", "match"),
    [
        ("NoTools", "has no public method"),
        ("NoHint", "argument what of act has no type hint"),
        ("Strange", "has the type Thread, which is not JSON"),
        ("Spread", r"takes \*what"),
        ("score", "is not a class"),
        ("ToolError", "has no reset"),
        ("Gone", "has no 'Gone'"),
    ],
)
def test_mistakes_are_refused_at_the_door(cls, match):
    config = compose(["env=tools", f"env.args.cls={HERE}:{cls}", "model.path=m"])
    with pytest.raises(ConfigError, match=match):
        check_arguments(config.env, config.reward)


def test_kwargs_must_fit_and_cls_must_be_given():
    for extra, match in (
        ([f"env.args.cls={HERE}:Shop", "env.args.kwargs={coins: 1}"], "kwargs do not fit"),
        ([], "missing a required argument: 'cls'"),
    ):
        config = compose(["env=tools", "model.path=m", *extra])
        with pytest.raises(ConfigError, match=match):
            check_arguments(config.env, config.reward)


def test_tasks_come_from_a_file_or_from_the_class(tmp_path):
    config = compose(["env=tools", f"env.args.cls={HERE}:OwnTasks", "model.path=m"])
    task = build_source(config, [config.env]).next()
    assert task.payload["split"] == "train"
    config = compose(["env=tools", f"env.args.cls={HERE}:Shop", "model.path=m"])
    with pytest.raises(ConfigError, match="set data"):
        build_source(config, [config.env])
    (tmp_path / "rows.jsonl").write_text('{"prompt": "Buy.", "want": "tea"}\n')
    config = compose(["env=tools", f"env.args.cls={HERE}:Shop", "model.path=m", f"data.path={tmp_path}/rows.jsonl"])
    assert build_source(config, [config.env]).next().payload["want"] == "tea"


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=6,
)
HINTS = (
    int,
    float,
    str,
    bool,
    list[int],
    list[str | None],
    tuple[int, str],
    tuple[int, ...],
    set[int],
    set,
    dict[str, float],
    int | str,
    Literal["a", 1],
    Any,
)


@given(JSON, st.sampled_from(HINTS))
def test_whatever_a_policy_sends_is_converted_or_a_bad_argument(value, hint):
    try:
        converted = convert(value, hint, "x")
    except BadArgument:
        return
    if hint in (int, float, str, bool):
        assert type(converted) is hint
    assert converted == value or isinstance(converted, (tuple, set))
