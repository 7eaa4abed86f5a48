"""The issue text of a made task: what fails, how, and what the function promises; never where the bug is."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence

MOST_TESTS = 5
MOST_LINES = 14
MOST_DOCSTRING = 600


def statement(package: str, function: str, docstring: str, failing: Sequence[str], failures: Mapping[str, str]) -> str:
    """function: dotted, as its callers know it. failing: test ids, sorted. failures: the text of each failure, as pytest writes it with --tb=native."""
    shown = "\n".join(f"- `{test}`" for test in failing[:MOST_TESTS])
    more = f"\n- and {len(failing) - MOST_TESTS} more" if len(failing) > MOST_TESTS else ""
    count = "one test of the project's own suite fails" if len(failing) == 1 else f"{len(failing)} tests of the project's own suite fail"
    parts = [f"`{function}` of {package} no longer does what it should: {count}.\n\n{shown}{more}"]
    text = next((failures[test] for test in failing if failures.get(test)), "")
    if tail := "\n".join(text.strip().splitlines()[-MOST_LINES:]):
        parts.append(f"The first of them ends with:\n\n{fenced(tail)}")
    if docstring:
        shortened = docstring if len(docstring) <= MOST_DOCSTRING else textwrap.shorten(docstring, MOST_DOCSTRING)
        parts.append(f"The documentation of `{function}` says:\n\n{fenced(shortened)}")
    parts.append("Find the cause in the source and mend it there. The tests themselves are right.")
    return "\n\n".join(parts) + "\n"


def fenced(text: str) -> str:
    """A Markdown fence longer than any in the text."""
    fence = "```"
    while fence in text:
        fence += "`"
    return f"{fence}\n{text.rstrip()}\n{fence}"
