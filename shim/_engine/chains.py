"""What shim knows of the process: chains, the names they stand on, its own objects, and what others have put there."""

from __future__ import annotations

import copy
import sys
import types
import weakref
from collections.abc import Callable, Container, Iterable
from dataclasses import field
from typing import Any, TypeVar

from shim._compatible import marks_of
from shim._engine.import_hook import imported_since, is_initialising, is_lazy, last_module, locked_modules
from shim._engine.names import (
    MISSING,
    Chain,
    Held,
    Key,
    Replaced,
    Slot,
    imports_no_megatron,
    is_kind,
    namespace_of,
    replaced_by,
    rewrap,
    unwrap,
)
from shim._engine.reach import callable_paths
from shim._errors import BindError
from shim._record import record, replace
from shim._releases.fingerprint import split_target

__all__ = ["Findings", "Question", "Records", "Wrapped", "is_same"]


# What foreign.py finds about other people's functions


@record
class Question:
    """Whether a patch has its effect with a foreign function in the place of a method. Only a model can tell.

    target: what the patch binds or relies on.    method: where the function stands, which may be on the way to it.
    """

    patch: str
    target: str
    method: str
    function: Any
    who: str


@record
class Wrapped:
    """A foreign object on a target that shim has not bound yet, and where upstream's function lies inside it."""

    foreign: Any
    upstream: Any
    held: tuple[Held, ...]


@record
class Findings:
    """What was found about other people's functions, for the plan that was looked at last.

    loaded: the modules that the plan waits for and that had run by then. Targets in others are bound later.
    wrapped: of a target without a chain, the object from inside of which upstream's function is called.
    around: patch and target -> the foreign function that the patch goes around, in words.
    open: patch and body -> the question that only a model can answer.
    doubts: patch -> what cannot be told about one of its bodies, in words that follow "whether".
    renewed: target -> what stands there in the place of shim's object, for the patches to go around.
    """

    loaded: frozenset[str] = frozenset()
    wrapped: dict[str, Wrapped] = field(default_factory=dict)
    around: dict[tuple[str, str], str] = field(default_factory=dict)
    open: dict[tuple[str, str], Question] = field(default_factory=dict)
    doubts: dict[str, str] = field(default_factory=dict)
    renewed: dict[str, Any] = field(default_factory=dict)

    def of_bound(self, bound: Container[str], loaded: Iterable[str] = ()) -> Findings:
        """New findings, with what was found when the targets in `bound` were bound."""
        return Findings(
            frozenset(loaded),
            {target: found for target, found in self.wrapped.items() if target in bound},
            {key: found for key, found in self.around.items() if key[1] in bound},
        )

    def without(self, target: str) -> Findings:
        """What was found, except for a target that is about to be bound anew."""
        wrapped = {key: found for key, found in self.wrapped.items() if key != target}
        return replace(self, wrapped=wrapped, around={k: found for k, found in self.around.items() if k[1] != target})


# The records


R = TypeVar("R", bound="Records")


class Records:
    """The chains of one process and the places they stand on. Not thread-safe: the engine holds a lock.

    chains: target -> its chain. Each has layers.
    slots: a slot for every name that shim has written, of the target of a chain or of an alias. It holds the top of the
        chain, in the descriptor that was there before. After a reload it may hold an older top, which is restored
        together with the chain.
    replaced: the names that other code has replaced since; none of them is in `slots`. shim writes none of them until
        other code puts shim's or upstream's object back there.
    ours: functions and classes of patches -> the target of each, and the object beneath it (MISSING: it was added).
        Weak references: an unused one is forgotten. One may outlive revert(), because a module took it, other code
        wrapped it, or an autograd graph references it. On a target it is then not called foreign.
    found: what was found about other people's functions.
    known_ways: name -> upstream's own function there: see foreign.py.
    executed: modules whose code has run to the end although their import is not over. The engine maintains it.
    unfinished: modules that were half imported during a search for aliases. The search could not see an object that
        such a module had read but not stored yet.
    searched: the last module of sys.modules at the last search, by name, until it is known whether others came before
        its results were written.

    No record but `ours` and `executed` is changed in place once others can see it: a change replaces it as a whole.
    """

    def __init__(self) -> None:
        self.chains: dict[str, Chain] = {}
        self.slots: dict[Key, Slot] = {}
        self.replaced: dict[Key, Replaced] = {}
        self.ours: weakref.WeakKeyDictionary[Any, tuple[str, Any]] = weakref.WeakKeyDictionary()
        self.found = Findings()
        self.known_ways: dict[str, Any] = {}
        self.executed: set[str] = set()
        self.unfinished: frozenset[str] = frozenset()
        self.searched: tuple[str, Any] | None = None

    def looking(self: R, loaded: Iterable[str]) -> R:
        """The same records with findings of their own, for a search for conflicts. loaded: see Findings."""
        view = copy.copy(self)
        view.found = self.found.of_bound(self.chains, loaded)
        return view

    # Modules

    def loaded(self, name: str) -> types.ModuleType | None:
        """The module if its code has run to the end; None if it is absent, lazy or half imported."""
        module = sys.modules.get(name)
        kind = type(module)  # reads no attribute, which would load a lazy module
        if kind is not types.ModuleType:
            if not issubclass(kind, types.ModuleType):
                return None
            # From Python 3.12 on a lazy module keeps its lazy type while its code runs.
            if is_lazy(module) and name not in self.executed:
                return None
        if is_initialising(module) and name not in self.executed:
            return None
        return module

    def ran(self, names: frozenset[str]) -> frozenset[str]:
        """Those of `names` whose modules have run to the end."""
        return frozenset(filter(self.loaded, sys.modules.keys() & names))

    def overdue(self) -> set[str]:
        """Modules that were half imported at the last search for aliases, or came since, and have run by now."""
        left = self.unfinished | self.came()
        left = left - locked_modules() if left else left
        return {name for name in left if not is_initialising(sys.modules.get(name))}

    def came(self) -> frozenset[str]:
        """What stands behind the module that was the last. A module comes last if its import begins, and if it ends."""
        if self.searched is None:
            return frozenset()
        (name, module), (last, now) = self.searched, last_module()
        if name == last and module is now:
            return frozenset()
        came = imported_since(name) if sys.modules.get(name) is module else list(sys.modules)
        return frozenset(other for other in came if not imports_no_megatron(other))

    # Objects of shim's

    def beneath(self, value: Any) -> Any:
        """The object beneath `value` if `value` is shim's, else `value`."""
        inner = unwrap(value)
        if not is_kind(inner, (types.FunctionType, type)) or inner not in self.ours:
            return value
        base = self.ours[inner][1]
        if base is MISSING:
            return None  # upstream's guarded import of a missing name leaves None
        return base if type(base) is type(value) else rewrap(value, unwrap(base))

    def is_ours(self, value: Any) -> bool:
        """Whether shim made the object."""
        return self.beneath(value) is not value

    def leads_to(self, original: Any) -> Callable[[Any], bool]:
        """Whether a function is `original`, or shim's above it."""
        return lambda value: unwrap(self.beneath(value)) is original

    # Targets

    def resolve(self, target: str, may_be_missing: bool = False) -> tuple[Any, str, Any]:
        """Owner, name and value of a target in a loaded module. BindError if it is gone and not `may_be_missing`."""
        module_name, qualname = split_target(target)
        owner: Any = self.loaded(module_name)
        if owner is None:
            raise BindError(f"{module_name} is not imported")
        *path, name = qualname.split(".")
        for depth, part in enumerate(path, 1):
            owner = namespace_of(owner).get(part, MISSING)
            if not is_kind(owner, type):  # not isinstance, which a proxy of a class passes
                raise BindError(f"{target} is gone: {part} is not a class of the installed release")
            owner = _upstreams(owner, module_name, ".".join(path[:depth]))
        value = namespace_of(owner).get(name, MISSING)
        if value is MISSING and isinstance(owner, type):
            value = next((namespace_of(c)[name] for c in owner.__mro__[1:] if name in namespace_of(c)), MISSING)
        if value is MISSING and not may_be_missing:
            raise BindError(f"{target} is gone from the installed release")
        return owner, name, value

    def bound(self, patch: str, target: str) -> bool:
        """Whether the patch is on the target right now, read back from the target itself."""
        chain = self.chains.get(target)
        if chain is None or all(layer.patch != patch for layer in chain.layers):
            return False
        slot = self.slots.get(chain.key)
        return slot is not None and slot.is_written()

    # Names that others have replaced

    def replaced_now(self) -> list[Replaced]:
        """All replaced names, including those that no transaction has noticed yet. Changes nothing."""
        fresh = [
            Replaced(slot, replaced_by(slot.current()))
            for slot in self.slots.values()
            if not slot.is_written() and not slot.within
        ]
        return [*self.replaced.values(), *fresh]

    def replaced_targets(self) -> dict[str, Replaced]:
        """The entries of `replaced_now` that are targets; aliases are left out."""
        replaced = self.replaced_now()
        targets = {chain.key: target for target, chain in self.chains.items()} if replaced else {}
        return {targets[item.slot.key]: item for item in replaced if item.slot.key in targets}

    def is_back(self, replaced: Replaced) -> bool:
        """Whether a replaced name holds shim's or upstream's object again."""
        current = replaced.slot.current()
        # shim may have written an object without identity, such as None.
        ours = is_same(current, replaced.slot.original) or self.is_ours(current) or current is replaced.slot.written
        return replaced.partner not in self.replaced and ours

    def will_be_governed(self, replaced: Replaced) -> bool:
        """Whether the next transaction puts shim's object back, or into what other code has put in its place."""
        base = self.base_of(replaced.slot)
        return self.is_back(replaced) or any(held.owner is not None for held in self.held_in(replaced.slot, base))

    def effect_of(self, replaced: Replaced) -> str:
        """Whether shim's function is called although a foreign object stands on the name.

        ``called``: the object holds shim's function, and its code names it. ``kept``: it says that it does what the
        patch does (shim.compatible). ``unknown``: it holds the function, but reading does not tell. ``replaced``: it
        does not hold the function, or an older one. ``released``: shim has taken it out, and nothing is bound.
        """
        slot = replaced.slot
        chain, current = self.chains.get(slot.target), slot.current()
        if chain is None and replaced.held:
            return "released"
        if chain is None or current is MISSING:
            return "replaced"
        top = chain.inner
        found = callable_paths(current, slot.owner, slot.name, lambda value: value is top, self.is_ours)
        if any(held.certain for held in found):
            return "called"
        if slot.target in marks_of(current):
            return "kept"
        return "unknown" if found else "replaced"

    def held_in(self, slot: Slot, base: Any) -> list[Held]:
        """The places inside of what stands on a slot's name from which upstream's function, or shim's, is called."""
        if base is None:
            return []
        return callable_paths(slot.current(), slot.owner, slot.name, self.leads_to(base), self.is_ours)

    def base_of(self, slot: Slot) -> Any:
        """Upstream's function on the target of a slot. None if nothing is bound, or nothing was there before."""
        chain = self.chains.get(slot.target)
        base = None if chain is None or chain.base is MISSING else chain.beneath
        return base if callable(base) else None

    def is_governed_inside(self, key: Key) -> bool:
        """Whether shim governs places inside of the object that stands on a replaced name."""
        replaced = self.replaced.get(key)
        return replaced is not None and any(inner in self.slots for inner in replaced.held)


def is_same(one: Any, other: Any) -> bool:
    """Whether two objects are one, or descriptors of one function."""
    return one is other or (one is not MISSING and other is not MISSING and unwrap(one) is unwrap(other))


def _upstreams(found: type, module: str, qualname: str) -> type:
    """The class that upstream defines, if other code has put a subclass of it in its place."""
    return next((c for c in found.__mro__ if c.__module__ == module and c.__qualname__ == qualname), found)
