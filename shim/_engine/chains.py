"""What shim knows of the process: chains, the places they stand on, its own objects, and what others have put there."""

from __future__ import annotations

import copy
import types
import weakref
from collections.abc import Callable, Container, Iterable
from dataclasses import replace
from typing import Any, TypeVar

from shim._compatible import marks_of
from shim._engine.foreign import Around, Question
from shim._engine.modules import Modules
from shim._engine.names import (
    MISSING,
    Chain,
    Held,
    Key,
    Replaced,
    Slot,
    Write,
    describe,
    namespace_of,
    read_name,
    replaced_by,
    rewrap,
    unwrap,
)
from shim._engine.reach import callable_paths
from shim._errors import BindError
from shim._record import record
from shim._releases.fingerprint import split_target

__all__ = ["Findings", "Records", "Wrapped"]


# Objects of shim's


class Wrappers:
    """Functions and classes of patches by identity, as weak references: an unused wrapper is forgotten.

    A wrapper may outlive revert(): a module took it, other code wrapped it, or an autograd graph references it. If the
    wrapper appears on a target again, shim recognises it and does not call it foreign.
    """

    def __init__(self) -> None:
        self.before: weakref.WeakKeyDictionary[Any, tuple[str, Any]] = weakref.WeakKeyDictionary()
        self.added: weakref.WeakSet[Any] = weakref.WeakSet()  # objects under added names

    def __len__(self) -> int:
        return len(self.before)

    def draft(self) -> Wrappers:
        """A copy to try a transaction on."""
        copy = Wrappers()
        copy.before, copy.added = self.before.copy(), self.added.copy()
        return copy

    def note(self, chain: Chain) -> None:
        """Remember the object that a chain puts on its target."""
        inner = unwrap(chain.top)
        if not _is_plain(inner):
            return
        if chain.base is MISSING:
            self.added.add(inner)
        elif inner is not unwrap(chain.base) and not chain.borrowed:
            self.before[inner] = chain.target, chain.base

    def by_target(self) -> dict[str, list[Any]]:
        """The objects of shim's that stand on each target, or stood there before."""
        found: dict[str, list[Any]] = {}
        for inner, (target, _) in list(self.before.items()):
            found.setdefault(target, []).append(inner)
        return found

    def beneath(self, value: Any) -> Any:
        """The object beneath `value` if `value` is shim's, else `value`."""
        inner = unwrap(value)
        if not _is_plain(inner):
            return value
        if inner in self.added:
            return None  # upstream's guarded import of a missing name leaves None
        if inner not in self.before:
            return value
        base = self.before[inner][1]
        return base if type(base) is type(value) else rewrap(value, unwrap(base))

    def is_ours(self, value: Any) -> bool:
        """Whether shim made the object."""
        return self.beneath(value) is not value


def _is_plain(inner: Any) -> bool:
    # type(), because isinstance accepts a proxy of a function, which also equals the function.
    return issubclass(type(inner), (types.FunctionType, type))


# Names that shim has written


class Places:
    """A slot for every name that shim has written, target or alias. Not thread-safe: the engine holds a lock.

    Invariants:
    - A name is in `slots` or in `replaced`, never in both. A name in `slots` held `written` when shim last read it.
    - shim never writes a name in `replaced`, until other code puts shim's or upstream's object back there.
    - `drafted` is empty, except in the draft of a transaction: what the transaction is to write, name by name.
    """

    def __init__(self, beneath: Callable[[Any], Any]) -> None:
        """beneath: see Wrappers."""
        self._beneath = beneath
        self.slots: dict[Key, Slot] = {}
        self.replaced: dict[Key, Replaced] = {}
        self.drafted: dict[Key, Write] = {}

    # Transactions

    def draft(self) -> Places:
        """A copy to try a transaction on. Its writes are drafted, and not made."""
        copy = Places(self._beneath)
        copy.slots, copy.replaced = dict(self.slots), dict(self.replaced)
        return copy

    def is_up_to_date(self) -> bool:
        """Whether the drafted names still hold what they held when they were drafted."""
        return all(write.current() is write.before for write in self.drafted.values())

    def put(self, owner: Any, name: str, chain: Chain, after: Chain) -> None:
        """Write the new top to one place, or the original if no layer is left. A foreign object keeps the place."""
        key = (id(owner), name)
        if key in self.replaced:
            return
        current = self._read(owner, name)
        slot = self.slots.get(key)
        if slot is not None and current is not slot.written:
            self.give_up(slot, replaced_by(current))
            return
        if slot is None:
            # A module imported while shim was bound took shim's object. Without shim it would hold upstream's.
            upstream = current is MISSING or unwrap(current) is unwrap(chain.base)
            original = current if upstream else rewrap(current, unwrap(chain.base))
            slot = Slot(owner, name, original, current, chain.target)
        if not after.layers:
            self.slots[key] = slot
            self.restore(slot)
            return
        value = (
            after.top
            if chain.base is MISSING
            else rewrap(chain.base if current is MISSING else current, unwrap(after.top))
        )
        slot = self.slots[key] = replace(slot, written=value)
        self._write(slot, value, after.layers[-1].patch)

    def restore(self, slot: Slot) -> None:
        """Restore the original of one place. A foreign object keeps the place."""
        current = self._read(slot.owner, slot.name)
        self.slots.pop(slot.key, None)
        if current is not slot.written:
            self.give_up(slot, replaced_by(current))
        elif current is not slot.original:
            self._write(slot, slot.original)

    def _read(self, owner: Any, name: str) -> Any:
        drafted = self.drafted.get((id(owner), name))
        return read_name(owner, name) if drafted is None else drafted.after

    def _write(self, slot: Slot, value: Any, patch: str | None = None) -> None:
        drafted = self.drafted.get(slot.key)
        before = slot.current() if drafted is None else drafted.before
        label = f"{slot.target}: {slot}"
        self.drafted[slot.key] = Write(slot.owner, slot.name, before, value, label, patch)

    # Names that others have replaced

    def give_up(self, slot: Slot, why: str, partner: Key | None = None) -> None:
        self.slots.pop(slot.key, None)
        if not slot.within:  # a place inside a foreign object belongs to that object; no code looks it up as a name
            self.replaced[slot.key] = Replaced(slot, why, partner, slot.current() if partner else None)

    def has_replaced(self) -> bool:
        """Whether `drop_replaced` would find a name whose object other code has replaced since."""
        replaced = (item for item in self.replaced.values() if item.partner is None)
        return any(slot.current() is not slot.written for slot in self.slots.values()) or any(map(_is_new, replaced))

    def drop_replaced(self, base: Callable[[Slot], Any]) -> None:
        """Give up the names that other code has replaced, and govern the places of the new object that hold shim's.

        So revert() takes shim's function out of a wrapper that other code put around it, and a later plan changes it. A
        wrapper that holds upstream's function, because it took that before, gets shim's.

        base: upstream's function beneath a slot's object; None if there is none.
        """
        for slot in list(self.slots.values()):
            if slot.current() is not slot.written:
                self.give_up(slot, replaced_by(slot.current()))
        for replaced in list(self.replaced.values()):
            slot, current = replaced.slot, replaced.slot.current()
            original = base(slot)
            if replaced.partner is None and _is_new(replaced) and original is not None and not self.is_back(replaced):
                found = callable_paths(current, slot.owner, slot.name, self.leads_to(original), self._is_ours)
                self.move_into(slot, current, found, original)

    def move_into(self, slot: Slot, foreign: Any, found: Iterable[Held], original: Any) -> None:
        """Govern the places `found` inside of the `foreign` object instead of the name of `slot`.

        original: upstream's function, which a revert writes there.
        """
        within = describe(unwrap(foreign))
        inside = [
            Slot(h.owner, h.name, rewrap(h.value, original), h.value, slot.target, within)
            for h in found
            if h.owner is not None
        ]
        self.slots.update((place.key, place) for place in inside if place.key not in self.slots)
        held = tuple(place.key for place in inside)
        self.replaced[slot.key] = Replaced(slot, replaced_by(foreign), None, foreign, held)

    def leads_to(self, original: Any) -> Callable[[Any], bool]:
        """Whether a function is `original`, or shim's above it."""
        return lambda value: unwrap(self._beneath(value)) is original

    def _is_ours(self, value: Any) -> bool:
        return self._beneath(value) is not value

    def is_replaced(self, key: Key) -> bool:
        slot = self.slots.get(key)
        return key in self.replaced or (slot is not None and slot.current() is not slot.written)

    def replaced_now(self) -> list[Replaced]:
        """All replaced names, including those that no transaction has noticed yet. Changes nothing."""
        fresh = [
            Replaced(slot, replaced_by(slot.current()))
            for slot in self.slots.values()
            if slot.current() is not slot.written and not slot.within
        ]
        return [*self.replaced.values(), *fresh]

    def given_back(self) -> bool:
        """Whether `regain` would take a name back into `slots`."""
        return any(map(self.is_back, self.replaced.values()))

    def regain(self) -> list[Slot]:
        """Take names back into `slots` if other code has put shim's or upstream's object back there."""
        found = []
        for key, replaced in sorted(self.replaced.items(), key=lambda item: item[1].partner is not None):
            if self.is_back(replaced):
                del self.replaced[key]
                current = replaced.slot.current()
                # A wrapper that was there before shim hid the descriptor of upstream's function.
                original = current if _is_same(current, replaced.slot.original) else replaced.slot.original
                beneath = self._beneath(current)
                if beneath is not current and original is not MISSING and not _is_same(beneath, original):
                    original = beneath  # shim went around a foreign function, which has been taken back
                self.slots[key] = replace(replaced.slot, original=original, written=current)
                found.append(self.slots[key])
        return found

    def is_back(self, replaced: Replaced) -> bool:
        """Whether a replaced name holds shim's or upstream's object again."""
        current = replaced.slot.current()
        # shim may have written an object without identity, such as None.
        ours = _is_same(current, replaced.slot.original) or self._beneath(current) is not current
        ours = ours or current is replaced.slot.written
        return replaced.partner not in self.replaced and ours

    def forget_what_was_replaced_in(self, module: Any) -> None:
        """Forget all names in a module whose code has run again, except names that still hold shim's object."""
        self.slots = {k: s for k, s in self.slots.items() if s.owner is not module or s.current() is s.written}
        self.replaced = {k: replaced for k, replaced in self.replaced.items() if replaced.slot.owner is not module}


def _is_new(replaced: Replaced) -> bool:
    """Whether the object that stands on a replaced name has not been examined yet."""
    return replaced.foreign is not replaced.slot.current()


def _is_same(one: Any, other: Any) -> bool:
    """Whether two objects are one, or descriptors of one function."""
    return one is other or (one is not MISSING and other is not MISSING and unwrap(one) is unwrap(other))


# What was found, and all records


R = TypeVar("R", bound="Records")


@record
class Wrapped:
    """A foreign object on a target that shim has not bound yet, and where upstream's function lies inside it."""

    foreign: Any
    upstream: Any
    held: tuple[Held, ...]


class Findings:
    """What with_conflicts() found about other people's functions, for the plan that it looked at last.

    wrapped: of a target without a chain, the object from inside of which upstream's function is called.
    around: patch and target -> the foreign function that the patch goes around.
    open: patch and body -> the question that only a model can answer.
    doubts: patch -> a body, and what cannot be told about it, in words that follow "whether".
    renewed: target -> what stands there in the place of shim's object, for the patches to go around.
    seen: target -> what was looked at there, and found to be upstream's or an object that its patches can hold on.
    """

    def __init__(self) -> None:
        self.wrapped: dict[str, Wrapped] = {}
        self.around: dict[tuple[str, str], Around] = {}
        self.open: dict[tuple[str, str], Question] = {}
        self.doubts: dict[str, tuple[str, str]] = {}
        self.renewed: dict[str, Any] = {}
        self.seen: dict[str, Any] = {}

    def forgotten(self, bound: Container[str]) -> Findings:
        """New findings, with what was found when the targets in `bound` were bound."""
        copy = self.copy()
        copy.forget(bound)
        return copy

    def forget(self, bound: Container[str]) -> None:
        """Begin anew, except with what was found when the targets in `bound` were bound."""
        self.wrapped = {target: found for target, found in self.wrapped.items() if target in bound}
        self.around = {key: found for key, found in self.around.items() if key[1] in bound}
        self.open, self.doubts, self.renewed, self.seen = {}, {}, {}, {}

    def copy(self) -> Findings:
        copy = Findings()
        copy.wrapped, copy.around = dict(self.wrapped), dict(self.around)
        copy.open, copy.doubts, copy.renewed = dict(self.open), dict(self.doubts), dict(self.renewed)
        copy.seen = dict(self.seen)
        return copy

    def drop(self, target: str) -> None:
        """Forget what was found when a target was bound, and nothing about other targets, which may be bound next."""
        self.wrapped.pop(target, None)
        self.around = {key: found for key, found in self.around.items() if key[1] != target}

    def stands_around(self, target: str) -> bool:
        """Whether what shim has bound on a target goes around a foreign function."""
        return any(bound == target for _, bound in self.around)


class Records:
    """The chains of one process and the places they stand on. Not thread-safe: the engine holds a lock.

    Invariant: `chains` has one chain for each target with layers. `places` has a slot for the target and for each
    alias, unless that place is replaced. Every slot's target has a chain. A slot holds the chain's top, in the
    descriptor that was there before. After a reload a slot may hold an older top of the same target, which is
    restored together with the chain.

    No record is changed in place once others can see it: a change replaces it as a whole.
    """

    def __init__(self) -> None:
        self.modules = Modules()
        self.wrappers = Wrappers()
        self.places = Places(self.wrappers.beneath)
        self.chains: dict[str, Chain] = {}
        self.found = Findings()
        # Target -> the object there when shim first bound it, if no other code had been there.
        self.first: dict[str, Any] = {}
        self.known_ways: dict[str, Any] = {}  # name -> upstream's own function there: see conflicts.py

    def looking(self: R) -> R:
        """The same records with separate findings, for a search for conflicts."""
        view = copy.copy(self)
        view.found = self.found.copy()
        return view

    # Reading targets

    def loaded(self, name: str) -> types.ModuleType | None:
        """See Modules.loaded."""
        return self.modules.loaded(name)

    def resolve(self, target: str, may_be_missing: bool = False) -> tuple[Any, str, Any]:
        """Owner, name and value of a target in a loaded module. BindError if it is gone and not `may_be_missing`."""
        module_name, qualname = split_target(target)
        owner: Any = self.loaded(module_name)
        if owner is None:
            raise BindError(f"{module_name} is not imported")
        *path, name = qualname.split(".")
        for depth, part in enumerate(path, 1):
            owner = namespace_of(owner).get(part, MISSING)
            if not issubclass(type(owner), type):  # not isinstance, which a proxy of a class passes
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
        slot = self.places.slots.get(chain.key)
        return slot is not None and slot.current() is slot.written

    def replaced_targets(self) -> dict[str, Replaced]:
        """The entries of `replaced_now` that are targets; aliases are left out."""
        targets = {chain.key: target for target, chain in self.chains.items()}
        return {
            targets[replaced.slot.key]: replaced
            for replaced in self.places.replaced_now()
            if replaced.slot.key in targets
        }

    def is_back(self, owner: Any, name: str) -> bool:
        """Whether a name that other code had replaced holds shim's or upstream's object again."""
        replaced = self.places.replaced.get((id(owner), name))
        return replaced is not None and self.places.is_back(replaced)

    def will_be_governed(self, replaced: Replaced) -> bool:
        """Whether the next transaction puts shim's object back, or into what other code has put in its place."""
        if self.places.is_back(replaced):
            return True
        slot, base = replaced.slot, self._base_of(replaced.slot)
        wanted = self.places.leads_to(base)
        found = (
            [] if base is None else callable_paths(slot.current(), slot.owner, slot.name, wanted, self.wrappers.is_ours)
        )
        return any(held.owner is not None for held in found)

    def is_not_the_first(self, target: str, inner: Any) -> bool:
        """Whether another object stood on a target when shim first bound it. Of an import nothing else may tell."""
        return target in self.first and self.first[target] is not inner

    def put_there_since(self, owner: Any, name: str, value: Any) -> str:
        """The foreign object in the place of shim's, in words; "" if there is none, or it is gone again."""
        replaced = self.places.replaced.get((id(owner), name))
        since = replaced is not None and replaced.partner is None and not self.places.is_back(replaced)
        return describe(unwrap(value)) if since else ""

    def effect_of(self, replaced: Replaced) -> str:
        """Whether shim's function is called although a foreign object stands on the name.

        ``called``: the object holds shim's function, and its code names it. ``kept``: it says that it does what the
        patch does (shim.compatible). ``unknown``: it holds the function, but reading does not tell. ``replaced``: it
        does not hold the function, or an older one. ``released``: shim has taken it out, and nothing is bound.
        """
        chain, current = self.chains.get(replaced.slot.target), replaced.slot.current()
        if chain is None and replaced.held:
            return "released"
        if chain is None or current is MISSING:
            return "replaced"
        top = unwrap(chain.top)
        slot = replaced.slot
        found = callable_paths(current, slot.owner, slot.name, lambda value: value is top, self.wrappers.is_ours)
        if any(held.certain for held in found):
            return "called"
        if slot.target in marks_of(current):
            return "kept"
        return "unknown" if found else "replaced"

    def _stands(self, chain: Chain) -> bool:
        try:
            owner, _, value = self.resolve(chain.target)
        except BindError:
            return False
        return owner is chain.owner and unwrap(value) is unwrap(chain.top)

    def _base_of(self, slot: Slot) -> Any:
        """Upstream's function on the target of a slot. None if nothing is bound, or nothing was there before."""
        chain = self.chains.get(slot.target)
        base = None if chain is None or chain.base is MISSING else unwrap(chain.base)
        return base if callable(base) else None

    def _is_governed_inside(self, key: Key) -> bool:
        """Whether shim governs places inside of the object that stands on a replaced name."""
        replaced = self.places.replaced.get(key)
        return replaced is not None and any(inner in self.places.slots for inner in replaced.held)


def _upstreams(found: type, module: str, qualname: str) -> type:
    """The class that upstream defines, if other code has put a subclass of it in its place."""
    for cls in found.__mro__:
        if cls.__module__ == module and cls.__qualname__ == qualname:
            return cls
    return found
