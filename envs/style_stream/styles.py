"""The rules of the style stream: which style a line is written in, and whether it is a good line. Plain functions over text, no model.

A style is a small list of marker words and a shape. A line has a style when it holds at least two different markers of it, none of any other
style, and ends as the style ends. Words are lower-case runs of letters; everything is decided by them and by the last character.
"""

from __future__ import annotations

import difflib
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

WORD = re.compile(r"[a-z]+")
ENDS = ".!~"
FEWEST_WORDS, MOST_WORDS, MOST_REPEATS = 5, 14, 2
MARKERS_NEEDED = 2


@dataclass(frozen=True)
class Style:
    """`markers` belong to this style alone. `templates` are lines a demonstrator writes; `{topic}` stands for the topic."""

    markers: frozenset[str]
    end: str
    templates: tuple[str, ...]
    comma: bool = False  # the line falls into two parts

    def shaped(self, text: str) -> bool:
        return text.endswith(self.end) and (not self.comma or "," in text)


STYLES: dict[str, Style] = {
    "academic": Style(
        frozenset(["evidence", "suggests", "significant", "data", "observe", "therefore", "analysis"]),
        ".",
        (
            "the evidence on {topic} is significant.",
            "new data suggests that {topic} is stable.",
            "we observe {topic} and therefore write an analysis.",
        ),
    ),
    "classical": Style(
        frozenset(["o", "thou", "thy", "hast", "alas", "ere", "doth"]),
        ".",
        (
            "o {topic}, thou hast my heart.",
            "alas {topic}, thy days are few.",
            "ere dawn, {topic} doth sing to me.",
        ),
        comma=True,
    ),
    "cute": Style(
        frozenset(["tiny", "fluffy", "hug", "yay", "nya", "sweet"]),
        "~",
        (
            "tiny fluffy {topic} is here~",
            "yay, a hug for {topic} nya~",
            "sweet {topic} says nya to me~",
        ),
    ),
    "chuunibyou": Style(
        frozenset(["behold", "dark", "sealed", "abyss", "destiny", "eye"]),
        "!",
        (
            "behold {topic} of my dark destiny!",
            "my sealed eye sees {topic} now!",
            "the abyss of {topic} is my destiny!",
        ),
    ),
}


def words(text: str) -> list[str]:
    return WORD.findall(text.lower())


def style_of(text: str) -> str | None:
    """The one style a line is written in, or None when it has none or mixes them."""
    text = text.strip()
    found = set(words(text))
    counts = {name: len(found & style.markers) for name, style in STYLES.items()}
    touched = [name for name, count in counts.items() if count]
    if len(touched) != 1 or counts[touched[0]] < MARKERS_NEEDED:
        return None
    return touched[0] if STYLES[touched[0]].shaped(text) else None


def is_good(text: str, topic: str) -> bool:
    """Whether a line is well made, whatever its style: one line of 5 to 14 words with an end mark, the whole topic in it, no word more than twice."""
    text = text.strip()
    found = words(text)
    if not text.isascii() or "\n" in text or not text.endswith(tuple(ENDS)) or not FEWEST_WORDS <= len(found) <= MOST_WORDS:
        return False
    return f" {' '.join(words(topic))} " in f" {' '.join(found)} " and max(Counter(found).values()) <= MOST_REPEATS


def check_style(name: object, key: str) -> str:
    """The name if it is a style's. Raises ValueError with the nearest one, or all."""
    if isinstance(name, str) and name in STYLES:
        return name
    near = difflib.get_close_matches(str(name), STYLES, n=1)
    raise ValueError(f"{key} names the style {name!r}, " + (f"did you mean {near[0]!r}?" if near else f"there are {', '.join(STYLES)}"))


def check_candidates(candidates: Sequence[str], style: str) -> tuple[str, ...]:
    """The candidate styles in the order of `STYLES`, so that a list has one wording. Raises ValueError for a list that cannot be asked for."""
    if isinstance(candidates, str) or not isinstance(candidates, Sequence):
        raise ValueError(f"candidates={candidates!r} is not a list of styles")
    named = [check_style(name, "candidates") for name in candidates]
    if len(set(named)) != len(named) or len(named) < 2:
        raise ValueError(f"candidates={list(candidates)} must be at least two different styles")
    if style not in named:
        raise ValueError(f"style={style} is rewarded but is not among candidates={list(candidates)}")
    return tuple(name for name in STYLES if name in named)
