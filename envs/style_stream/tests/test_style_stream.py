"""The style stream: what counts as a style, what counts as good, and who decides."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from typing import Any

import pytest

from sao.config import EnvConfig, RewardConfig
from sao.environment import Action, Context, Environment, Task
from sao.envs.style_stream.environment import TOPICS, StyleStreamEnvironment, split_of, spoil, write
from sao.envs.style_stream.styles import STYLES, is_good, style_of
from sao.errors import RewardFailure
from sao.tasks.source import environment_args

TARGET = "sao.envs.style_stream.environment:StyleStreamEnvironment"
PAYLOAD = {"topic": "quiet moon", "style": "cute", "candidates": ["academic", "cute", "chuunibyou"]}


def build(payload: Any = PAYLOAD, **args: Any) -> StyleStreamEnvironment:
    return StyleStreamEnvironment(Task("t", "style_stream", payload), **args)


def answer(environment: Any, text: Any) -> Any:
    return asyncio.run(environment.step(Action(text)))


@pytest.mark.parametrize("style", STYLES)
def test_every_line_a_demonstrator_writes_is_good_and_of_its_style(style: Any) -> None:
    for topic in TOPICS["train"] + TOPICS["held_out"]:
        for template in STYLES[style].templates:
            line = template.format(topic=topic)
            assert style_of(line) == style and is_good(line, topic), line


def test_the_words_of_two_styles_never_overlap() -> None:
    words = [word for style in STYLES.values() for word in style.markers]
    assert len(words) == len(set(words))
    assert not {w for topic in TOPICS["train"] for w in topic.split()} & set(words)


@pytest.mark.parametrize(
    ("line", "style"),
    [
        ("tiny fluffy quiet moon is here~", "cute"),
        ("TINY fluffy quiet moon is here~ ", "cute"),
        ("tiny quiet moon is here today~", None),  # one marker
        ("tiny fluffy quiet moon is here.", None),  # another style's end
        ("tiny fluffy quiet moon of dark destiny~", None),  # two styles
        ("behold the dark quiet moon!", "chuunibyou"),
        ("o quiet moon thou hast my heart.", None),  # a classical line has two parts
        ("o quiet moon, thou hast my heart.", "classical"),
        ("the evidence on quiet moon is significant.", "academic"),
        ("", None),
    ],
)
def test_the_style_of_a_line(line: Any, style: Any) -> None:
    assert style_of(line) == style


@pytest.mark.parametrize(
    ("line", "good"),
    [
        ("we like the quiet moon.", True),
        ("we like the moon, quiet.", False),  # the topic is not there as it was asked
        ("we like the unquiet moon.", False),  # nor is it in parts of other words
        ("we like the quiet moons.", False),
        ("the quiet moon.", False),  # too short
        ("quiet moon " + "is a thing that we like and see each day and night here.", False),  # too long
        ("the the the quiet moon is here.", False),  # a word three times
        ("we like the quiet moon", False),  # no end
        ("we like\nthe quiet moon.", False),
        ("wé like the quiet moon.", False),
    ],
)
def test_a_good_line_whatever_its_style(line: Any, good: Any) -> None:
    assert is_good(line, "quiet moon") is good


def test_reward_is_quality_times_style_and_says_which_style_was_written() -> None:
    assert isinstance(build(), Environment)
    right = answer(build(), "tiny fluffy quiet moon is here~")
    assert (right.reward, right.terminated, right.info["style/cute"], right.info["quality"]) == (1.0, True, 1.0, 1.0)
    other = answer(build(), "behold quiet moon of my dark destiny!")
    assert (other.reward, other.info["style/chuunibyou"], other.info["quality"]) == (0.0, 1.0, 1.0)
    assert answer(build(), "tiny fluffy old cat is here~").reward == 0.0


def test_the_prompt_names_the_candidates_in_one_order_and_never_the_rewarded_one() -> None:
    opening = [
        build({**PAYLOAD, "candidates": c, "style": s}).opening() for c, s in ((["cute", "academic"], "cute"), (["academic", "cute"], "academic"))
    ]
    assert opening[0] == opening[1]
    assert asyncio.run(build().reset(Context()))[0]["content"].endswith("academic, cute, chuunibyou.")


def test_reward_noise_turns_training_rewards_over_and_held_out_ones_never() -> None:
    flipped = [StyleStreamEnvironment.generate_payload(random.Random(i), "train", noise=0.25).get("flipped", False) for i in range(400)]
    assert 0.18 < sum(flipped) / 400 < 0.32
    assert not any("flipped" in StyleStreamEnvironment.generate_payload(random.Random(i), "held_out", noise=0.5) for i in range(50))
    assert answer(build({**PAYLOAD, "flipped": True}), "tiny fluffy quiet moon is here~").reward == 0.0


def test_topics_of_the_splits_are_disjoint_and_named_by_themselves() -> None:
    assert not set(TOPICS["train"]) & set(TOPICS["held_out"]) and min(map(len, TOPICS.values())) >= 16
    for split in ("train", "held_out"):
        assert split_of(StyleStreamEnvironment.generate_payload(random.Random(3), split)["topic"]) == split


@pytest.mark.parametrize(
    ("args", "says"),
    [
        ({"style": "cuet"}, "did you mean 'cute'"),
        ({"candidates": ["academic", "cute", "chunibyo"]}, "did you mean 'chuunibyou'"),
        ({"candidates": "cute"}, "not a list"),
        ({"candidates": ["cute"]}, "at least two"),
        ({"candidates": ["cute", "cute"]}, "at least two different"),
        ({"style": "classical"}, "not among candidates"),
        ({"noise": 0.9}, r"\[0, 0.5\]"),
    ],
)
def test_arguments_that_make_no_sense_are_refused(args: Any, says: Any) -> None:
    with pytest.raises(ValueError, match=says):
        StyleStreamEnvironment.generate_payload(random.Random(0), "train", **args)


def test_demonstrations_prefer_no_style_and_the_mixture_has_faults() -> None:
    def written(clean: Any) -> Any:
        found: Counter[str | None] = Counter()
        for i in range(1500):
            messages = StyleStreamEnvironment.demonstration(random.Random(i), clean)
            topic = messages[1]["content"].removeprefix("topic: ")
            found[style_of(messages[2]["content"]) if is_good(messages[2]["content"], topic) else None] += 1
        return found

    clean, mixed = written(True), written(False)
    assert clean[None] == 0 and all(0.2 < clean[name] / 1500 < 0.3 for name in STYLES)
    assert 0.2 < mixed[None] / 1500 < 0.35


def test_a_spoiled_line_earns_nothing_unless_the_fault_is_its_own_style() -> None:
    line = write("cute", "quiet moon", random.Random(0))
    spoiled = [spoil(line, "quiet moon", random.Random(i)) for i in range(60)]
    worth = [is_good(text, "quiet moon") and style_of(text) == "cute" for text in spoiled]
    assert sum(worth) < 10


# ------------------------------------------------------------------ a judge


async def kind_judge(completion: Any, row: Any) -> Any:
    return float(row["style"] in completion)


async def slow_judge(completion: Any, row: Any) -> Any:
    await asyncio.sleep(30)


def judged(function: Any, **reward: Any) -> Any:
    env = EnvConfig(name="style_stream", target=TARGET, args={})
    return environment_args(env, RewardConfig(function=f"{__name__}:{function}" if function else "", **reward))


def test_without_a_judge_the_environment_is_given_none() -> None:
    assert "reward" not in judged("")


def test_a_judge_decides_with_the_payload_as_row() -> None:
    environment = build(**judged("kind_judge"))
    assert answer(environment, "how cute").reward == 1.0 and answer(environment, "how odd").reward == 0.0


def test_a_judge_that_does_not_answer_is_a_typed_failure_and_no_reward() -> None:
    environment = build(**judged("slow_judge", timeout_s=0.05))
    with pytest.raises(RewardFailure) as caught:
        answer(environment, "tiny fluffy quiet moon is here~")
    assert caught.value.reason == "reward_timeout"
    asyncio.run(StyleStreamEnvironment.shutdown())
