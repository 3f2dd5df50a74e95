"""The binder's records: layers, chains, slots and replaced names.

Patches that share a target nest in the order of version_matrix.yaml. The first patch in the file is innermost and gets
upstream's object. Each further patch gets the result of the one before it. Callers see the last. Neither the order of
imports nor the order of apply() calls changes this: whenever a layer is added or removed, the chain is built anew.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Callable, Iterable
from dataclasses import field
from typing import Any

from shim._engine.aliases import namespace_of, unwrap
from shim._engine.foreign import describe
from shim._matrix.model import Variant
from shim._record import record

__all__ = ["Chain", "Change", "Factory", "Held", "Imported", "Key", "Layer", "Replaced", "MISSING", "Slot"]


Factory = Callable[[Any], Any]


Key = tuple[int, str]  # id() of a module or class, and a name in it


class _Missing:
    def __repr__(self) -> str:
        return "MISSING"


MISSING = _Missing()


@record
class Layer:
    """One patch on one target. `factory(inner)` returns the replacement of `inner`."""

    patch: str
    target: str
    factory: Factory = field(compare=False, repr=False)
    wiring: Variant | None = field(default=None, compare=False, repr=False)  # the variant that names the target
    content: object = None  # variant and options of the patch; a change rebuilds the chain

    @property
    def no_aliases(self) -> bool:
        """Whether upstream's object belongs to another module, so that its other names are no aliases."""
        return self.wiring is not None and self.target in self.wiring.no_aliases

    @property
    def may_be_missing(self) -> bool:
        """Whether upstream may lack the name. Then `inner` is MISSING, and the factory creates the object."""
        return self.wiring is not None and self.target in self.wiring.may_be_missing


@record
class Held:
    """A place inside of an object: what it holds, and whether the object surely calls it.

    owner: a closure's cell, or an object with the attribute `name`. None if shim cannot write to the place.
    """

    owner: Any
    name: str
    value: Any
    certain: bool


@record
class Slot:
    """One name that shim wrote: its object before (MISSING: none), and the object that shim wrote last.

    within: whose object the place lies in, in words, if it is no name of a module or class.
    """

    owner: Any
    name: str
    original: Any
    written: Any
    target: str
    within: str = ""

    @property
    def key(self) -> Key:
        return id(self.owner), self.name

    def current(self) -> Any:
        return read_name(self.owner, self.name)

    def __str__(self) -> str:
        owner = self.owner
        if self.within:
            return f"the function that {self.within} calls"
        if issubclass(type(owner), type):
            return f"{owner.__module__}.{owner.__qualname__}.{self.name}"
        return f"{namespace_of(owner).get('__name__', 'a module without a name')}.{self.name}"


@record
class Replaced:
    """A name that shim no longer governs, mostly because other code replaced the object. shim leaves it alone.

    partner: the replaced place that is the reason, if this one was not replaced itself.
    foreign: the other object.    held: the places inside of it that shim governs instead.
    """

    slot: Slot
    why: str
    partner: Key | None = None
    foreign: Any = None
    held: tuple[Key, ...] = ()

    def __str__(self) -> str:
        return f"{self.slot} {self.why}"


@record
class Chain:
    """The layers on one target, in order, above the object that was there before."""

    target: str
    owner: Any
    name: str
    base: Any  # as in the owner's dictionary, or as inherited
    top: Any  # the object on the target now, as in the owner's dictionary
    layers: tuple[Layer, ...] = ()
    borrowed: bool = False  # `top` belongs to someone else, so its aliases are not rebound

    @property
    def key(self) -> Key:
        return id(self.owner), self.name


def read_name(owner: Any, name: str) -> Any:
    """The object under a name of a module or class, in a cell, or in an attribute of another object; or MISSING."""
    kind = type(owner)
    if issubclass(kind, (type, types.ModuleType)):
        return namespace_of(owner).get(name, MISSING)
    try:
        return getattr(owner, name)
    except (AttributeError, ValueError):  # ValueError: an empty cell
        return MISSING


def replaced_by(value: Any) -> str:
    return "was removed" if value is MISSING else f"was replaced by {describe(unwrap(value))}"


def found_by_name(value: Any) -> bool:
    """Whether the module and qualified name of `value` lead back to `value`. If so, no factory made it."""
    found: Any = sys.modules.get(getattr(value, "__module__", None) or "")
    for part in getattr(value, "__qualname__", "").split("."):
        if not issubclass(type(found), (types.ModuleType, type)):
            return False
        found = unwrap(namespace_of(found).get(part, MISSING))
    return found is value


Change = tuple[Chain, Chain]  # before and after


Imported = tuple[str, Iterable[str]]  # a module just imported, and the modules that may already hold its new objects
