import ast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sao.swe.mutations import KINDS, mutations

SOURCE = b'''"""A module."""
LIMIT = 3


class Box:
    def fits(self, size, others):
        """Whether it fits."""
        if size < 5 and others:
            return size * 2 + 1
        while size not in others:
            size -= 1
        self.size = size
        return "%s" % size
'''


def changed(source: bytes) -> dict[tuple[str, int], list[str]]:
    found: dict[tuple[str, int], list[str]] = {}
    for mutation in mutations(source):
        line = mutation.apply(source).splitlines()[mutation.line - 1].decode().strip()
        found.setdefault((mutation.kind, mutation.line), []).append(line)
    return found


def test_each_kind_makes_the_change_its_name_says():
    assert changed(SOURCE) == {
        ("comparison", 8): ["if size >= 5 and others:"],
        ("and_or", 8): ["if size < 5 or others:"],
        ("constant", 8): ["if size < 6 and others:"],
        ("negated_if", 8): ["if not (size < 5 and others):"],
        ("operator", 9): ["return size // 2 + 1", "return size * 2 - 1"],
        ("constant", 9): ["return size * 3 + 1", "return size * 2 + 2"],
        ("comparison", 10): ["while size in others:"],
        ("negated_if", 10): ["while not (size not in others):"],
        ("constant", 11): ["size -= 2"],
        ("early_return", 11): ["return"],
        ("early_return", 12): ["return"],
    }
    assert {kind for kind, _ in changed(SOURCE)} == set(KINDS)


def test_a_mutation_knows_its_function_and_touches_one_line_alone():
    for mutation in mutations(SOURCE):
        assert (mutation.function, mutation.docstring) == ("Box.fits", "Whether it fits.")
        before, after = SOURCE.splitlines(keepends=True), mutation.apply(SOURCE).splitlines(keepends=True)
        assert [i for i, (a, b) in enumerate(zip(before, after, strict=True), 1) if a != b] == [mutation.line]


def test_line_endings_and_names_outside_ascii_stay():
    source = "def f(é):\r\n    return é + 1\r\n".encode()
    assert [m.apply(source).decode() for m in mutations(source)] == ["def f(é):\r\n    return é - 1\r\n", "def f(é):\r\n    return é + 2\r\n"]


@pytest.mark.parametrize(
    "source", [b"def f():\n    '''\x0c'''\n    return 1\n", "# coding: latin-1\ndef f():\n    return 'é', 1\n".encode("latin-1")]
)
def test_a_file_whose_lines_readers_count_differently_gives_none(source: bytes):
    assert mutations(source) == []


def test_a_file_that_does_not_parse_is_an_error():
    with pytest.raises(SyntaxError):
        mutations(b"def f(:\n")


OPERAND = st.sampled_from(["a", "b[0]", "f(c, 2)", "(a\n     + b)", "not d"])
TEST = st.builds(lambda a, op, b: f"({a}) {op} ({b})", OPERAND, st.sampled_from(["<", "==", "in", "is not", "and", "or", "+", "%"]), OPERAND)


@settings(max_examples=30)
@given(TEST, TEST)
def test_what_is_mutated_parses_still_and_differs(first: str, second: str):
    source = f"def f(a, b, c, d):\n    if {first}:\n        x = {second}\n    return 1\n".encode()
    for mutation in mutations(source):
        after = mutation.apply(source)
        assert ast.dump(ast.parse(after)) != ast.dump(ast.parse(source))
