"""Other code on the targets of shim: objects that stand there now, and sources that assign to them."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from shim._engine.engine import ENGINE
from shim._engine.foreign import foreign_on
from shim._engine.names import namespace_of, unwrap
from shim._releases.fingerprint import split_target

if TYPE_CHECKING:
    from shim._planning.plan import Plan

__all__ = ["assignments_in", "loaded_foreign"]

UPSTREAM = ("megatron", "transformer_engine")
LARGEST = 1_000_000  # characters. Larger files are skipped.


def loaded_foreign(plan: Plan) -> Iterator[tuple[str, str]]:
    """(target, whose object stands there) for each loaded target of the plan that other code has replaced."""
    for target in dict.fromkeys(t for d in plan.decisions.values() for t in d.targets):
        module, qualname = split_target(target)
        value = sys.modules.get(module)
        for name in qualname.split("."):
            # Read without getattr, because a lazy module would import something.
            value = None if value is None else namespace_of(value).get(name)
        beneath = None if value is None else unwrap(ENGINE.beneath(value))  # what lies beneath shim's own object
        found = "" if beneath is None else foreign_on(target, beneath, plan.environment.sources)
        if found:
            yield target, found


def assignments_in(folder: str | Path, targets: Iterable[str]) -> Iterator[tuple[str, str]]:
    """(target, file:line) for every ``Class.method = ...`` or ``setattr(module, "name", ...)`` below `folder`.

    Reads imports and names in the text. Imports nothing, and does not see computed names.
    """
    by_name: dict[str, list[str]] = {}
    for target in dict.fromkeys(targets):
        by_name.setdefault(target.rpartition(":")[2].rpartition(".")[2], []).append(target)
    names = "|".join(map(re.escape, by_name))
    if not by_name:
        return
    worth_parsing = re.compile(rf"\.(?:{names})\b[^=\n]*=[^=]|setattr\([^)]*(?:{names})\b")
    for path in sorted(Path(folder).rglob("*.py")):
        try:
            text = path.read_text("utf-8")
            if len(text) > LARGEST or not worth_parsing.search(text):
                continue
            tree = ast.parse(text)
        except (OSError, ValueError, SyntaxError, RecursionError):
            continue  # Python does not run a file that it cannot read
        imported = _imported(tree)
        for line, base, name in _assigned(tree):
            owner = _dotted(base, imported)
            for target in by_name.get(name, ()) if owner.partition(".")[0] in UPSTREAM else ():
                cls = split_target(target)[1].rpartition(".")[0]
                if not cls or owner.rpartition(".")[2] == cls:
                    yield target, f"{path}:{line}"


def _imported(tree: ast.AST) -> dict[str, str]:
    """The full names of all imports of the file, by the names they bind."""
    found: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {
                a.asname or a.name.partition(".")[0]: a.name if a.asname else a.name.partition(".")[0]
                for a in node.names
            }
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found |= {a.asname or a.name: f"{node.module}.{a.name}" for a in node.names}
    return found


def _assigned(tree: ast.AST) -> Iterator[tuple[int, ast.expr, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign):
            for target in node.targets:
                if isinstance(target, ast.Attribute):
                    yield node.lineno, target.value, target.attr
        elif isinstance(node, ast.Call) and getattr(node.func, "id", "") == "setattr" and len(node.args) == 3:
            name = node.args[1]
            if isinstance(name, ast.Constant) and isinstance(name.value, str):
                yield node.lineno, node.args[0], name.value


def _dotted(node: ast.expr, imported: dict[str, str]) -> str:
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    if not isinstance(node, ast.Name):
        return ""
    return ".".join([imported.get(node.id, ""), *reversed(parts)])
