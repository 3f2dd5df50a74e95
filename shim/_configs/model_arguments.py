"""The arguments of a model that a function in Python returns, read and not run: miles' scripts/models/NAME.py."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from shim._configs.files import Search
from shim._configs.shell_words import NOT_SAID

__all__ = ["PRINTS_THEM", "arguments_of"]

PRINTS_THEM = "model_args_utils.py"  # what a script runs for them, with a model's name


def arguments_of(model: str, search: Search, file: Path) -> str:
    """Of the model of this name, for the script `file`. One that is not at hand is missed."""
    found = None if NOT_SAID in model else search.find(f"scripts/models/{model}.py", file.parent)
    if found is None:
        search.miss(str(file), f"scripts/models/{model.replace(NOT_SAID, '...')}.py")
        return NOT_SAID
    search.enter(found, f"{file}, {PRINTS_THEM} {model}")
    text = "".join(_texts(_returned(found, search), search, found))
    search.leave()
    return text


def _returned(file: Path, search: Search) -> ast.AST | None:
    """What its `model_args` returns, if that is one expression."""
    try:
        body = ast.parse(search.text_of(file)).body
    except SyntaxError:
        return None
    for node in body:
        if isinstance(node, ast.FunctionDef) and node.name == "model_args":
            returned = [one.value for one in ast.walk(node) if isinstance(one, ast.Return)]
            return returned[0] if len(returned) == 1 else None
    return None


def _texts(node: ast.AST | None, search: Search, file: Path) -> Iterator[str]:
    if isinstance(node, ast.Constant):
        yield str(node.value)
    elif isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        yield from _texts(node.left, search, file)
        yield from _texts(node.right, search, file)
    elif isinstance(node, ast.JoinedStr):
        for part in node.values:
            yield str(part.value) if isinstance(part, ast.Constant) else NOT_SAID
    elif isinstance(node, ast.Call) and _called(node) == "load_sibling_model_args" and len(node.args) == 2:
        yield arguments_of("".join(_texts(node.args[1], search, file)), search, file)  # a variant of that model
    else:
        yield NOT_SAID


def _called(node: ast.Call) -> str:
    return node.func.id if isinstance(node.func, ast.Name) else ""
