"""Aliases: other names under which modules and classes hold the same function or class."""

from __future__ import annotations

import sys
import types
from collections.abc import Iterable, Mapping
from typing import Any

__all__ = ["Location", "dictionary_of", "find_aliases", "namespace_of", "rewrap", "unwrap"]

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


# Python's own descriptors: a class may have a `__dict__` that computes another, or raises.
_OF_CLASS = vars(type)["__dict__"]
_OF_MODULE = vars(types.ModuleType)["__dict__"]


def namespace_of(owner: Any) -> Mapping[str, Any]:
    """The dictionary of a module or class, without an attribute read, which would load a lazy module.

    Empty if there is none: C code may hold a class that it has not made ready, such as _socket before socket is
    imported, and sys.modules may hold anything.
    """
    kind = type(owner)
    if issubclass(kind, type):
        found: Mapping[str, Any] | None = _OF_CLASS.__get__(owner)
    elif issubclass(kind, types.ModuleType):
        found = _OF_MODULE.__get__(owner)
    else:
        try:
            found = object.__getattribute__(owner, "__dict__")
        except Exception:  # noqa: BLE001 - it has none, or foreign code computes it
            found = None
    return found if issubclass(type(found), (dict, types.MappingProxyType)) else {}  # type: ignore[return-value]


def dictionary_of(module: types.ModuleType) -> dict[str, Any]:
    """The dictionary of a module, to be written to."""
    found: dict[str, Any] = _OF_MODULE.__get__(module)
    return found


def _kinds(*of: type) -> frozenset[int]:
    """The ids of the types `of` and of all their subclasses in the process.

    Ids, because a metaclass may define == and hash() for its classes, or take them away.
    """
    found, left = set(map(id, of)), list(of)
    while left:
        kinds: list[type] = type.__subclasses__(left.pop())
        derived = [kind for kind in kinds if id(kind) not in found]
        found.update(map(id, derived))
        left += derived
    return frozenset(found)


def _of_type(kinds: frozenset[int], values: list[Any]) -> list[Any]:
    """The values whose exact type is one of `kinds`."""
    return [value for value in values if id(type(value)) in kinds]


def find_aliases(objects: Iterable[Any], modules: Iterable[str] | None = None) -> list[Location]:
    """All places that hold one of `objects`, in one pass over sys.modules (or over the named modules).

    The search covers the dictionaries of modules and of the classes in them, and looks inside staticmethod and
    classmethod. It does not reach instances, closures, default arguments and containers.
    """
    wanted = {id(item) for item in objects}
    if not wanted:
        return []
    # The search looks at some hundred thousand values, so both tests for each value are cheap: whether its id is wanted
    # (in C), and whether its exact type is that of a class or descriptor. Dictionaries are copied first, because
    # another thread may write to them.
    absent, metaclasses, descriptors = wanted.isdisjoint, _kinds(type), _kinds(*DESCRIPTORS)
    either = metaclasses | descriptors
    found: list[Location] = []
    seen: set[int] = set()
    for name in list(sys.modules) if modules is None else list(modules):
        module = sys.modules.get(name)
        if not issubclass(type(module), types.ModuleType) or f"{name}.".startswith("shim."):
            continue
        namespace = namespace_of(module)
        values = list(namespace.values())
        if not absent(map(id, values)):
            found += [(module, key, value) for key, value in list(namespace.items()) if id(value) in wanted]
        left = _of_type(metaclasses, values)
        while left:
            cls = left.pop()
            if id(cls) in seen:
                continue
            seen.add(id(cls))
            namespace = namespace_of(cls)
            values = list(namespace.values())
            inside = _of_type(either, values)
            left += _of_type(metaclasses, inside)
            held = [value.__func__ for value in _of_type(descriptors, inside)]
            if not absent(map(id, values)) or not absent(map(id, held)):
                found += [(cls, key, value) for key, value in list(namespace.items()) if id(unwrap(value)) in wanted]
    return found
