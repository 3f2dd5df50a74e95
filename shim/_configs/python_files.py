"""A launcher in Python, read and not run: the --flags in its strings, and values set as config.model.x = 2."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from shim._configs.arguments import Given, given_by
from shim._configs.shell_words import MAYBE, NOT_SAID
from shim._configs.values import OPEN, put
from shim._errors import OptionError

__all__ = ["given_in"]


def given_in(text: str, file: Path) -> Given:
    """OptionError if the text is no Python."""
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError) as error:
        raise OptionError(f"--config {file}, line {getattr(error, 'lineno', '?')} is no Python: {error}") from None
    words: list[str] = []
    found = Given("")
    for node, maybe in _visited(tree, False):
        if isinstance(node, ast.Constant | ast.JoinedStr):
            text = _text(node)
            if "--" in text:
                words += [_marked(word, maybe) for word in text.split()]
        elif isinstance(node, ast.Assign) and len(node.targets) == 1 and isinstance(node.targets[0], ast.Attribute):
            path = _path(node.targets[0])
            if path:
                put(found.settings, path, OPEN if maybe else _literal(node.value))
        elif isinstance(node, ast.keyword) and node.arg is not None:
            put(found.settings, node.arg, OPEN if maybe else _literal(node.value))
    given = given_by(words)
    given.settings = {**found.settings, **given.settings}
    imported = [node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    given.program = " ".join(["python", *dict.fromkeys(imported)])
    return given


def _visited(node: ast.AST, maybe: bool) -> Iterator[tuple[ast.AST, bool]]:
    """All nodes in order, each with whether a condition decides about it. Docstrings and defaults are left out."""
    branch = isinstance(node, ast.If | ast.IfExp | ast.Match | ast.ExceptHandler)
    for child in ast.iter_child_nodes(node):
        if (isinstance(child, ast.Expr) and isinstance(child.value, ast.Constant)) or isinstance(child, ast.arguments):
            continue
        now = maybe or branch
        yield child, now
        if not isinstance(child, ast.JoinedStr):
            yield from _visited(child, now)
        else:
            for part in child.values:
                if isinstance(part, ast.FormattedValue) and isinstance(part.value, ast.IfExp):
                    yield from _visited(part.value, True)


def _text(node: ast.Constant | ast.JoinedStr) -> str:
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else ""
    return "".join(str(part.value) if isinstance(part, ast.Constant) else NOT_SAID for part in node.values)


def _marked(word: str, maybe: bool) -> str:
    return MAYBE + word if maybe and word.startswith("-") else word


def _path(node: ast.Attribute) -> str:
    """`cfg.model.x` as model.x; "" if it begins with a call, or belongs to self."""
    parts: list[str] = []
    at: ast.expr = node
    while isinstance(at, ast.Attribute):
        parts.append(at.attr)
        at = at.value
    return ".".join(reversed(parts)) if isinstance(at, ast.Name) and at.id != "self" else ""


def _literal(node: ast.expr) -> object:
    try:
        return ast.literal_eval(node)
    except ValueError:
        return OPEN
