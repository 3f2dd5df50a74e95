"""Aliases: other names under which modules and classes hold the same function or class."""

from __future__ import annotations

import sys
import types
from collections.abc import Iterable, Mapping
from typing import Any

__all__ = ["Location", "find_aliases", "namespace_of", "rewrap", "unwrap"]

# (module or class, name in its dictionary, the value found there)
Location = tuple[Any, str, Any]

# issubclass(type(x), ...) instead of isinstance: isinstance reads x.__class__, which loads lazy objects.
DESCRIPTORS = (staticmethod, classmethod)


def unwrap(raw: Any) -> Any:
    """The function inside a staticmethod or classmethod; anything else is returned as it is."""
    return raw.__func__ if issubclass(type(raw), DESCRIPTORS) else raw


def rewrap(raw: Any, inner: Any) -> Any:
    """`inner` in the kind of descriptor that `raw` is."""
    return type(raw)(inner) if issubclass(type(raw), DESCRIPTORS) else inner


def namespace_of(owner: Any) -> Mapping[str, Any]:
    """The dictionary of a module or class, without an attribute read, which would load a lazy module."""
    found: Mapping[str, Any]
    if issubclass(type(owner), type):
        found = type.__dict__["__dict__"].__get__(owner)
    else:
        found = object.__getattribute__(owner, "__dict__")
    return found


def _kinds(*of: type) -> frozenset[type]:
    """The types `of` and all their subclasses in the process."""
    found, left = set(of), list(of)
    while left:
        kinds: list[type] = type.__subclasses__(left.pop())
        derived = [kind for kind in kinds if kind not in found]
        found.update(derived)
        left += derived
    return frozenset(found)


def find_aliases(objects: Iterable[Any], modules: Iterable[str] | None = None) -> list[Location]:
    """All places that hold one of `objects`, in one pass over sys.modules (or over the named modules).

    The search covers the dictionaries of modules and of the classes in them, and looks inside staticmethod and
    classmethod. It does not reach instances, closures, default arguments and containers.
    """
    wanted = {id(item) for item in objects}
    if not wanted:
        return []
    # The search looks at some hundred thousand values, so both tests for each value run in C: whether its id is wanted,
    # and whether its exact type is that of a class or descriptor. Dictionaries are copied first, because another thread
    # may write to them.
    absent, metaclasses, descriptors = wanted.isdisjoint, _kinds(type), _kinds(*DESCRIPTORS)
    either = metaclasses | descriptors
    found: list[Location] = []
    seen: set[int] = set()
    for name in list(sys.modules) if modules is None else list(modules):
        module = sys.modules.get(name)
        if not issubclass(type(module), types.ModuleType) or name == "shim" or name.startswith("shim."):
            continue
        namespace = namespace_of(module)
        values = list(namespace.values())
        if not absent(map(id, values)):
            found += [(module, key, value) for key, value in list(namespace.items()) if id(value) in wanted]
        left = [value for value in values if type(value) in metaclasses]
        while left:
            cls = left.pop()
            if id(cls) in seen:
                continue
            seen.add(id(cls))
            namespace = namespace_of(cls)
            values = list(namespace.values())
            inside = [value for value in values if type(value) in either]
            left += [value for value in inside if type(value) in metaclasses]
            held = [value.__func__ for value in inside if type(value) in descriptors]
            if not absent(map(id, values)) or not absent(map(id, held)):
                found += [(cls, key, value) for key, value in list(namespace.items()) if id(unwrap(value)) in wanted]
    return found
