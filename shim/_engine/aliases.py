"""Aliases: further names under which modules and classes hold a function or class that is being replaced."""

from __future__ import annotations

import sys
import types
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

__all__ = ["Location", "find_aliases", "namespace_of", "rewrap", "unwrap"]

# (module or class, name in its dictionary, the value found there)
Location = tuple[Any, str, Any]

# Types are asked of type() here, because isinstance() asks the object for its __class__, which fires lazy objects.
DESCRIPTORS = (staticmethod, classmethod)


def unwrap(raw: Any) -> Any:
    """The function inside a staticmethod or classmethod; anything else is returned as it is."""
    return raw.__func__ if issubclass(type(raw), DESCRIPTORS) else raw


def rewrap(raw: Any, inner: Any) -> Any:
    """`inner` in the kind of descriptor that `raw` is."""
    return type(raw)(inner) if issubclass(type(raw), DESCRIPTORS) else inner


def namespace_of(owner: Any) -> Mapping[str, Any]:
    """The dictionary of a module or class. Never a plain attribute read: that would load a lazy module."""
    found: Mapping[str, Any]
    if issubclass(type(owner), type):
        found = type.__dict__["__dict__"].__get__(owner)
    else:
        found = object.__getattribute__(owner, "__dict__")
    return found


def _classes(namespace: Mapping[str, Any], seen: set[int]) -> Iterator[type]:
    for value in list(namespace.values()):
        if issubclass(type(value), type) and id(value) not in seen:
            seen.add(id(value))
            yield value
            yield from _classes(namespace_of(value), seen)


def find_aliases(objects: Iterable[Any], modules: Iterable[str] | None = None) -> list[Location]:
    """All places that hold one of `objects`, in one pass over sys.modules (or over the named modules).

    Looks at the values of module dictionaries and at the dictionaries of the classes in them, through staticmethod
    and classmethod. Instances, closures, default arguments and containers are out of reach.
    """
    wanted = {id(item) for item in objects}
    if not wanted:
        return []
    found: list[Location] = []
    seen: set[int] = set()
    for name in list(sys.modules) if modules is None else list(modules):
        module = sys.modules.get(name)
        if not issubclass(type(module), types.ModuleType) or name == "shim" or name.startswith("shim."):
            continue
        namespace = namespace_of(module)
        for key, value in list(namespace.items()):
            if id(value) in wanted:
                found.append((module, key, value))
        for cls in _classes(namespace, seen):
            for key, value in list(namespace_of(cls).items()):
                if id(unwrap(value)) in wanted:
                    found.append((cls, key, value))
    return found
