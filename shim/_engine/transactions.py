"""Step 4, bind: bring ordered chains of patches onto targets, in transactions that are all or nothing.

A transaction is drafted on a copy of the records (Draft). Then its writes are made one after the other, and taken back
if one of them fails (Binder).
"""

from __future__ import annotations

import types
from collections.abc import Iterable, Iterator, Mapping, Sequence
from operator import itemgetter
from typing import Any

from shim._engine.chains import Findings, Records, is_same
from shim._engine.factories import misfit
from shim._engine.import_hook import last_module, locked_modules
from shim._engine.names import (
    MISSING,
    Chain,
    Change,
    Held,
    Imported,
    Key,
    Layer,
    Replaced,
    Slot,
    Write,
    describe,
    find_aliases,
    found_by_name,
    imports_no_megatron,
    is_kind,
    namespace_of,
    read_name,
    replaced_by,
    rewrap,
    unwrap,
)
from shim._errors import BindError
from shim._record import replace
from shim._releases.fingerprint import split_target

__all__ = ["Binder"]


class Draft(Records):
    """A copy of the records, brought to what is wanted.

    drafted: what is to be written, name by name.
    missed: modules of wanted targets that had not run when conflicts were looked for.
    """

    def __init__(self, records: Records, found: Findings) -> None:
        vars(self).update(vars(records))
        self.chains, self.slots, self.replaced = dict(records.chains), dict(records.slots), dict(records.replaced)
        self.found = found
        self.drafted: dict[Key, Write] = {}
        self.missed: set[str] = set()

    def bring_to(self, wanted: Mapping[str, tuple[Layer, ...]], imported: Imported | None) -> None:
        """Bring the chains of all loaded targets to `wanted`. See Binder.commit."""
        self._give_up_replaced()
        self._regain()
        for target, value in self.found.renewed.items():  # what its patches go around: the chain is built above it
            chain = self.chains.get(target)
            replaced = None if chain is None else self.replaced.get(chain.key)
            if replaced is not None and replaced.slot.current() is value:
                del self.chains[target]
        changes = [self._build(chain, layers) for chain, layers in self._differing(wanted)]
        self._keep_pairs(changes)
        self._write_all(changes, imported)
        for _, after in changes:
            if after.layers:
                self.chains[after.target] = after
                self._note(after)
            else:
                self.chains.pop(after.target, None)

    def writes_to(self, records: Records) -> Iterator[Write]:
        """All writes, in their order: names, and the records last."""
        yield from self.drafted.values()
        for name in ("chains", "slots", "replaced", "found", "unfinished", "searched"):
            yield Write(records, name, getattr(records, name), getattr(self, name))

    def _note(self, chain: Chain) -> None:
        """Remember the object that a chain puts on its target. One that is not written in the end is soon forgotten."""
        inner = chain.inner
        shims = chain.base is MISSING or (inner is not chain.beneath and not chain.borrowed)
        if shims and is_kind(inner, (types.FunctionType, type)):
            self.ours[inner] = chain.target, chain.base

    # Names that others have replaced, or given back

    def _give_up(self, slot: Slot, why: str, partner: Key | None = None) -> None:
        self.slots.pop(slot.key, None)
        if not slot.within:  # a place inside a foreign object belongs to that object; no code looks it up as a name
            self.replaced[slot.key] = Replaced(slot, why, partner, slot.current() if partner else None)

    def _give_up_replaced(self) -> None:
        """Give up the names that other code has replaced, and govern the places of the new object that hold shim's.

        So revert() takes shim's function out of a wrapper that other code put around it, and a later plan changes it. A
        wrapper that holds upstream's function, because it took that before, gets shim's.
        """
        for slot in list(self.slots.values()):
            if not slot.is_written():
                self._give_up(slot, replaced_by(slot.current()))
        for replaced in list(self.replaced.values()):
            current, base = replaced.slot.current(), self.base_of(replaced.slot)
            examined = replaced.foreign is current or replaced.partner is not None
            if not examined and base is not None and not self.is_back(replaced):
                self._move_into(replaced.slot, current, self.held_in(replaced.slot, base), base)

    def _move_into(self, slot: Slot, foreign: Any, found: Iterable[Held], original: Any) -> None:
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

    def _regain(self) -> None:
        """Take names back into `slots` if other code has put shim's or upstream's object back there."""
        found = []
        for key, replaced in sorted(self.replaced.items(), key=lambda item: item[1].partner is not None):
            if self.is_back(replaced):
                del self.replaced[key]
                current = replaced.slot.current()
                # A wrapper that was there before shim hid the descriptor of upstream's function.
                original = current if is_same(current, replaced.slot.original) else replaced.slot.original
                beneath = self.beneath(current)
                if beneath is not current and original is not MISSING and not is_same(beneath, original):
                    original = beneath  # shim went around a foreign function, which has been taken back
                self.slots[key] = replace(replaced.slot, original=original, written=current)
                found.append(self.slots[key])
        for slot in found:
            chain = self.chains.get(slot.target)
            if chain is None or chain.key == slot.key:  # of an alias nothing follows for what stands on the target
                self.chains.pop(slot.target, None)  # the name may hold an older wrapper now
                self.found = self.found.without(slot.target)

    # New objects

    def _differing(self, wanted: Mapping[str, tuple[Layer, ...]]) -> list[tuple[Chain, tuple[Layer, ...]]]:
        """The chains that are not as wanted, with their wanted layers. Loaded targets without a chain get a new one."""
        pairs = [(chain, wanted.get(target, ())) for target, chain in self.chains.items()]
        found = [(chain, layers) for chain, layers in pairs if chain.layers != layers]
        new = wanted.keys() - self.chains.keys()
        for target, layers in wanted.items() if new else ():
            if target in new and layers:
                module = split_target(target)[0]
                if module in self.found.loaded and self.loaded(module) is not None:
                    found.append((self._new_chain(target, layers[0].may_be_missing), layers))
                else:
                    self.missed.add(module)
        return found

    def _new_chain(self, target: str, may_be_missing: bool) -> Chain:
        """The chain of a target that has none, without layers. A patch can hold on the object there: see foreign.py."""
        owner, name, value = self.resolve(target, may_be_missing)
        base, key = self.beneath(value), (id(owner), name)
        before = self.replaced.pop(key, None)
        known = self.slots.get(key) or (None if before is None else before.slot)
        if known is not None and base is value is known.written:
            base = known.original  # shim's own object is back, and it is no function that says what is beneath
        wrapped = self.found.wrapped.get(target)
        if wrapped is not None and wrapped.foreign is value:
            original = wrapped.upstream if before is None else before.slot.original
            slot = Slot(owner, name, original, wrapped.upstream, target)
            self._move_into(slot, value, wrapped.held, wrapped.upstream)
            return Chain(target, owner, name, wrapped.upstream, wrapped.upstream)
        # An inherited object belongs to the base class.
        return Chain(target, owner, name, base, value if name in namespace_of(owner) else base)

    def _build(self, chain: Chain, layers: tuple[Layer, ...]) -> Change:
        """Let the factories build the new object of the target, from the inside out. Writes nothing."""
        inner = chain.beneath
        for layer in layers:
            try:
                outer = layer.factory(inner)
            except Exception as error:
                message = f"{layer.target}: {type(error).__name__}: {error}"
                raise BindError(message, layer.patch) from error
            problem = "" if inner is MISSING else misfit(outer, inner)
            if problem:
                raise BindError(f"{layer.target}: incompatible signature: {problem}", layer.patch)
            inner = outer
        top = rewrap(chain.base, inner) if layers else chain.base
        # Asked before the write: once bound, a wrapper too is found by upstream's name. An added name is borrowed as
        # well, because its aliases have no object to go back to.
        borrowed = chain.base is MISSING or (inner is not chain.beneath and found_by_name(inner))
        wraps = not borrowed and inner is not chain.beneath and "__wrapped__" in getattr(top, "__dict__", ())
        if wraps and type(top) is types.FunctionType and any(layer.no_aliases for layer in layers):
            # At home stays upstream's object, and pickle writes a function only if it finds that one by these names.
            top.__module__, top.__qualname__ = split_target(chain.target)
        return chain, replace(chain, layers=layers, top=top, borrowed=borrowed)

    def _keep_pairs(self, changes: Iterable[Change]) -> None:
        """Keep forward bound while a foreign object on backward keeps that one from being unbound, and vice versa.

        The foreign function still calls shim's function beneath it, so half a pair would compute wrong gradients. One
        that holds nothing of shim's was written for upstream's other half, and gets that back.
        """
        for chain, after in changes:
            other = {"forward": "backward", "backward": "forward"}.get(chain.name)
            partner = self.chains.get(f"{chain.target.rpartition('.')[0]}.{other}")
            if after.layers or partner is None or chain.key in self.replaced:
                continue
            if self.is_governed_inside(partner.key):  # the other function calls upstream's again
                continue
            replaced = self.replaced.get(partner.key)
            if replaced is not None and self.effect_of(replaced) != "replaced":
                why = f"stays bound, because {partner.name} was replaced"
                self._give_up(self.slots[chain.key], why, partner.key)

    # Writes

    def _write_all(self, changes: Sequence[Change], imported: Imported | None) -> None:
        """Write targets and known places first, aliases second, so that a concurrent import takes no old object."""
        # Asked before the search: a module that finishes its import during the search may have been searched too early.
        overdue = self.overdue()
        unfinished = (self.unfinished | self.came()) - overdue
        if changes:  # each module that is half imported now is locked
            unfinished |= {name for name in locked_modules() if not imports_no_megatron(name)}
        self.unfinished, self.searched = unfinished, last_module() if changes else None
        sought: dict[int, tuple[Any, Change]] = {}
        among: set[str] | None = set(overdue)  # where to look for them; None: everywhere
        for chain, after in changes:
            self._put(chain.owner, chain.name, chain, after)
            inner, beneath = chain.inner, chain.beneath
            # Constants have no identity, so only callables have aliases.
            no_aliases = chain.top is chain.base and after.layers and after.layers[0].no_aliases
            if callable(inner) and not self._is_borrowed(chain) and not no_aliases:
                sought[id(inner)] = inner, (chain, after)
                if imported is None or not self._is_new(chain, imported[0]):
                    among = None
                elif among is not None:
                    among.update(imported[1])
                if not chain.layers and beneath is not inner and callable(beneath):
                    # Other code has put shim's older object back. Aliases hold upstream's meanwhile.
                    sought[id(beneath)], among = (beneath, (chain, after)), None
        by_target = {chain.target: (chain, after) for chain, after in changes}
        self._write_known(by_target)
        late = self._late(by_target) if overdue else {}
        if among is not None:  # one search will do
            sought, late = {**late, **sought}, {}
        self._write_aliases(sought, among)
        self._write_aliases(late, overdue)

    def _write_known(self, changes: Mapping[str, Change]) -> None:
        """Write to known places, and restore places whose target has no chain any more."""
        for slot in list(self.slots.values()):
            chain = self.chains.get(slot.target)
            if chain is not None and slot.target not in changes and slot.written is chain.top and chain.layers:
                continue  # as most of them
            before, after = changes.get(slot.target, (chain, chain))
            if before is None or after is None:
                self._restore(slot)
            elif after.layers and unwrap(slot.written) is after.inner:
                continue
            # After a reload, older places keep the older wrapper until the chain loses its layers.
            elif (
                not after.layers
                or slot.within
                or slot.original is before.base
                or unwrap(self.beneath(slot.written)) is before.beneath
            ):
                self._put(slot.owner, slot.name, before, after)

    def _write_aliases(self, objects: Mapping[int, tuple[Any, Change]], modules: Iterable[str] | None) -> None:
        """Write to all names that hold one of the objects, in all modules or in some."""
        for owner, name, raw in find_aliases([found for found, _ in objects.values()], modules):
            self._put(owner, name, *objects[id(unwrap(raw))][1])

    def _late(self, changes: Mapping[str, Change]) -> dict[int, tuple[Any, Change]]:
        """The objects that modules which finished importing late may hold, also of chains that do not change."""
        found: dict[int, tuple[Any, Change]] = {}
        older: dict[str, list[Any]] = {}
        for ours, (target, base) in list(self.ours.items()):
            chain = changes[target][1] if target in changes else self.chains.get(target)
            if chain is not None and chain.layers:
                if ours is not chain.inner:
                    older.setdefault(target, []).append(ours)
            elif base is not MISSING:
                gone = Chain(target, None, "", base, base)  # it took shim's function before this was taken away
                found[id(ours)] = ours, (gone, gone)
        unchanged = {target: (chain, chain) for target, chain in self.chains.items()}
        for target, (before, after) in {**unchanged, **changes}.items():
            if not after.has_aliases:
                continue
            slot = self.slots.get(before.key)
            # An inherited object belongs to the base class.
            if self.is_governed_inside(before.key) if slot is None else slot.original is not MISSING:
                # A module that came while another plan was in force took what was bound then.
                for taken in (before.beneath, *older.get(target, ())):
                    found[id(taken)] = taken, (before, after)
        return found

    def _is_borrowed(self, chain: Chain) -> bool:
        """Whether `top` belongs to someone else: to a base class, or to the place a factory took it from."""
        slot = self.slots.get(chain.key)
        inherited = chain.top is chain.base and slot is not None and slot.original is MISSING
        return inherited or chain.borrowed

    def _is_new(self, chain: Chain, module: str) -> bool:
        """Whether the module that was just imported defined the object on the target."""
        made_in = getattr(chain.inner, "__module__", None)
        return not chain.layers and split_target(chain.target)[0] == module == made_in

    def _put(self, owner: Any, name: str, chain: Chain, after: Chain) -> None:
        """Write the new top to one place, or the original if no layer is left. A foreign object keeps the place."""
        key = (id(owner), name)
        if key in self.replaced:
            return
        current = self._read(owner, name)
        slot = self.slots.get(key)
        if slot is not None and current is not slot.written:
            self._give_up(slot, replaced_by(current))
            return
        if slot is None:
            # A module imported while shim was bound took shim's object. Without shim it would hold upstream's.
            upstream = current is MISSING or unwrap(current) is chain.beneath
            original = current if upstream else rewrap(current, chain.beneath)
            slot = Slot(owner, name, original, current, chain.target)
        if not after.layers:
            self.slots[key] = slot
            self._restore(slot)
            return
        kind = chain.base if current is MISSING else current
        value = after.top if chain.base is MISSING else rewrap(kind, after.inner)
        slot = self.slots[key] = replace(slot, written=value)
        self._write(slot, value, after.layers[-1].patch)

    def _restore(self, slot: Slot) -> None:
        """Restore the original of one place. A foreign object keeps the place."""
        current = self._read(slot.owner, slot.name)
        self.slots.pop(slot.key, None)
        if current is not slot.written:
            self._give_up(slot, replaced_by(current))
        elif current is not slot.original:
            self._write(slot, slot.original)

    def _read(self, owner: Any, name: str) -> Any:
        drafted = self.drafted.get((id(owner), name))
        return read_name(owner, name) if drafted is None else drafted.after

    def _write(self, slot: Slot, value: Any, patch: str | None = None) -> None:
        drafted = self.drafted.get(slot.key)
        before = slot.current() if drafted is None else drafted.before
        self.drafted[slot.key] = Write(slot.owner, slot.name, before, value, slot, patch)


# Transactions


class Binder(Records):
    """The records of this process, and the transactions that change them and the process, all or nothing."""

    def __init__(self) -> None:
        super().__init__()
        self._begun: list[
            Write
        ] = []  # the undo list: what has been written, or begun to be, by the present transaction

    # Modules that run again, or whose import fails

    def renew(self, module: types.ModuleType) -> None:
        """Forget what stands in a module whose code has run again, if it holds new objects there."""
        inside = f"{namespace_of(module)['__name__']}:"
        gone = [t for t in self.chains if t.startswith(inside) and not self._stands(self.chains[t])]
        if gone:
            self.chains = {target: chain for target, chain in self.chains.items() if target not in gone}
        if id(module) in map(itemgetter(0), self.slots):
            self.slots = {k: slot for k, slot in self.slots.items() if slot.owner is not module or slot.is_written()}
        self.replaced = {k: replaced for k, replaced in self.replaced.items() if replaced.slot.owner is not module}

    def _stands(self, chain: Chain) -> bool:
        try:
            owner, _, value = self.resolve(chain.target)
        except BindError:
            return False
        return owner is chain.owner and unwrap(value) is chain.inner

    def abandon(self, name: str) -> None:
        """Unbind everything in a module whose import fails: the module is about to leave sys.modules."""
        self.commit({t: chain.layers for t, chain in self.chains.items() if split_target(t)[0] != name})

    # Transactions

    def commit(
        self,
        wanted: Mapping[str, tuple[Layer, ...]],
        imported: Imported | None = None,
        also: Sequence[Write] = (),
        found: Findings | None = None,
    ) -> tuple[list[Replaced], set[str]]:
        """Bring the chains of all loaded targets to `wanted`, all or nothing.

        `wanted` maps targets to their layers, innermost first. A target that is not named loses all layers.
        `imported` limits the search for aliases of objects that a module has just defined. `also`: what is written in
        the same transaction. `found`: what was found about other people's objects for these layers. Everything new is
        built before, and every write is read back.

        Returns the names that were found replaced, and the modules that were missed: see Draft.
        """
        self.recover()
        replaced, missed = self._commit(wanted, imported, also, found or self.found)
        if self.came():
            # Another thread has imported something since the search for aliases, and may hold what stood there before.
            replaced += self._commit(wanted, imported, (), self.found)[0]
        else:
            self.searched = None  # no search has to ask again
        return replaced, missed

    def _commit(
        self,
        wanted: Mapping[str, tuple[Layer, ...]],
        imported: Imported | None,
        also: Sequence[Write],
        found: Findings,
    ) -> tuple[list[Replaced], set[str]]:
        draft = Draft(self, found)
        draft.bring_to(wanted, imported)
        before = self.replaced
        self._perform([*draft.writes_to(self), *also])
        return [item for key, item in self.replaced.items() if before.get(key) is not item], draft.missed

    def _perform(self, writes: Sequence[Write]) -> None:
        """Make the writes one after the other, and read them back. If one fails, take back what was made."""
        try:
            for write in writes:
                self._begun.append(write)
                write.make()
            for write in writes:
                if write.slot is not None and write.current() is not write.after:
                    raise BindError(f"{write.slot.target}: {write.slot} does not read back", write.patch)
            self._begun = []
        except BaseException as error:
            failing = self._begun[-1] if self._begun else None
            self.recover()
            slot = None if failing is None else failing.slot
            if failing is None or slot is None or isinstance(error, BindError) or not isinstance(error, Exception):
                raise
            message = f"{slot.target}: {slot} cannot be written: {type(error).__name__}: {error}"
            raise BindError(message, failing.patch) from error

    def recover(self) -> None:
        """Take back writes, the last first: of which one failed, or among which the process was forked."""
        for write in reversed(self._begun):
            if write.current() is not write.before:
                write.undo()
        self._begun = []
