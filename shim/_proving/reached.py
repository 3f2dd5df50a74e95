"""Which of upstream's functions run while a proof runs, in its process and in the ranks that it forks.

A proof speaks for a body only if it runs that body. A tracer that is told of each call, and traces no lines, finds out.
"""

from __future__ import annotations

import ast
import os
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from inspect import CO_NEWLOCALS
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

from shim._errors import SourceError
from shim._releases.fingerprint import definitions, split_target
from shim._releases.sources import Sources

__all__ = ["Spot", "reached_in", "spots_of", "watch"]

Spot = tuple[str, str, int, int]  # a body: its target, its file, and its first and last line


def spots_of(sources: Sources, bodies: Mapping[str, str]) -> tuple[Spot, ...]:
    """The places of bodies. bodies: for each target the name under which its body is defined (see Variant.inherits).

    A body that cannot be read has no spot, nor has one that runs at the import: a name, a class without methods.
    """
    found: list[Spot] = []
    for target, body in bodies.items():
        module, qualname = split_target(body)
        try:
            file, places = sources.path(module), definitions(sources.tree(module), qualname)
        except SourceError:
            continue
        found += [(target, file or "", *place.lines) for place in places if _is_called(place.node)]
    return tuple(found)


def _is_called(node: ast.stmt) -> bool:
    inside = node.body if isinstance(node, ast.ClassDef) else [node]
    return any(isinstance(each, (ast.FunctionDef, ast.AsyncFunctionDef)) for each in inside)


def watch(spots: Sequence[Spot], directory: Path) -> None:
    """Note in a file of `directory` each target that is called from now on: here, in new threads, in forked processes.

    Not undone: the process is one that runs a proof and ends.
    """
    places: dict[str, list[Spot]] = {}
    for spot in spots:
        places.setdefault(os.path.realpath(spot[1]), []).append(spot)
    tracer = _tracer(places, directory)
    threading.settrace(tracer)
    sys.settrace(tracer)


def _tracer(places: dict[str, list[Spot]], directory: Path) -> Callable[[FrameType, str, Any], None]:
    seen: set[CodeType] = set()
    said: set[str] = set()

    def called(frame: FrameType, event: str, argument: Any) -> None:
        code = frame.f_code
        if code in seen:
            return
        seen.add(code)
        if not code.co_flags & CO_NEWLOCALS:  # the body of a class or module, which runs at the import
            return
        for target, _, first, last in places.get(os.path.realpath(code.co_filename), ()):
            if first <= code.co_firstlineno <= last and target not in said:
                said.add(target)
                with (directory / f"{os.getpid()}").open("a", encoding="utf-8") as file:
                    file.write(target + "\n")

    return called


def reached_in(directory: Path) -> list[str]:
    """The targets that were called, sorted."""
    return sorted({line for file in directory.iterdir() for line in file.read_text("utf-8").splitlines()})
