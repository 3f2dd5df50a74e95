"""The names that shim has written: the objects before, what a transaction is to write, and replaced names."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

from shim._engine.aliases import rewrap, unwrap
from shim._engine.chain import MISSING, Chain, Held, Key, Replaced, Slot, read_name, replaced_by
from shim._engine.foreign import describe
from shim._engine.reach import callable_paths
from shim._engine.undo_list import Write

__all__ = ["Places"]


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
