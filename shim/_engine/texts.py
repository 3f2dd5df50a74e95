"""The text of a function as a syntax tree, without asking importlib for anything.

inspect.getsource looks through all modules, and may load a lazy one. This reads the file, or what linecache has of it,
so that it can be asked under the engine's lock.
"""

from __future__ import annotations

import ast
import linecache
import types
from functools import lru_cache

from shim._releases.fingerprint import FunctionNode
from shim._releases.sources import parse

__all__ = ["texts_of"]


@lru_cache(maxsize=256)  # by the code and not by the function, whose closure could keep a model alive
def texts_of(code: types.CodeType) -> tuple[ast.AST, ...]:
    """The definitions that `code` may have been compiled from: several for lambdas on one line.

    None of them if the file cannot be read, or is another by now.
    """
    tree = _tree_of(code.co_filename)
    found = [node for node in ast.walk(tree) if _begins_at(node, code.co_firstlineno)] if tree is not None else []
    return tuple(node for node in found if getattr(node, "name", "<lambda>") == code.co_name)


def _begins_at(node: ast.AST, line: int) -> bool:
    if not isinstance(node, (*FunctionNode, ast.Lambda)):
        return False
    decorators = getattr(node, "decorator_list", ())
    first: int = min([node.lineno, *(decorator.lineno for decorator in decorators)])
    return first == line


@lru_cache(maxsize=8)
def _tree_of(file: str) -> ast.Module | None:
    try:
        return parse("".join(linecache.getlines(file)))
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None
