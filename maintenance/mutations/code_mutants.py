"""Mutants of shim's own code: one small change each, as the new text of a piece of a file.

Their order and their names depend on the text of the file alone.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass

__all__ = ["Mutant", "mutants_of"]

OPPOSITE = {
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
}
DROPPED = (ast.Expr, ast.AugAssign, ast.Delete, ast.Raise, ast.Break, ast.Continue, ast.For)
OTHER_NAME = {"any": "all", "all": "any", "min": "max", "max": "min"}


@dataclass(frozen=True)
class Mutant:
    """What stands in a file from (line, column) to (end_line, end_column) becomes `new`. Columns count bytes."""

    kind: str
    line: int
    column: int
    end_line: int
    end_column: int
    old: str
    new: str

    @property
    def name(self) -> str:
        return f"{self.line}: {self.kind}: {_short(self.old)} -> {_short(self.new)}"

    def applied(self, text: str) -> str:
        lines = text.encode().splitlines(keepends=True)
        before = b"".join(lines[: self.line - 1]) + lines[self.line - 1][: self.column]
        after = lines[self.end_line - 1][self.end_column :] + b"".join(lines[self.end_line :])
        return (before + self.new.encode() + after).decode()


def mutants_of(text: str) -> list[Mutant]:
    """All mutants of a file, in the order of its lines. Docstrings, annotations and messages stay as they are."""
    tree = ast.parse(text)
    found = {}
    for node, kind, new in _changes(tree):
        at = (node.lineno, node.col_offset, node.end_lineno, node.end_col_offset)
        old = ast.get_source_segment(text, node) or ""
        if new != ast.unparse(node):
            found.setdefault((*at, new), Mutant(kind, *at, old, new))
    return [found[key] for key in sorted(found)]


def _changes(tree: ast.Module) -> Iterator[tuple[ast.AST, str, str]]:
    """(the node that is replaced, what is done, the new text)"""
    for node in _nodes(tree):
        if isinstance(node, (ast.If, ast.While, ast.IfExp)):
            yield from _negated(node.test)
        elif isinstance(node, ast.comprehension):
            for test in node.ifs:
                yield from _negated(test)
        elif isinstance(node, ast.BoolOp):
            other = ast.BoolOp(ast.Or() if isinstance(node.op, ast.And) else ast.And(), node.values)
            yield node, "and, or", f"({ast.unparse(other)})"
            for place, value in enumerate(node.values):
                rest = node.values[:place] + node.values[place + 1 :]
                left = rest[0] if len(rest) == 1 else ast.BoolOp(node.op, rest)
                yield node, f"without {_short(ast.unparse(value))}", f"({ast.unparse(left)})"
        elif isinstance(node, ast.Compare) and len(node.ops) == 1 and type(node.ops[0]) in OPPOSITE:
            other = ast.Compare(node.left, [OPPOSITE[type(node.ops[0])]()], node.comparators)
            yield node, "compare", f"({ast.unparse(other)})"
        elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            yield node, "without not", f"({ast.unparse(node.operand)})"
        elif isinstance(node, ast.Return) and not _is_none(node.value):
            yield node, "return", "return None"
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            if node.func.id in OTHER_NAME:
                yield node.func, "name", OTHER_NAME[node.func.id]
            elif node.func.id == "reversed":
                yield node, "order", ast.unparse(node.args[0])
        elif isinstance(node, ast.Constant) and isinstance(node.value, (bool, int)):
            yield node, "constant", str(not node.value if isinstance(node.value, bool) else node.value + 1)
        if isinstance(node, DROPPED) or _writes_to_an_object(node):
            yield node, "drop", "pass"


def _nodes(tree: ast.AST) -> Iterator[ast.AST]:
    """All nodes that do something: without docstrings, annotations, decorators and messages."""
    for child in ast.iter_child_nodes(tree):
        if isinstance(child, ast.Expr) and isinstance(child.value, ast.Constant):
            continue
        if isinstance(child, ast.If) and ast.unparse(child.test) == "TYPE_CHECKING":
            continue
        if isinstance(child, (ast.JoinedStr, ast.arg)) or child in getattr(tree, "decorator_list", ()):
            continue
        if child in (getattr(tree, "annotation", None), getattr(tree, "returns", None)):
            continue
        yield child
        yield from _nodes(child)


def _negated(test: ast.expr) -> Iterator[tuple[ast.AST, str, str]]:
    """The opposite of a condition, where no other change is that."""
    opposite = (
        isinstance(test, ast.Compare)
        and len(test.ops) == 1
        and not isinstance(test.ops[0], (ast.Lt, ast.LtE, ast.Gt, ast.GtE))
    )
    if not opposite and not (isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not)):
        yield test, "negate", f"(not ({ast.unparse(test)}))"


def _writes_to_an_object(node: ast.AST) -> bool:
    """Whether it sets an attribute or an item: without it names are still bound."""
    return isinstance(node, ast.Assign) and all(isinstance(t, (ast.Attribute, ast.Subscript)) for t in node.targets)


def _is_none(value: ast.expr | None) -> bool:
    return value is None or (isinstance(value, ast.Constant) and value.value is None)


def _short(text: str, width: int = 90) -> str:
    text = " ".join(text.split())
    return text if len(text) <= width else text[: width - 3] + "..."
