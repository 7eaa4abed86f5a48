"""reasoning-gym: disjoint seeds, answers taken out of completions, and scorers that never run what a policy wrote."""

from __future__ import annotations

import ast
import asyncio
import contextlib
import importlib
import itertools
import random
import sys
import warnings
from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sao.environment import Action, Context, Environment, Task
from sao.envs.reasoning_gym.arithmetic import NotArithmetic, value
from sao.envs.reasoning_gym.environment import SEEDS, ReasoningGymEnvironment
from sao.envs.reasoning_gym.scoring import OURS, REFUSED, Generator, at_once, extract, generator
from sao.errors import ConfigError, RewardFailure
from sao.rewards.runner import close_shared

with warnings.catch_warnings():
    warnings.simplefilter("ignore", SyntaxWarning)  # of a package that it imports
    reasoning_gym = pytest.importorskip("reasoning_gym", exc_type=ImportError)

ONE_DIGIT = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}
# Modules that evaluate something, but only what they made themselves: their own problem, their own template, or their own kind of expression.
OF_THEIR_OWN = {"bf", "basic_arithmetic", "bitwise_arithmetic", "codeio", "gsm_symbolic", "number_sorting", "propositional_logic"}
EVALUATES = {"eval", "exec", "compile", "parse_expr", "sympify", "parse_latex"}


@pytest.fixture(scope="module", autouse=True)
def no_process_stays() -> Iterator[None]:
    yield
    close_shared()


def build(seed: int = 5, dataset: str = "chain_sum", **args: Any) -> ReasoningGymEnvironment:
    return ReasoningGymEnvironment(Task("t", "reasoning_gym", {"seed": seed}), dataset=dataset, **args)


def episode(text: Any, environment: ReasoningGymEnvironment) -> Any:
    """Reset, and one step with a text or a function of the item."""

    async def run() -> Any:
        await environment.reset(Context())
        result = await environment.step(Action(text(environment.entry) if callable(text) else text))
        await environment.close()
        return result

    return asyncio.run(run())


# ------------------------------------------------------------------ tasks


def test_the_ranges_of_seeds_do_not_meet() -> None:
    ranges = sorted(SEEDS.values(), key=lambda seeds: seeds.start)
    assert all(a.stop <= b.start for a, b in itertools.pairwise(ranges))
    for split in ("train", "held_out"):
        drawn = {ReasoningGymEnvironment.generate_payload(random.Random(i), split, dataset="chain_sum")["seed"] for i in range(50)}
        assert len(drawn) == 50 and all(seed in SEEDS[split] for seed in drawn)


@pytest.mark.parametrize("dataset", ["chain_sum", "letter_counting", "survo", "acre", "list_functions"])
def test_an_item_is_a_function_of_its_seed(dataset: str) -> None:
    made = generator(dataset, {})
    seeds = [7, 2**30 + 7, *range(20, 60)]
    first = [made.entry(seed)["question"] for seed in seeds]
    random.seed()  # what else draws from the global generator does not matter
    other = Generator(dataset, {})
    assert [other.entry(seed)["question"] for seed in seeds] == first and len(set(first)) > 30


def test_worked_examples_are_the_same_in_every_episode_and_never_the_question() -> None:
    openings = [asyncio.run(build(seed, shots=2, config=ONE_DIGIT).reset(Context())) for seed in (1, 2)]
    assert openings[0][:-1] == openings[1][:-1] and openings[0][-1] != openings[1][-1]
    assert [m["role"] for m in openings[0]] == ["system", "user", "assistant", "user", "assistant", "user"]


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ({"dataset": "chain_smu"}, "env.args.dataset=chain_smu is no data set of reasoning-gym; did you mean 'chain_sum'?"),
        ({"dataset": "zzzzzz"}, "for instance chain_sum"),
        ({"config": {"min_trems": 2}}, "env.args.config={'min_trems': 2} does not suit chain_sum"),
        ({"config": {"min_terms": 5, "max_terms": 2}}, "does not suit chain_sum"),
        ({"config": {"seed": 5}}, "sets seed or size"),
        ({"shots": -1}, "env.args.shots=-1 must lie between 0 and 64"),
        ({"dataset": "rush_hour", "shots": 1}, "rush_hour has no answers to show"),
        *(({"dataset": dataset}, f"env.args.dataset={dataset} ") for dataset in REFUSED),
    ],
)
def test_what_cannot_work_is_refused_in_one_sentence(args: Any, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        ReasoningGymEnvironment.generate_payload(random.Random(0), "train", **{"dataset": "chain_sum", **args})
    assert message in str(caught.value) and "\n" not in str(caught.value)


def test_without_the_package_the_mend_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"pip install 'sao-rl\[reasoning_gym\]'"):
        Generator("chain_sum", {})


def test_nothing_of_it_is_imported_with_the_environment() -> None:
    for name in ("environment", "scoring"):
        tree = ast.parse(Path(importlib.import_module(f"sao.envs.reasoning_gym.{name}").__file__ or "").read_text())
        top = {alias.name for node in tree.body if isinstance(node, ast.Import) for alias in node.names}
        assert "reasoning_gym" not in top


# ------------------------------------------------------------------ answers and scores


@pytest.mark.parametrize(
    ("text", "lines", "answer"),
    [
        ("12", False, "12"),
        ("I think so.\n 12 \n", False, "12"),
        ("<answer> 12 </answer> I am sure", False, "12"),
        ("<answer>1</answer><answer>2</answer>", False, "2"),
        ("<answer>1 2\n3 4</answer>", True, "1 2\n3 4"),
        ("1 2\n3 4\n", True, "1 2\n3 4"),
        ("<answer>12", False, "<answer>12"),
        ("12</answer>", False, "12</answer>"),
        ("<answer>" * 200_000 + "12</answer>", False, "12"),
        ("", False, ""),
    ],
)
def test_the_answer_in_a_completion(text: str, lines: bool, answer: str) -> None:
    assert extract(text, lines=lines) == answer


def test_full_and_partial_credit_and_the_collapse_control() -> None:
    assert isinstance(build(), Environment)
    right = episode(lambda entry: f"Well.\n {entry['answer']} ", build(config=ONE_DIGIT))
    assert right.reward == 1.0 and right.terminated and right.info["right"] == 1.0
    almost = build(config=ONE_DIGIT)
    assert 0 < episode(lambda entry: f"it is {entry['answer']}", almost).reward < 1, (
        "the package gives partial credit for an answer with more around it"
    )
    strict = episode(lambda entry: f"it is {entry['answer']}", build(config=ONE_DIGIT, partial=False))
    assert strict.reward == 0.0 and 0 < strict.info["score"] < 1
    common = episode(lambda entry: almost.majority.answer, build(config=ONE_DIGIT))
    assert common.info["said_majority"] == 1.0 and 0.05 < common.info["majority_accuracy"] < 0.5


def test_a_scorer_that_raises_means_a_wrong_answer() -> None:
    assert episode("two times three", build(dataset="prime_factorization")).reward == 0.0


def test_the_answer_of_every_kind_of_item_earns_full_credit() -> None:
    """Of those that are quick to make; several have no answer of their own."""
    for dataset in ("number_sorting", "spell_backward", "power_function", "tower_of_hanoi", "mini_sudoku", "caesar_cipher", *OURS):
        made = generator(dataset, {})
        entry = made.entry(11)
        answer = extract(f"<answer>{entry['answer']}</answer>", lines=True)
        assert at_once(dataset, answer, entry) == 1.0, dataset


# ------------------------------------------------------------------ what a policy wrote is never run


def payload(path: Path) -> str:
    return f"__import__('pathlib').Path({str(path)!r}).write_text('ran')"


@pytest.mark.parametrize("dataset", sorted(OURS))
def test_an_answer_that_would_run_as_code_is_wrong_and_does_not_run(dataset: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sao.envs.reasoning_gym.environment.MAJORITY_S", 0.0)
    for text in (payload(tmp_path / "ran"), f"[{payload(tmp_path / 'ran')}]", f"4 + {payload(tmp_path / 'ran')}"):
        assert episode(text, build(dataset=dataset)).reward == 0.0
    assert not (tmp_path / "ran").exists()


def test_the_payload_does_run_in_the_packages_own_scorer(tmp_path: Path) -> None:
    """The guard removed."""
    for dataset in ("binary_matrix", "spiral_matrix", "string_insertion", "n_queens", "countdown"):
        made, ran = generator(dataset, {}), tmp_path / dataset
        made.score(payload(ran), made.entry(3))
        assert ran.exists(), dataset


def test_every_module_that_evaluates_is_known() -> None:
    from reasoning_gym.factory import DATASETS

    found = set()
    for dataset, (cls, _) in DATASETS.items():
        tree = ast.parse(Path(sys.modules[cls.__module__].__file__ or "").read_text())
        for node in ast.walk(tree):
            if isinstance(node, ast.Call):
                name = node.func.id if isinstance(node.func, ast.Name) else node.func.attr if isinstance(node.func, ast.Attribute) else ""
                owner = node.func.value.id if isinstance(node.func, ast.Attribute) and isinstance(node.func.value, ast.Name) else ""
                if name in EVALUATES and owner != "re":
                    found.add(dataset)
    assert found - OF_THEIR_OWN <= {*REFUSED, *OURS}, "a data set evaluates something: is it what the policy wrote?"
    assert {"countdown", "n_queens", "simple_integration"} <= found


def test_a_scorer_that_hangs_fails_the_episode_and_is_not_a_reward() -> None:
    environment = build(dataset="rubiks_cube", timeout_s=0.5)
    with pytest.raises(RewardFailure) as caught:
        episode("R2000000", environment)
    assert caught.value.reason == "reward_timeout"


def test_a_scorer_that_would_take_all_memory_is_stopped() -> None:
    """600 million moves are a list of 4.8 GB."""
    assert episode("R600000000", build(dataset="rubiks_cube")).reward < 0.5


def test_an_answer_of_a_megabyte_is_wrong_at_once() -> None:
    assert episode("1" * 2**20, build()).reward == 0.0


# ------------------------------------------------------------------ arithmetic without eval


@pytest.mark.parametrize(
    ("text", "result", "used"),
    [("1+2*3", 7, [1, 2, 3]), ("(1+2)*3", 9, [1, 2, 3]), ("8/3/2", Fraction(4, 3), [8, 3, 2]), ("-(2-5)", 3, [2, 5]), ("6 × 4 ÷ 1", 24, [6, 4, 1])],
)
def test_expressions(text: str, result: Any, used: Any) -> None:
    assert value(text) == (result, used)


@pytest.mark.parametrize(
    "text", ["", "1+", "(1", "1)", "1 2", "2**3", "1/0", "1/(2-2)", "x", "1.5", "1e9", "٢+٢", "9" * 12, "(" * 150 + "1", "1+" * 200 + "1"]
)
def test_what_is_no_expression(text: str) -> None:
    with pytest.raises(NotArithmetic):
        value(text)


@given(st.text(alphabet="0123456789+-*/() x._'", max_size=60))
def test_any_text_has_a_value_or_is_refused(text: str) -> None:
    with contextlib.suppress(NotArithmetic):
        value(text)


def test_puzzle24_takes_the_given_numbers_only() -> None:
    made = generator("puzzle24", {})
    entry = made.entry(3)
    assert at_once("puzzle24", str(entry["answer"]), entry) == 1.0
    assert made.score("1*1*24*1" if made._made.config.max_value >= 24 else "6*4*1*1", entry) == 1.0, "the package does"
    assert at_once("puzzle24", "6*4*1*1", entry) == 0.0
