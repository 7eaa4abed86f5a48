"""An answer written in LaTeX or plain text, brought to one spelling and split into what can be compared part by part. Nothing is evaluated here.

    read("x \\in (-\\infty, 3]")      Brackets("(", (Atom("-\\infty"), Atom("3")), "]")
    read("\\{1, \\tfrac12\\}")        Collection((Atom("1"), Atom("\\frac{1}{2}")))
    read("2 \\pm \\sqrt3")            Collection of both values
    read("3x+y=7")                   Equation(Atom("3x+y"), Atom("7"))

Brackets keep their kind and order, so an interval is never a point and never a set; a percent sign divides by 100; digits are kept as they are written.
"""

from __future__ import annotations

import re
from dataclasses import dataclass


class Unreadable(ValueError):
    """Not a mathematical answer that can be compared; the message is the reason."""


@dataclass(frozen=True)
class Atom:
    """One expression in the LaTeX that the reader of expressions takes."""

    latex: str


@dataclass(frozen=True)
class Words:
    """An answer that is no formula: compared without regard to case and spaces."""

    text: str


@dataclass(frozen=True)
class Collection:
    """A set, or several values in no order."""

    items: tuple[Node, ...]


@dataclass(frozen=True)
class Brackets:
    """A point, a tuple or an interval: order and the kind of both brackets matter."""

    opening: str
    items: tuple[Node, ...]
    closing: str


@dataclass(frozen=True)
class Union:
    """Intervals and sets joined by a cup, in no order."""

    items: tuple[Node, ...]


@dataclass(frozen=True)
class Equation:
    left: Atom
    right: Atom


Node = Atom | Words | Collection | Brackets | Union | Equation

UNICODE = {
    "−": "-", "–": "-", "×": r"\times ", "·": r"\cdot ", "÷": "/", "π": r"\pi ", "∞": r"\infty ", "≤": r"\le ", "≥": r"\ge ", "∪": r"\cup ", "°": r"^\circ ",
    "∅": r"\emptyset ", "±": r"\pm ", "∈": r"\in ", "\u00a0": " ", "²": "^{2}", "³": "^{3}", "½": r"\frac{1}{2}", "¼": r"\frac{1}{4}", "¾": r"\frac{3}{4}",
}  # fmt: skip
FUNCTIONS = "arcsin|arccos|arctan|sinh|cosh|tanh|sin|cos|tan|cot|sec|csc|log|ln|exp|sqrt"
NUMBER = r"(?:\d+(?:\.\d*)?|\.\d+)"
NAMES = re.compile(r"\\(?:begin|end)\s*\{[A-Za-z]+\}|\\[A-Za-z]+")
SIMPLE = r"(?:\{[^{}]*\}|\\[A-Za-z]+|\d|[A-Za-z])"
OPENING, CLOSING = ("(", "[", "{", r"\{"), (")", "]", "}", r"\}")
TOKENS = re.compile(r"\\[{}]|\\[A-Za-z]+|.", re.DOTALL)
VARIABLE = r"[A-Za-z](?:_\{?\w+\}?)?"


def read(text: str) -> Node:
    """The structure of one answer. Raises Unreadable with the reason."""
    plain = spell(text)
    if not plain:
        raise Unreadable("it is empty")
    return _node(plain)


def spell(text: str) -> str:
    """The same answer in the one spelling that this module splits: dressing, sizes, spaces and units gone, arguments braced."""
    text = text.replace("\0", "")
    for sign, latex in UNICODE.items():
        text = text.replace(sign, latex)
    text = re.sub(r"\\(?:left|right|big|Big|bigg|Bigg|bigl|bigr|displaystyle|textstyle|limits)(?![A-Za-z])\.?", "", text)
    text = re.sub(r"(?<=\d)(?:,?\\[,!;: ]|\{,\}|~)(?=\d{3}(?!\d))", "", text)  # 1\,000 and 1{,}000 are one number
    text = re.sub(r"\\\$|\$|\\\(|\\\)|\\\[|\\\]|\\!", "", text)
    text = re.sub(r"(?<!\\)\\[,;: ]|~|\\q?quad(?![A-Za-z])|\s+", " ", text)
    text = re.sub(r"\\(?:text|mathrm|textrm|mbox)\s*\{\s*(or|and)\s*\}|(?<![A-Za-z])(?:or|and)(?![A-Za-z])", ",", text)
    text = re.sub(r"\\[dtc]frac(?![A-Za-z])", r"\\frac", text)
    text = _degrees(_without_unit(text.strip().rstrip(".").rstrip()))
    text = re.sub(r"\\(?:mathrm|mathbf|operatorname|text|textrm|textbf|mathit|mbox)\s*\{([^{}]*)\}", r"\1", text)
    text = re.sub(rf"(?<![A-Za-z\\])({FUNCTIONS})(?![A-Za-z])", r"\\\1", text)
    text = re.sub(r"(?<![A-Za-z\\])(pi|theta|infty)(?![A-Za-z])", r"\\\1 ", text)
    text = re.sub(r"(?<![A-Za-z\\])(?:infinity|inf|oo)(?![A-Za-z])", r"\\infty ", text, flags=re.IGNORECASE)
    text = text.replace("**", "^").replace("*", r"\cdot ")
    text = _braced(text)
    text = re.sub(rf"({NUMBER})\s*\\?%", r"(\\frac{\1}{100})", text)
    return re.sub(r"\s+", " ", text).strip()


def _without_unit(text: str) -> str:
    """A number with its unit is the number: `12\\text{ cm}^2`, `12 cm`; a bare unit, or a word, is left alone."""
    text = re.sub(r"(?<=[\d})])\s*\\(?:text|mathrm|textrm|mbox)\s*\{(?![ie]\})[^{}]*\}(?:\s*\^\s*\{?\d\}?)?$", "", text)
    number = re.fullmatch(r"([-+]?\d[\d.,/]*)\s+(?!(?:pi|sqrt)\b)[A-Za-z]{2,}(?: [A-Za-z]+){0,3}\.?(?:\s*\^\s*\{?\d\}?)?", text)
    return number[1] if number else text


def _degrees(text: str) -> str:
    """A degree sign is a unit, except under a function, where it is a factor of pi / 180."""
    sign = r"\s*(?:\^\s*\{?\s*\\circ\s*\}?|\\degree(?![A-Za-z]))"
    return re.sub(sign, r"\\cdot\\frac{\\pi}{180}" if re.search(r"sin|cos|tan|cot|sec|csc", text) else "", text)


def _braced(text: str) -> str:
    """Arguments in braces: `\\frac12`, `\\sqrt2`, `\\sqrt(2)`, `x^10`, `x^(n+1)`, `x^-1`."""
    text = re.sub(r"\\sqrt\s*(?=\()|(?<=\^)\s*(?=\()", lambda found: found.group() + "\0", text)
    while (at := text.find("\0")) >= 0:
        end = _closing(text, at + 1)
        text = f"{text[:at]}{{{text[at + 2 : end]}}}{text[end + 1 :]}"
    text = re.sub(r"\^\s*([-+]?\d+)", r"^{\1}", text)
    text = re.sub(r"_\s*(\d+|[A-Za-z])", r"_{\1}", text)
    text = re.sub(r"\^\s*(-\\?[A-Za-z]+)", r"^{\1}", text)
    text = re.sub(r"\\sqrt\s*(\[[^\[\]]*\])?\s*(\d|[A-Za-z]|\\[A-Za-z]+)", r"\\sqrt\1{\2}", text)
    frac = re.compile(rf"\\frac\s*({SIMPLE})\s*({SIMPLE})")
    return frac.sub(lambda m: r"\frac" + "".join(p if p.startswith("{") else f"{{{p}}}" for p in m.groups()), text)


def _node(text: str) -> Node:
    text = text.strip()
    while text.startswith("{") and _closing(text, 0) == len(text) - 1:
        text = text[1:-1].strip()
    unions = _split(text, r"\cup")
    if len(unions) > 1:
        return Union(tuple(_node(part) for part in unions))
    member = re.fullmatch(rf"{VARIABLE}\s*\\in(?![A-Za-z])\s*(.+)", text, re.DOTALL)
    if member:
        return _node(member[1])
    if re.fullmatch(r"\\emptyset|\\varnothing|\\\{\s*\\\}", text):
        return Collection(())
    if text.startswith(r"\{") and _closing(text, 0) == len(text) - 1:
        return Collection(tuple(_values(text[2:-2])))
    if re.fullmatch(r"[-+]?\d{1,3}(?:,\d{3})+(?:\.\d+)?", text):
        return Atom(_atom(text.replace(",", "")))
    if text[:1] in "([" and text[-1:] in ")]" and _closing(text, 0) == len(text) - 1:
        items = _split(text[1:-1], ",")
        if len(items) > 1:
            return Brackets(text[0], tuple(_node(item) for item in items), text[-1])
    if len(_split(text, ",")) > 1 or r"\pm" in text:
        items = _values(text)
        return Collection(tuple(items)) if len(items) > 1 else items[0]
    return _relation(text) or _expression(text)


def _values(text: str) -> list[Node]:
    """The values of a list: `x = 1, x = 2` names them twice, `2 \\pm 1` is two of them."""
    found: list[Node] = []
    for item in _split(text, ","):
        named = re.fullmatch(rf"{VARIABLE}\s*=\s*([^=]+)", item.strip())
        item = named[1] if named else item
        signs = item.split(r"\pm")
        if len(signs) > 2 or r"\mp" in item:
            raise Unreadable("it holds several \\pm")
        found += [_node(sign.join(signs)) for sign in "+-"] if len(signs) == 2 else [_node(item)]
    return found


def _relation(text: str) -> Node | None:
    """Inequalities of one variable as intervals, equations; `f(x) =` and `S =` before anything but an expression are names."""
    text = re.sub(r"\\(?:geq|geqslant|ge|gt)(?![A-Za-z])|>=|>", lambda m: ">" if m.group() in (r"\gt", ">") else ">=", text)
    text = re.sub(r"\\(?:leq|leqslant|le|lt)(?![A-Za-z])|<=|<", lambda m: "<" if m.group() in (r"\lt", "<") else "<=", text)
    parts = [part.strip() for part in re.split(r"(<=|>=|<|>)", text)]
    if len(parts) in (3, 5):
        return _interval(parts)
    sides = _split(text, "=")
    if len(sides) == 1:
        return None
    if len(sides) > 2 or not all(side.strip() for side in sides):
        raise Unreadable("it is a chain of equations")
    right = _node(sides[1])
    if re.fullmatch(rf"{VARIABLE}(?:\(\w\))?", sides[0]) and not (isinstance(right, Atom) and len(sides[0]) == 1):
        return right
    left = _expression(sides[0])
    if isinstance(left, Atom) and isinstance(right, Atom):
        return Equation(left, right)
    raise Unreadable("its equation has words in it")


def _interval(parts: list[str]) -> Node:
    if any(sign.startswith(">") for sign in parts[1::2]):
        if not all(sign.startswith(">") for sign in parts[1::2]):
            raise Unreadable("its inequalities point both ways")
        parts = [part.replace(">", "<") for part in reversed(parts)]
    if len(parts) == 3:
        parts = [r"-\infty", "<", *parts] if re.fullmatch(VARIABLE, parts[0]) else [*parts, "<", r"\infty"]
    low, first, variable, second, high = parts
    if not re.fullmatch(VARIABLE, variable):
        raise Unreadable("its inequality is not solved for a variable")
    return Brackets("[" if first == "<=" else "(", (_node(low), _node(high)), "]" if second == "<=" else ")")


def _expression(text: str) -> Atom | Words:
    text = text.strip()
    if re.search(r"[A-Za-z]{4,}|[A-Za-z]{2,} [A-Za-z]{2,}", NAMES.sub(" ", text)) or re.fullmatch(r"[A-Z]{2,3}", text):
        return Words(re.sub(r"\s+", "", text).casefold())
    if re.search(r"\d\s+\d", text):
        raise Unreadable("it has numbers side by side")
    return Atom(_atom(text))


def _atom(text: str) -> str:
    text = re.sub(r"(?<![\d.}\])A-Za-z])(\d+)\s*(\\frac\{\d+\}\{\d+\})", r"(\1+\2)", text)  # a mixed number
    text = re.sub(r"(\d*)\.(\d*)(?:\\overline\s*\{(\d+)\}|\\bar\s*\{?(\d)\}?)", _repeating, text)
    text = re.sub(r"(?<![\d.])(\d*)\.(\d+)(?!\.?\d)", lambda m: rf"(\frac{{{int(m[1] + m[2])}}}{{{10 ** len(m[2])}}})", text)
    text = re.sub(r"(?<=\d)\.(?!\d)", "", text)
    return re.sub(r"(?<![\w}])(\d+)_\{?(\d+)\}?", _in_base, text)


def _repeating(found: re.Match[str]) -> str:
    whole, fixed, cycle = found[1] or "0", found[2], found[3] or found[4]
    numerator = int(whole + fixed + cycle) - int(whole + fixed)
    return rf"(\frac{{{numerator}}}{{{(10 ** len(cycle) - 1) * 10 ** len(fixed)}}})"


def _in_base(found: re.Match[str]) -> str:
    try:
        return str(int(found[1], int(found[2])))
    except ValueError:
        raise Unreadable(f"{found[1]} is no number in base {found[2]}") from None


def _closing(text: str, at: int) -> int:
    """The last character of the bracket that ends the one opened at `at`, of whatever kind: an interval's may differ. Raises Unreadable when none does."""
    level = 0
    for found in TOKENS.finditer(text, at):
        level += (found.group() in OPENING) - (found.group() in CLOSING)
        if level <= 0:
            return found.end() - 1
    raise Unreadable("its brackets do not match")


def _split(text: str, separator: str) -> list[str]:
    """`text` at every separator outside brackets. Raises Unreadable when those do not match."""
    parts, level, last = [], 0, 0
    for found in TOKENS.finditer(text):
        level += (found.group() in OPENING) - (found.group() in CLOSING)
        if level == 0 and found.group() == separator:
            parts.append(text[last : found.start()].strip())
            last = found.end()
    if level != 0:
        raise Unreadable("its brackets do not match")
    return [*parts, text[last:].strip()]
