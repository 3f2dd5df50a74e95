"""Whether the object on a target is upstream's own, or somebody else's patch."""

from __future__ import annotations

import os
import types
from collections.abc import Iterator
from typing import Any

from shim._errors import SourceError
from shim._fingerprint import Definition, definitions, split_target
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


def foreign_on(target: str, value: Any, sources: Sources) -> str:
    """Say whose object sits on `target`, or return "" where it is upstream's own (or nothing can be said).

    Upstream's own is a function whose code stands in the file and at the lines of the target's definition. Where
    the definition has decorators, only what they wrap is compared.
    """
    module, qualname = split_target(target)
    if isinstance(value, type):
        mine = value.__module__ == module and value.__qualname__ == qualname
        return "" if mine else describe(value)
    if not isinstance(value, types.FunctionType):
        return ""
    try:
        path = sources.path(module)
        found = definitions(sources.tree(module), qualname)
    except SourceError:
        return ""
    if path is None or not found:
        return ""
    outermost_only = not any(d.decorated for d in found)
    layers = [value] if outermost_only else list(_layers(value))
    return "" if any(_is_from(layer, path, found) for layer in layers) else describe(value)
