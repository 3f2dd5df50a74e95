"""What the binder keeps: layers, chains, slots, and names that were lost.

Patches that share a target nest in the order of version_matrix.yaml: the first in the file is innermost and gets
upstream's object, each further one gets what the one before it has made, and the last is what callers see. Neither the
order of imports nor that of calls of apply() changes that: where a layer comes or goes, the chain is built anew.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Callable, Iterable
from typing import Any

from shim._engine.aliases import namespace_of, unwrap
from shim._engine.foreign import describe
from shim._matrix.model import Variant
from shim._record import Record

__all__ = ["Chain", "Change", "Factory", "Imported", "Key", "Layer", "Lost", "MISSING", "Slot"]


Factory = Callable[[Any], Any]


Key = tuple[int, str]  # id() of a module or class, and a name in it


class _Missing:
    def __repr__(self) -> str:
        return "MISSING"


MISSING = _Missing()


class Layer(Record):
    """One patch on one target: `factory(inner)` returns what takes the place of `inner`."""

    _aside = ("factory", "wiring")

    patch: str
    target: str
    factory: Factory
    wiring: Variant | None = None  # that of the patch which has the target
    content: object = None  # variant and options of the patch: where they differ, the chain is built anew

    @property
    def alone(self) -> bool:
        """Whether upstream's object is another module's own, which holds it under other names in its own right."""
        return self.wiring is not None and self.target in self.wiring.alone

    @property
    def added(self) -> bool:
        """Whether upstream may lack the name: `inner` is MISSING then, and the factory makes what stands there."""
        return self.wiring is not None and self.target in self.wiring.added


class Slot(Record):
    """One name shim wrote: what it held before (MISSING: nothing of its own), and what shim put there last."""

    owner: Any
    name: str
    original: Any
    written: Any
    target: str

    @property
    def key(self) -> Key:
        return id(self.owner), self.name

    def current(self) -> Any:
        return namespace_of(self.owner).get(self.name, MISSING)

    def __str__(self) -> str:
        owner = self.owner
        if issubclass(type(owner), type):
            return f"{owner.__module__}.{owner.__qualname__}.{self.name}"
        return f"{namespace_of(owner)['__name__']}.{self.name}"


class Lost(Record):
    """A name shim no longer governs, mostly because somebody else replaced it: left alone, never taken back."""

    slot: Slot
    why: str
    partner: Key | None = None  # the place whose loss is the reason, where this one was not replaced itself

    def __str__(self) -> str:
        return f"{self.slot} {self.why}"


class Chain(Record):
    """The patches on one target, in order, above the object that was there before."""

    target: str
    owner: Any
    name: str
    base: Any  # as in the owner's dictionary, or as inherited
    top: Any  # what stands on the target now, as in the dictionary
    layers: tuple[Layer, ...] = ()
    borrowed: bool = False  # others hold `top` in their own right, so that its further places are not ours to rebind

    @property
    def key(self) -> Key:
        return id(self.owner), self.name


def write_name(owner: Any, name: str, value: Any) -> None:
    if isinstance(owner, type):
        if value is not MISSING:
            setattr(owner, name, value)
        elif name in namespace_of(owner):
            delattr(owner, name)
    else:
        namespace = object.__getattribute__(owner, "__dict__")
        if value is not MISSING:
            namespace[name] = value
        else:
            namespace.pop(name, None)


def replaced_by(value: Any) -> str:
    return "was removed" if value is MISSING else f"was replaced by {describe(unwrap(value))}"


def found_by_name(value: Any) -> bool:
    """Whether `value` is what its own module and qualified name lead to: not made by a factory, but there before."""
    found: Any = sys.modules.get(getattr(value, "__module__", None) or "")
    for part in getattr(value, "__qualname__", "").split("."):
        if not issubclass(type(found), (types.ModuleType, type)):
            return False
        found = unwrap(namespace_of(found).get(part, MISSING))
    return found is value


Change = tuple[Chain, Chain]  # before and after


Imported = tuple[str, Iterable[str]]  # a module just imported, and the modules that can hold its new objects already
