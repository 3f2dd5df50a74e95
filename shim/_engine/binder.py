"""Step 4, bind: ordered chains of patches per target, written in one transaction, every write in a journal."""

from __future__ import annotations

import sys
import types
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from shim._engine.aliases import find_aliases, is_initialising, namespace_of, rewrap, unwrap
from shim._engine.chain import (
    LAZY,
    MISSING,
    Chain,
    Change,
    Imported,
    Key,
    Layer,
    Lost,
    Slot,
    found_by_name,
    replaced_by,
    write_name,
)
from shim._engine.signatures import misfit
from shim._errors import BindError
from shim._releases.fingerprint import split_target

__all__ = ["Binder"]


class Binder:
    """Owns the chains and the journal of one process. Not thread-safe by itself: the engine holds a lock."""

    def __init__(self) -> None:
        self.chains: dict[str, Chain] = {}
        self.slots: dict[Key, Slot] = {}
        self.lost: dict[Key, Lost] = {}
        self.executed: set[str] = set()  # modules whose code has run to the end, though their import is not over
        self._unfinished: set[str] = set()  # modules that were half imported when aliases were looked for
        # What shim has ever put on a target, on duty or off, with that target and what was there before.
        self._ours: weakref.WeakKeyDictionary[Any, tuple[str, Any]] = weakref.WeakKeyDictionary()
        self._added: weakref.WeakSet[Any] = weakref.WeakSet()  # what shim has put where nothing was

    # What is there

    def loaded(self, name: str) -> types.ModuleType | None:
        """The module, if its code has run to the end; None for absent, lazy and half imported ones."""
        module = sys.modules.get(name)
        # type() of the object, never an attribute of it: that would load a lazy module.
        if not issubclass(type(module), types.ModuleType):
            return None
        # From Python 3.12 on a lazy module is still one while its code runs.
        if issubclass(type(module), LAZY) and name not in self.executed:
            return None
        return None if is_initialising(module) and name not in self.executed else module

    def resolve(self, target: str, added: bool = False) -> tuple[Any, str, Any]:
        """Owner, name and value of a target whose module is loaded; BindError where it is gone, but for `added`."""
        module_name, qualname = split_target(target)
        owner: Any = self.loaded(module_name)
        if owner is None:
            raise BindError(f"{module_name} is not imported")
        *path, name = qualname.split(".")
        for part in path:
            owner = namespace_of(owner).get(part, MISSING)
            if not issubclass(type(owner), type):  # a proxy passes for a class with isinstance
                raise BindError(f"{target} is gone: {part} is not a class of the installed release")
        value = namespace_of(owner).get(name, MISSING)
        if value is MISSING and isinstance(owner, type):
            value = next((namespace_of(c)[name] for c in owner.__mro__[1:] if name in namespace_of(c)), MISSING)
        if value is MISSING and not added:
            raise BindError(f"{target} is gone from the installed release")
        return owner, name, value

    def beneath(self, value: Any) -> Any:
        """`value`, or where it is ours what was there before it."""
        inner = unwrap(value)
        # Asked of type(): a proxy passes for the function it wraps, and equals it too.
        if not issubclass(type(inner), (types.FunctionType, type)):
            return value
        if inner in self._added:
            return None  # what upstream's guarded import of it would have left
        if inner not in self._ours:
            return value
        base = self._ours[inner][1]
        return base if type(base) is type(value) else rewrap(value, unwrap(base))

    def renew(self, module: types.ModuleType) -> None:
        """Let go of what a module held whose code has run (again), as far as it holds new objects since."""
        name = namespace_of(module)["__name__"]
        for target, chain in list(self.chains.items()):
            if split_target(target)[0] == name and not self._stands(chain):
                del self.chains[target]
        self.slots = {k: s for k, s in self.slots.items() if s.owner is not module or s.current() is s.written}
        self.lost = {k: lost for k, lost in self.lost.items() if lost.slot.owner is not module}

    def _stands(self, chain: Chain) -> bool:
        try:
            owner, _, value = self.resolve(chain.target)
        except BindError:
            return False
        return owner is chain.owner and unwrap(value) is unwrap(chain.top)

    def abandon(self, name: str) -> None:
        """Take everything off a module whose import fails and which is about to leave sys.modules."""
        self.commit({t: chain.layers for t, chain in self.chains.items() if split_target(t)[0] != name})

    def overdue(self) -> set[str]:
        """Modules whose import is over that was not when aliases were looked for: a name that they had read by then,
        and not stored yet, was out of sight."""
        return {name for name in self._unfinished if not is_initialising(sys.modules.get(name))}

    # Transactions

    def commit(self, wanted: Mapping[str, tuple[Layer, ...]], imported: Imported | None = None) -> list[Lost]:
        """Make the chains what `wanted` says, for every target that is loaded; all of it or nothing.

        `wanted` maps targets to their layers, innermost first; a target that is not named loses all layers.
        `imported` limits the search for aliases of what a module has just defined. Everything new is built before
        anything is written, every write is read back, and an exception undoes the writes in reverse. Returns what
        was found lost.
        """
        before = dict(self.chains), dict(self.slots), dict(self.lost)
        journal: list[tuple[Any, str, Any]] = []
        try:
            self._regain()
            if imported is None:
                self._adopt_returned()
            changes = [
                self._build(chain, layers)
                for chain, layers in self._open({**dict.fromkeys(self.chains, ()), **wanted})
                if chain.layers != layers
            ]
            self._keep_pairs(changes)
            self._write_all(changes, journal, imported)
            for chain, after in changes:
                self._settle(chain, after)
        except BaseException:
            for owner, name, value in reversed(journal):
                if namespace_of(owner).get(name, MISSING) is not value:
                    write_name(owner, name, value)
            self.chains, self.slots, self.lost = before
            raise
        return [lost for key, lost in self.lost.items() if before[2].get(key) is not lost]

    def given_back(self) -> bool:
        """Whether the next transaction would govern a name again that was lost."""
        return any(map(self._is_back, self.lost.values()))

    def _is_back(self, lost: Lost) -> bool:
        current = lost.slot.current()
        ours = current is lost.slot.original or self.beneath(current) is not current
        return lost.partner not in self.lost and ours

    def _regain(self) -> None:
        """Govern names again where whoever replaced them has put ours or upstream's object back."""
        for key, lost in sorted(self.lost.items(), key=lambda item: item[1].partner is not None):
            if not self._is_back(lost):
                continue
            del self.lost[key]
            self.slots[key] = replace(lost.slot, written=lost.slot.current())
            self.chains.pop(lost.slot.target, None)  # what came back may be an older wrapper

    def _adopt_returned(self) -> None:
        """Govern places to which somebody gave back a wrapper of ours that is off duty by now.

        A module imported while shim was bound took the wrapper as its own; whoever patched it there meanwhile kept
        the wrapper beyond the revert that would have found it. Costs nothing where no such wrapper is alive.
        """
        on_duty = {id(unwrap(chain.top)) for chain in self.chains.values()}
        for owner, name, raw in find_aliases([inner for inner in list(self._ours) if id(inner) not in on_duty]):
            key = (id(owner), name)
            if key not in self.slots and key not in self.lost:
                target, base = self._ours[unwrap(raw)]
                self.slots[key] = Slot(owner, name, rewrap(raw, unwrap(base)), raw, target)

    def _open(self, wanted: Mapping[str, tuple[Layer, ...]]) -> Iterator[tuple[Chain, tuple[Layer, ...]]]:
        for target, layers in wanted.items():
            chain = self.chains.get(target)
            if chain is None and layers and self.loaded(split_target(target)[0]) is not None:
                owner, name, value = self.resolve(target, layers[0].added)
                base = self.beneath(value)
                self.lost.pop((id(owner), name), None)  # what is there now has been looked at: it is not foreign
                # What stands on a class further up is that class's own.
                top = value if name in namespace_of(owner) else base
                chain = Chain(target, owner, name, base, top, alone=layers[0].alone)
            if chain is not None:
                yield chain, layers

    def _build(self, chain: Chain, layers: tuple[Layer, ...]) -> Change:
        inner = unwrap(chain.base)
        for layer in layers:
            try:
                outer = layer.factory(inner)
            except Exception as error:
                message = f"{layer.target}: {type(error).__name__}: {error}"
                raise BindError(message, layer.patch) from error
            problem = "" if inner is MISSING else misfit(outer, inner)
            if problem:
                raise BindError(f"{layer.target} would no longer take the calls it took: {problem}", layer.patch)
            inner = outer
        top = rewrap(chain.base, inner) if layers else chain.base
        # Asked now, because once bound under upstream's name a wrapper is found by that name too. What takes an added
        # name from us has nothing to go back to.
        borrowed = chain.base is MISSING or (inner is not unwrap(chain.base) and found_by_name(inner))
        return chain, replace(chain, layers=layers, top=top, borrowed=borrowed)

    def _keep_pairs(self, changes: Iterable[Change]) -> None:
        """Leave forward in place where backward cannot be taken off because somebody stands on it, and vice versa.

        The foreign function still calls ours beneath it, so a pair torn apart would compute wrong gradients.
        """
        for chain, after in changes:
            other = {"forward": "backward", "backward": "forward"}.get(chain.name)
            partner = self.chains.get(f"{chain.target.rpartition('.')[0]}.{other}")
            if after.layers or partner is None or self._is_lost(chain) or not self._is_lost(partner):
                continue
            self._lose(self.slots[chain.key], f"stays bound, because {partner.name} was replaced", partner.key)

    def _is_lost(self, chain: Chain) -> bool:
        slot = self.slots.get(chain.key)
        return chain.key in self.lost or (slot is not None and slot.current() is not slot.written)

    def _lose(self, slot: Slot, why: str, partner: Key | None = None) -> None:
        self.lost[slot.key] = Lost(slot, why, partner)
        self.slots.pop(slot.key, None)

    def _write_all(self, changes: Sequence[Change], journal: list[Any], imported: Imported | None) -> None:
        """First the targets and all places known, then the aliases, so that an import meanwhile takes no old one."""
        # Before anything is looked at: what is over by the end of this may have been looked at too early.
        overdue = self.overdue()
        self._unfinished -= overdue
        if changes:
            self._unfinished |= {name for name, module in list(sys.modules.items()) if is_initialising(module)}
        old: dict[int, Change] = {}
        near: list[Any] = []
        far: list[Any] = []
        for chain, after in changes:
            self._put(chain.owner, chain.name, chain, after, journal)
            inner = unwrap(chain.top)
            # Constants are not known by identity.
            if callable(inner) and not self._is_borrowed(chain) and not (chain.alone and chain.top is chain.base):
                old[id(inner)] = (chain, after)
                (near if imported is not None and self._is_new(chain, imported[0]) else far).append(inner)
        by_target = {chain.target: (chain, after) for chain, after in changes}
        for slot in list(self.slots.values()):
            change = by_target.get(slot.target)
            if change is not None:
                chain, after = change
                # After a reload, older places keep the older wrapper, but give it up in the end.
                same = unwrap(self.beneath(slot.written)) is unwrap(chain.base) or slot.original is chain.base
                if same or not after.layers:
                    self._put(slot.owner, slot.name, chain, after, journal)
            elif slot.target not in self.chains:
                self._restore(slot, journal)
        found = find_aliases(far)
        if near and imported is not None:
            found += find_aliases(near, imported[1])
        for owner, name, raw in found:
            chain, after = old[id(unwrap(raw))]
            self._put(owner, name, chain, after, journal)
        self._put_late(changes, overdue, journal)

    def _put_late(self, changes: Iterable[Change], overdue: set[str], journal: list[Any]) -> None:
        """Write to what modules that are overdue have of upstream's objects, also where a chain stays as it is."""
        changed = {chain.target: (chain, after) for chain, after in changes}
        governed: dict[int, tuple[Any, Change]] = {}
        for target, chain in ({**self.chains, **{t: c for t, (c, _) in changed.items()}} if overdue else {}).items():
            before, after = changed.get(target, (chain, chain))
            slot, inner = self.slots.get(chain.key), unwrap(chain.base)
            # What stands on a class further up is that class's own.
            own = slot is not None and slot.original is not MISSING
            if after.layers and callable(inner) and own and not after.borrowed and not chain.alone:
                governed[id(inner)] = inner, (before, after)
        for owner, name, raw in find_aliases([inner for inner, _ in governed.values()], overdue):
            self._put(owner, name, *governed[id(unwrap(raw))][1], journal)

    def _is_borrowed(self, chain: Chain) -> bool:
        """Whether `top` belongs to others: to a class further up, or to wherever a factory took it from."""
        slot = self.slots.get(chain.key)
        inherited = chain.top is chain.base and slot is not None and slot.original is MISSING
        return inherited or chain.borrowed

    def _is_new(self, chain: Chain, module: str) -> bool:
        """Whether the module that was just imported has itself made what stands on the target."""
        made_in = getattr(unwrap(chain.top), "__module__", None)
        return not chain.layers and split_target(chain.target)[0] == module == made_in

    def _put(self, owner: Any, name: str, chain: Chain, after: Chain, journal: list[Any]) -> None:
        """Write the new top to one place (the original, where no layer is left), unless somebody else holds it now."""
        key = (id(owner), name)
        if key in self.lost:
            return
        current = namespace_of(owner).get(name, MISSING)
        slot = self.slots.get(key)
        if slot is not None and current is not slot.written:
            self._lose(slot, replaced_by(current))
            return
        if slot is None:
            # An alias taken while shim was bound would hold upstream's object, had shim never been there.
            upstream = current is MISSING or unwrap(current) is unwrap(chain.base)
            original = current if upstream else rewrap(current, unwrap(chain.base))
            slot = Slot(owner, name, original, current, chain.target)
        if not after.layers:
            self.slots[key] = slot
            self._restore(slot, journal)
            return
        value = (
            after.top
            if chain.base is MISSING
            else rewrap(chain.base if current is MISSING else current, unwrap(after.top))
        )
        slot = self.slots[key] = replace(slot, written=value)
        self._write(slot, value, current, journal, after.layers[-1].patch)

    def _restore(self, slot: Slot, journal: list[Any]) -> None:
        current = slot.current()
        self.slots.pop(slot.key, None)
        if current is slot.written:
            if current is not slot.original:
                self._write(slot, slot.original, current, journal)
        else:
            self._lose(slot, replaced_by(current))

    def _write(self, slot: Slot, value: Any, current: Any, journal: list[Any], patch: str | None = None) -> None:
        """Write one name, with an entry in the journal, and read it back."""
        journal.append((slot.owner, slot.name, current))
        try:
            write_name(slot.owner, slot.name, value)
        except Exception as error:
            message = f"{slot.target}: {slot} cannot be written: {type(error).__name__}: {error}"
            raise BindError(message, patch) from error
        if slot.current() is not value:
            raise BindError(f"{slot.target} does not read back at {slot}", patch)

    def _settle(self, chain: Chain, after: Chain) -> None:
        """Record what the transaction made of a chain."""
        if not after.layers:
            self.chains.pop(chain.target, None)
            return
        self.chains[chain.target] = after
        inner = unwrap(after.top)
        if not issubclass(type(inner), (types.FunctionType, type)):
            return
        if chain.base is MISSING:
            self._added.add(inner)
        elif inner is not unwrap(chain.base) and not after.borrowed:
            self._ours[inner] = chain.target, chain.base

    # Reading

    def lost_now(self) -> list[Lost]:
        """What others have replaced, including what no transaction has noticed yet; changes nothing."""
        fresh = [
            Lost(slot, replaced_by(slot.current()))
            for slot in self.slots.values()
            if slot.current() is not slot.written
        ]
        return [*self.lost.values(), *fresh]

    def lost_targets(self) -> dict[str, Lost]:
        """Those among `lost_now` that are a target itself, not one of its aliases."""
        places = {chain.key: target for target, chain in self.chains.items()}
        return {places[lost.slot.key]: lost for lost in self.lost_now() if lost.slot.key in places}

    def bound(self, patch: str, target: str) -> bool:
        """Whether the patch is on the target right now, read back from the target itself."""
        chain = self.chains.get(target)
        if chain is None or all(layer.patch != patch for layer in chain.layers):
            return False
        slot = self.slots.get(chain.key)
        return slot is not None and slot.current() is slot.written
