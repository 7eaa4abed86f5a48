"""The guessing game: every ending, what counts as a guess, and how well it can be played at most."""

from __future__ import annotations

import asyncio
import functools
import random
from collections import Counter
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sao.environment import Action, Context, Environment, Task
from sao.envs.guess.environment import HIGHER, LOWER, SAY_A_NUMBER, SPANS, GuessEnvironment, mean_turns, split_of, win_rate
from sao.errors import ConfigError


def game(secret: int = 15, turns: int = 3, span: int = 7) -> GuessEnvironment:
    return GuessEnvironment(Task("t", "guess", {"low": 12, "high": 11 + span, "secret": secret}), turns=turns, span=span)


def play(environment: GuessEnvironment, *texts: str) -> list[Any]:
    async def turns() -> list[Any]:
        await environment.reset(Context())
        results = [await environment.step(Action(text)) for text in texts]
        await environment.close()
        return results

    return asyncio.run(turns())


def hints(results: list[Any]) -> list[str]:
    return [message["content"] for result in results for message in result.observation]


def test_found_at_once_later_and_with_the_last_guess() -> None:
    assert isinstance(game(), Environment) and not game().tools()
    for texts in (["15"], ["13", "15"], ["13", "16", "15"]):
        results = play(game(), *texts)
        assert [r.terminated for r in results] == [False] * (len(texts) - 1) + [True]
        assert results[-1].reward == 1.0 and sum(r.reward for r in results) == 1.0
        assert results[-1].info == {"won": 1.0, "guesses": len(texts), "unread": 0}
    assert hints(play(game(), "13", "16", "15")) == [HIGHER, LOWER]


def test_lost_when_the_guesses_are_used_up() -> None:
    results = play(game(), "12", "13", "14")
    assert [(r.reward, r.terminated, r.truncated) for r in results] == [(0.0, False, False), (0.0, False, False), (0.0, True, False)]
    assert results[-1].info["won"] == 0.0 and hints(results) == [HIGHER, HIGHER]
    assert play(game(turns=1), "12")[0].terminated


def test_a_turn_that_is_no_number_uses_up_a_guess() -> None:
    results = play(game(), "higher?", "", "15")
    assert hints(results) == [SAY_A_NUMBER, SAY_A_NUMBER] and results[-1].reward == 1.0
    lost = play(game(), "x", "y", "z")
    assert lost[-1].terminated and lost[-1].info == {"won": 0.0, "guesses": 3, "unread": 3}


@pytest.mark.parametrize("text", ["15", " 15.\n", "I guess 15", "my guess is 15."])
def test_what_is_a_guess(text: str) -> None:
    assert game().hint(text) == ""


@pytest.mark.parametrize("text", ["", "-15", "15 16", "15 or 16", "fifteen", "١٥", "1" * 5000])
def test_what_is_none(text: str) -> None:
    assert game().hint(text) == SAY_A_NUMBER


@given(st.integers(0, 2**32), st.sampled_from(["train", "held_out"]), st.sampled_from([2, 7, 63]))
def test_the_generator_keeps_ranges_apart(seed: int, split: str, span: int) -> None:
    payload = GuessEnvironment.generate_payload(random.Random(seed), split, span=span)
    assert payload["low"] <= payload["secret"] <= payload["high"] == payload["low"] + span - 1
    assert split_of(payload["low"], span) == split


def test_every_number_of_a_range_is_as_likely_in_both_splits() -> None:
    for split in ("train", "held_out"):
        drawn: Counter[int] = Counter()
        for seed in range(3000):
            payload = GuessEnvironment.generate_payload(random.Random(seed), split, span=3)
            drawn[payload["secret"] - payload["low"]] += 1
        assert max(drawn.values()) - min(drawn.values()) < 250


@pytest.mark.parametrize("args", [{"span": 1}, {"span": 20_000}, {"turns": 0}])
def test_arguments_that_make_no_game(args: Any) -> None:
    with pytest.raises(ConfigError, match=r"env\.args\.span"):
        GuessEnvironment.generate_payload(random.Random(0), "train", **args)


@functools.cache
def searched(span: int, turns: int) -> int:
    """How many of `span` numbers the best of all plays finds within `turns`."""
    if span <= 0 or turns == 0:
        return 0
    return max(1 + searched(left, turns - 1) + searched(span - 1 - left, turns - 1) for left in range(span))


@functools.cache
def fewest(span: int) -> int:
    """The least sum of guesses over all numbers of a range, by search."""
    return 0 if span <= 0 else min(span + fewest(left) + fewest(span - 1 - left) for left in range(span))


def test_the_optimum_is_what_a_search_over_all_plays_finds() -> None:
    for span in range(2, 33):
        assert mean_turns(span) == pytest.approx(fewest(span) / span)
        for turns in range(1, 6):
            assert win_rate(span, turns) == pytest.approx(searched(span, turns) / span)
    assert GuessEnvironment.optimum(span=7, turns=3) == 1.0 and GuessEnvironment.optimum(span=7, turns=2) == pytest.approx(3 / 7)


def test_clean_demonstrations_always_win_and_the_mixture_does_not() -> None:
    def won(clean: bool) -> float:
        count = 0
        for seed in range(400):
            messages = GuessEnvironment.demonstration(random.Random(seed), clean)
            low, high = (int(word.strip(".")) for word in messages[1]["content"].split()[3::2])
            assert messages[-1]["role"] == "assistant" and low + 6 == high
            *_, last = messages
            count += (
                any(
                    all(game_hint(int(g["content"]), secret) == h["content"] for g, h in zip(messages[2:-1:2], messages[3::2], strict=True))
                    and int(last["content"]) == secret
                    for secret in range(low, high + 1)
                )
                and len(messages) <= 7
            )
        return count / 400

    def game_hint(guess: int, secret: int) -> str:
        return "" if guess == secret else HIGHER if guess < secret else LOWER

    assert won(True) == 1.0
    assert 0.3 < won(False) <= 1.0


@settings(max_examples=20)
@given(st.integers(0, 2**32), st.booleans())
def test_a_demonstration_is_a_game_the_environment_would_have_played(seed: int, clean: bool) -> None:
    rng = random.Random(seed)
    messages = GuessEnvironment.demonstration(rng, clean)
    guesses, told = [m["content"] for m in messages[2::2]], [m["content"] for m in messages[3::2]]
    low = int(messages[1]["content"].split()[3])
    secrets = [
        s
        for s in range(low, low + 7)
        if hints(play(GuessEnvironment(Task("t", "guess", {"low": low, "high": low + 6, "secret": s})), *guesses)) == told
    ]
    assert secrets and len(guesses) <= 3


def test_levels_are_spans_that_six_turns_can_win() -> None:
    assert list(GuessEnvironment.levels()) == sorted(SPANS)
    assert all(win_rate(span, 6) == 1.0 for span in SPANS)
    payload = GuessEnvironment.generate_payload(random.Random(0), "train", turns=6, level=31)
    assert payload["high"] - payload["low"] == 30
