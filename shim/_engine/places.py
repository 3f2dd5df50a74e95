"""The names that shim has written: the objects before, the journal of a transaction, and lost names."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from shim._engine.aliases import namespace_of, rewrap, unwrap
from shim._engine.chain import MISSING, Chain, Key, Lost, Slot, replaced_by, write_name
from shim._errors import BindError
from shim._record import replace

__all__ = ["Places"]


class Places:
    """A slot for every name that shim has written, target or alias. Not thread-safe: the engine holds a lock.

    Invariants between transactions:
    - A name is in `slots` or in `lost`, never in both. A name in `slots` held `written` when shim last read it.
    - shim never writes a name in `lost`, until somebody puts shim's or upstream's object back there.
    - `journal` is empty. Within a transaction it has every write so far, so that `undo` restores the very objects.
    """

    def __init__(self, beneath: Callable[[Any], Any]) -> None:
        """beneath: see Wrappers."""
        self._beneath = beneath
        self.slots: dict[Key, Slot] = {}
        self.lost: dict[Key, Lost] = {}
        self.journal: list[tuple[Any, str, Any]] = []

    # Transactions

    def undo(self) -> None:
        """Take back all writes of this transaction, the last one first."""
        for owner, name, value in reversed(self.journal):
            if namespace_of(owner).get(name, MISSING) is not value:
                write_name(owner, name, value)

    def put(self, owner: Any, name: str, chain: Chain, after: Chain) -> None:
        """Write the new top to one place, or the original if no layer is left. A foreign object makes it lost."""
        key = (id(owner), name)
        if key in self.lost:
            return
        current = namespace_of(owner).get(name, MISSING)
        slot = self.slots.get(key)
        if slot is not None and current is not slot.written:
            self.lose(slot, replaced_by(current))
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
        self._write(slot, value, current, after.layers[-1].patch)

    def restore(self, slot: Slot) -> None:
        """Restore the original of one place. A foreign object makes the place lost."""
        current = slot.current()
        self.slots.pop(slot.key, None)
        if current is not slot.written:
            self.lose(slot, replaced_by(current))
        elif current is not slot.original:
            self._write(slot, slot.original, current)

    def _write(self, slot: Slot, value: Any, current: Any, patch: str | None = None) -> None:
        """Enter the write in the journal, write one name, and read it back."""
        self.journal.append((slot.owner, slot.name, current))
        try:
            write_name(slot.owner, slot.name, value)
        except Exception as error:
            message = f"{slot.target}: {slot} cannot be written: {type(error).__name__}: {error}"
            raise BindError(message, patch) from error
        if slot.current() is not value:
            raise BindError(f"{slot.target} does not read back at {slot}", patch)

    # Names that others have replaced

    def lose(self, slot: Slot, why: str, partner: Key | None = None) -> None:
        self.lost[slot.key] = Lost(slot, why, partner)
        self.slots.pop(slot.key, None)

    def is_lost(self, key: Key) -> bool:
        slot = self.slots.get(key)
        return key in self.lost or (slot is not None and slot.current() is not slot.written)

    def lost_now(self) -> list[Lost]:
        """All lost names, including losses that no transaction has noticed yet. Changes nothing."""
        fresh = [
            Lost(slot, replaced_by(slot.current()))
            for slot in self.slots.values()
            if slot.current() is not slot.written
        ]
        return [*self.lost.values(), *fresh]

    def given_back(self) -> bool:
        """Whether `regain` would take a name back into `slots`."""
        return any(map(self._is_back, self.lost.values()))

    def regain(self) -> list[Slot]:
        """Take names back into `slots` if somebody has put shim's or upstream's object back there."""
        found = []
        for key, lost in sorted(self.lost.items(), key=lambda item: item[1].partner is not None):
            if self._is_back(lost):
                del self.lost[key]
                self.slots[key] = replace(lost.slot, written=lost.slot.current())
                found.append(self.slots[key])
        return found

    def _is_back(self, lost: Lost) -> bool:
        current = lost.slot.current()
        ours = current is lost.slot.original or self._beneath(current) is not current
        return lost.partner not in self.lost and ours

    def forget_what_was_replaced_in(self, module: Any) -> None:
        """Forget all names in a module whose code has run again, except names that still hold shim's object."""
        self.slots = {k: s for k, s in self.slots.items() if s.owner is not module or s.current() is s.written}
        self.lost = {k: lost for k, lost in self.lost.items() if lost.slot.owner is not module}
