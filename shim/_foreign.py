"""Whether the object on a target is upstream's own, or somebody else's patch."""

from __future__ import annotations

import ast
import os
import types
from collections.abc import Iterator
from typing import Any

from shim._errors import SourceError
from shim._fingerprint import Definition, outline, split_target
from shim._sources import Sources

__all__ = ["describe", "foreign_on"]


def describe(value: Any) -> str:
    """Where an object comes from, for people: module, name and file."""
    code = getattr(value, "__code__", None)
    name = getattr(value, "__qualname__", None) or type(value).__qualname__
    place = f" in {code.co_filename}:{code.co_firstlineno}" if isinstance(code, types.CodeType) else ""
    return f"{getattr(value, '__module__', None) or type(value).__module__}.{name}{place}"


def _layers(value: Any) -> Iterator[Any]:
    """The object and what it wraps, as functools.wraps records it."""
    seen: set[int] = set()
    while value is not None and id(value) not in seen:
        seen.add(id(value))
        yield value
        value = getattr(value, "__wrapped__", None)


def _is_from(value: Any, path: str, found: list[Definition]) -> bool:
    code = getattr(value, "__code__", None)
    if not isinstance(code, types.CodeType):
        return False
    # Byte code keeps the path it was imported by, which may be another spelling of the same file.
    if code.co_filename != path and os.path.realpath(code.co_filename) != os.path.realpath(path):
        return False
    return any(first <= code.co_firstlineno <= last for first, last in (d.lines for d in found))


def _is_wrapped(definition: Definition) -> bool:
    """Whether a decorator may have put something else in the place of the function that stands in the source."""
    plain = ("staticmethod", "classmethod", "property", "setter", "getter", "deleter", "abstractmethod")
    decorators = getattr(definition.node, "decorator_list", ())
    return any((getattr(d, "attr", None) or getattr(d, "id", None)) not in plain for d in decorators)


def foreign_on(target: str, value: Any, sources: Sources) -> str:
    """Say whose object sits on `target`, or return "" where it is upstream's own (or nothing can be said).

    Upstream's own is a function or property whose code stands in the file and at the lines of the target's
    definition. Where the definition has decorators, only what they wrap is compared. Of what a module has imported
    or computed nothing can be said.
    """
    module, qualname = split_target(target)
    try:
        path = sources.path(module)
        found = outline(sources, module, qualname)
    except SourceError:
        return ""
    nodes = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    if path is None or not found or not all(isinstance(d.node, nodes) for d in found):
        return ""
    decorated = any(map(_is_wrapped, found))
    if isinstance(value, type):
        mine = value.__module__ == module and value.__qualname__ == qualname
        return "" if mine or decorated else describe(value)
    if isinstance(value, property):
        value = value.fget
    if not isinstance(value, types.FunctionType):
        return "" if decorated else describe(value)
    layers = list(_layers(value)) if decorated else [value]
    return "" if any(_is_from(layer, path, found) for layer in layers) else describe(value)
