"""Whether an override calls the method that it overrides, which is then still in force."""

from __future__ import annotations

import ast
import types
from collections.abc import Iterable, Mapping
from functools import lru_cache
from typing import Any

from shim._releases.sources import parse

__all__ = ["calls"]


def calls(override: Any, name: str, mended: Any, bases: Iterable[type]) -> bool:
    """Whether the function `override` calls the method `name` of one of `bases`, or the function `mended` itself.

    It does where its text has `super().name` or `Class.name`, or where its closure holds the method, as that of a
    wrapper does. Which branch runs is not followed. A text that cannot be read calls nothing.
    """
    import inspect  # here, because it takes long to import, and most models have no override

    held = _closure_of(override)
    # Types are asked of type(), because a closure may hold a lazy object.
    if any((value.__func__ if type(value) is types.MethodType else value) is mended for value in held.values()):
        return True
    try:
        function = inspect.unwrap(override)
    except ValueError:  # it wraps itself
        return False
    code, known = getattr(function, "__code__", None), {**getattr(function, "__globals__", {}), **_closure_of(function)}
    found = _attributes_in(code) if code is not None else ()
    return any(_is_base(node.value, known, list(bases)) for node in found if node.attr == name)


def _closure_of(function: Any) -> dict[str, Any]:
    code, cells = getattr(function, "__code__", None), getattr(function, "__closure__", None)
    found: dict[str, Any] = {}
    for name, cell in zip(code.co_freevars, cells, strict=True) if code is not None and cells else ():
        try:
            found[name] = cell.cell_contents
        except ValueError:  # it is still empty
            continue
    return found


@lru_cache(maxsize=256)  # by the code and not by the function, whose closure could keep a model alive
def _attributes_in(code: types.CodeType) -> tuple[ast.Attribute, ...]:
    import inspect
    import textwrap

    try:
        tree = parse(textwrap.dedent(inspect.getsource(code)))
    except (OSError, TypeError, ValueError, SyntaxError, RecursionError):
        return ()
    return tuple(node for node in ast.walk(tree) if isinstance(node, ast.Attribute))


def _is_base(node: ast.expr, known: Mapping[str, Any], bases: list[type]) -> bool:
    """Whether an expression is `super(...)`, or the name of a base class, with its module or without."""
    if isinstance(node, ast.Call):
        return isinstance(node.func, ast.Name) and node.func.id == "super"
    if isinstance(node, ast.Attribute):
        return node.attr in {base.__name__ for base in bases}
    return isinstance(node, ast.Name) and any(known.get(node.id) is base for base in bases)
