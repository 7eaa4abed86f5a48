"""One-line bugs: every place of a Python file where one small change of the syntax tree makes a wrong program out of a right one.

A mutation rewrites part of one line and leaves every other byte of the file alone, so that "replace line N" can undo it. Kinds:

    comparison      a < b -> a >= b, == -> !=, in -> not in, is -> is not
    operator        + <-> -, * <-> //, / -> *, % -> //, | <-> &, << <-> >>
    negated_if      if a -> if not (a); also elif and while
    constant        7 -> 8
    and_or          and <-> or
    early_return    a one-line statement of a function -> return
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass

KINDS = ("comparison", "operator", "negated_if", "constant", "and_or", "early_return")

COMPARISONS: dict[type[ast.cmpop], str] = {
    ast.Lt: ">=",
    ast.LtE: ">",
    ast.Gt: "<=",
    ast.GtE: "<",
    ast.Eq: "!=",
    ast.NotEq: "==",
    ast.In: "not in",
    ast.NotIn: "in",
    ast.Is: "is not",
    ast.IsNot: "is",
}
SPELT = re.compile(rb"not\s+in|is\s+not|in|is|<=|>=|==|!=|<|>")
OPERATORS: dict[type[ast.operator], tuple[str, str]] = {
    ast.Add: ("+", "-"),
    ast.Sub: ("-", "+"),
    ast.Mult: ("*", "//"),
    ast.FloorDiv: ("//", "*"),
    ast.Div: ("/", "*"),
    ast.Mod: ("%", "//"),
    ast.BitOr: ("|", "&"),
    ast.BitAnd: ("&", "|"),
    ast.LShift: ("<<", ">>"),
    ast.RShift: (">>", "<<"),
}
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


@dataclass(frozen=True)
class Mutation:
    """Replace bytes `start`..`end` of line `line` (from 1) by `text`. function: the innermost function around it, dotted, and its docstring."""

    kind: str
    line: int
    start: int
    end: int
    text: str
    function: str
    docstring: str

    def apply(self, source: bytes) -> bytes:
        lines = source.splitlines(keepends=True)
        line = lines[self.line - 1]
        lines[self.line - 1] = line[: self.start] + self.text.encode() + line[self.end :]
        return b"".join(lines)


def mutations(source: bytes) -> list[Mutation]:
    """All of them, in file order. Raises SyntaxError for a file that does not parse."""
    lines = source.splitlines(keepends=True)
    try:
        if source.decode().splitlines(keepends=True) != [line.decode() for line in lines]:
            return []  # a line break that only some readers see would shift the numbers
    except UnicodeDecodeError:
        return []
    return sorted(_Finder(lines).of(ast.parse(source)), key=lambda m: (m.line, m.start, m.kind))


class _Finder:
    """Walks function bodies: what runs at import breaks everything at once or nothing, and is no task."""

    def __init__(self, lines: list[bytes]) -> None:
        self.lines = lines

    def of(self, node: ast.AST, prefix: str = "") -> Iterator[Mutation]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, FUNCTIONS):
                name = f"{prefix}{child.name}"
                docstring = ast.get_docstring(child) or ""
                for statement in child.body:
                    yield from self._inside(statement, name, docstring)
                yield from self.of(child, f"{name}.")
            elif isinstance(child, ast.ClassDef):
                yield from self.of(child, f"{prefix}{child.name}.")
            else:
                yield from self.of(child, prefix)

    def _inside(self, node: ast.AST, function: str, docstring: str) -> Iterator[Mutation]:
        if isinstance(node, (*FUNCTIONS, ast.ClassDef)) or (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)):
            return  # a function of its own is visited as one; a docstring is not code
        for kind, line, start, end, text in self._at(node):
            if self.lines[line - 1][start:end] != text.encode():
                yield Mutation(kind, line, start, end, text, function, docstring)
        for name, value in ast.iter_fields(node):
            if name in ("annotation", "returns", "type_comment"):
                continue
            for child in value if isinstance(value, list) else [value]:
                if isinstance(child, ast.AST):
                    yield from self._inside(child, function, docstring)

    def _at(self, node: ast.AST) -> Iterator[tuple[str, int, int, int, str]]:
        if isinstance(node, ast.Compare) and len(node.ops) == 1:
            yield from self._between("comparison", node.left, node.comparators[0], SPELT, COMPARISONS[type(node.ops[0])])
        elif isinstance(node, ast.BinOp) and type(node.op) in OPERATORS and not _is_text(node.left):
            spelt, other = OPERATORS[type(node.op)]
            yield from self._between("operator", node.left, node.right, re.compile(re.escape(spelt.encode())), other)
        elif isinstance(node, ast.BoolOp) and len(node.values) == 2:
            now, other = ("and", "or") if isinstance(node.op, ast.And) else ("or", "and")
            yield from self._between("and_or", node.values[0], node.values[1], re.compile(rb"\b" + now.encode() + rb"\b"), other)
        elif isinstance(node, (ast.If, ast.While)) and _one_line(node.test):
            start, end = node.test.col_offset, node.test.end_col_offset or 0
            text = self.lines[node.test.lineno - 1][start:end].decode()
            yield "negated_if", node.test.lineno, start, end, f"not ({text})"
        elif isinstance(node, ast.Constant) and type(node.value) is int and _one_line(node):
            start, end = node.col_offset, node.end_col_offset or 0
            if self.lines[node.lineno - 1][start:end].isdigit():
                yield "constant", node.lineno, start, end, str(node.value + 1)
        elif isinstance(node, (ast.Assign, ast.AugAssign, ast.Expr)) and _one_line(node):
            line = self.lines[node.lineno - 1]
            if not line[: node.col_offset].strip() and not line[node.end_col_offset or 0 :].strip():
                yield "early_return", node.lineno, node.col_offset, node.end_col_offset or 0, "return"

    def _between(self, kind: str, left: ast.expr, right: ast.expr, spelt: re.Pattern[bytes], other: str) -> Iterator[tuple[str, int, int, int, str]]:
        """The operator between two operands, where all of it is on one line."""
        if left.end_lineno == right.lineno:
            start = left.end_col_offset or 0
            match = spelt.search(self.lines[right.lineno - 1], start, right.col_offset)
            if match:
                yield kind, right.lineno, match.start(), match.end(), other


def _one_line(node: ast.expr | ast.stmt) -> bool:
    return node.lineno == node.end_lineno


def _is_text(node: ast.expr) -> bool:
    """`"..." % x` is a format, not arithmetic."""
    return isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Constant) and isinstance(node.value, (str, bytes)))
