"""Phrases: Python text with gaps, looked for in the syntax tree of a body.

A phrase is one expression or one statement. In it

- ``_`` stands for any expression or name, also for an attribute's name or a parameter;
- ``...`` in a list (arguments, elements, the items of a with-statement) stands for the rest of the list; in a call also
  for any keywords;
- ``...`` as the body of a compound statement stands for any body, and then also for any ``else``.

Everything else must be the same: names, constants, operators, the order of arguments. The order of keywords is free.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from functools import lru_cache

from shim._releases.sources import parse

__all__ = ["binds", "in_order", "nodes_of", "parsed", "returns_only", "stands_in", "strays"]

SKIPPED = frozenset({"ctx", "kind", "type_comment", "type_ignores", "type_params", "returns", "annotation"})


@lru_cache(maxsize=1024)
def parsed(text: str) -> ast.AST:
    """The pattern of a phrase. ValueError if the text is not one expression or one statement."""
    try:
        body = parse(text).body
    except SyntaxError as error:
        raise ValueError(f"{text!r} is not Python: {error.msg}") from None
    if len(body) != 1:
        raise ValueError(f"{text!r} must be one expression or one statement")
    return body[0].value if isinstance(body[0], ast.Expr) else body[0]


def nodes_of(definition: ast.AST) -> list[ast.AST]:
    """All nodes of a definition, in the order of its source."""
    found: list[ast.AST] = []

    def visit(node: ast.AST) -> None:
        found.append(node)
        for child in ast.iter_child_nodes(node):
            visit(child)

    visit(definition)
    return found


def in_order(phrases: Sequence[str], nodes: Sequence[ast.AST]) -> str | None:
    """The first of `phrases` that is not in `nodes` after those before it. None if all do."""
    at = 0
    for text in phrases:
        pattern = parsed(text)
        place = next((i for i in range(at, len(nodes)) if _same(pattern, nodes[i])), None)
        if place is None:
            return text
        at = place + 1
    return None


def stands_in(phrase: str, nodes: Sequence[ast.AST]) -> bool:
    return in_order((phrase,), nodes) is None


def binds(target: str, phrases: Sequence[str], function: ast.AST) -> bool:
    """Whether anything in a function outside of `phrases` binds or deletes `target`, a name or an attribute.

    That is an assignment of any form, also as a parameter of a function inside it.
    """
    pattern, allowed = parsed(target), _within(phrases, function)
    for node in nodes_of(function)[1:]:
        if id(node) in allowed or _is_parameter(node, function):
            continue
        stored = not isinstance(getattr(node, "ctx", ast.Load()), ast.Load) and _same(pattern, node)
        if stored or target in _bound_by(node):
            return True
    return False


def _is_parameter(node: ast.AST, function: ast.AST) -> bool:
    arguments: ast.arguments = function.args  # type: ignore[attr-defined]
    return any(node is own for own in ast.walk(arguments) if isinstance(own, ast.arg))


def _bound_by(node: ast.AST) -> Sequence[str]:
    if isinstance(node, ast.arg):
        return (node.arg,)
    if isinstance(node, ast.alias):
        return (node.asname or node.name.partition(".")[0],)
    if isinstance(node, (ast.Global, ast.Nonlocal)):
        return node.names
    name = getattr(node, "name", None)  # of a function, a class, a handler or a pattern
    return (name,) if isinstance(name, str) else ()


def strays(expression: str, phrases: Sequence[str], function: ast.AST) -> bool:
    """Whether `expression` occurs in a function outside of all `phrases`. Assertions and errors do not count.

    A phrase with ``...`` as its body has only the head of the statement.
    """
    pattern, allowed = parsed(expression), _within(phrases, function)
    for node in nodes_of(function):
        if isinstance(node, (ast.Assert, ast.Raise)):
            allowed.update(map(id, ast.walk(node)))
    return any(id(node) not in allowed and _same(pattern, node) for node in nodes_of(function))


def _within(phrases: Sequence[str], function: ast.AST) -> set[int]:
    """The nodes, by id, at the places of these phrases."""
    found: set[int] = set()
    for phrase in map(parsed, phrases):
        for node in nodes_of(function):
            if _same(phrase, node):
                found.update(id(inner) for part in _said_by(phrase, node) for inner in ast.walk(part))
    return found


def _said_by(pattern: ast.AST, node: ast.AST) -> Iterator[ast.AST]:
    """The parts of a node that a phrase covers: itself, or the content of its fields if its body is `...`."""
    if set(_fields(pattern)) == set(pattern._fields) - SKIPPED:
        yield node
        return
    for name in _fields(pattern):
        value = getattr(node, name)
        yield from (part for part in (value if isinstance(value, list) else [value]) if isinstance(part, ast.AST))


def returned(function: ast.AST) -> Iterator[ast.expr]:
    """The values of a function's return statements, without those of functions inside it."""
    for child in ast.iter_child_nodes(function):
        if isinstance(child, ast.Return):
            yield child.value if child.value is not None else ast.Constant(None)
        elif not isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.ClassDef)):
            yield from returned(child)


def returns_only(phrases: Sequence[str], function: ast.AST) -> str | None:
    """A returned value of `function` that is none of `phrases`, as text, or None. "nothing" without a return."""
    found = list(returned(function))
    odd = (value for value in found if not any(_same(parsed(text), value) for text in phrases))
    return next(map(ast.unparse, odd), None if found else "nothing")


def _is_rest(node: object) -> bool:
    if isinstance(node, ast.withitem):
        node = node.context_expr
    if isinstance(node, ast.Expr):
        node = node.value
    return isinstance(node, ast.Constant) and node.value is ...


def _same(pattern: object, found: object) -> bool:
    if isinstance(pattern, ast.Name) and pattern.id == "_" and isinstance(found, ast.expr):
        return not isinstance(found, ast.Starred)
    if type(pattern) is not type(found):
        return False
    if isinstance(pattern, ast.Call) and isinstance(found, ast.Call):
        return _same_call(pattern, found)
    if isinstance(pattern, ast.AST):
        return all(_same_field(pattern, found, name) for name in _fields(pattern))
    if isinstance(pattern, list):
        return _same_list(pattern, found)  # type: ignore[arg-type]
    return pattern == "_" or (type(pattern) is type(found) and pattern == found)


def _fields(pattern: ast.AST) -> Iterator[str]:
    any_body = any(map(_is_rest, getattr(pattern, "body", None) or ())) if isinstance(pattern, ast.stmt) else False
    for name in pattern._fields:
        if name not in SKIPPED and not (any_body and name in ("body", "orelse", "handlers", "finalbody")):
            yield name


def _same_field(pattern: ast.AST, found: object, name: str) -> bool:
    wanted, there = getattr(pattern, name, None), getattr(found, name, None)
    if isinstance(pattern, ast.Constant):
        return type(wanted) is type(there) and wanted == there
    return _same(wanted, there)


def _same_list(patterns: Sequence[object], found: Sequence[object]) -> bool:
    rest = next((i for i, pattern in enumerate(patterns) if _is_rest(pattern)), None)
    if rest is None:
        return len(patterns) == len(found) and all(map(_same, patterns, found))
    before, after = patterns[:rest], patterns[rest + 1 :]
    if len(found) < len(before) + len(after):
        return False
    return all(map(_same, before, found)) and all(map(_same, after, found[len(found) - len(after) :]))


def _same_call(pattern: ast.Call, found: ast.Call) -> bool:
    rest = any(map(_is_rest, pattern.args))
    named = {keyword.arg: keyword.value for keyword in found.keywords}
    wanted = {keyword.arg: keyword.value for keyword in pattern.keywords}
    if not (wanted.keys() <= named.keys() if rest else wanted.keys() == named.keys()):
        return False
    if not _same(pattern.func, found.func) or not all(_same(value, named[name]) for name, value in wanted.items()):
        return False
    return _same_list(pattern.args, found.args)
