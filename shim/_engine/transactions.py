"""Step 4, bind: bring ordered chains of patches onto targets, in transactions that are all or nothing.

A transaction is drafted on a copy of the records (Draft). Then its writes are made one after the other, and taken back
if one of them fails (UndoList).
"""

from __future__ import annotations

import types
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from shim._engine.chains import Findings, Records
from shim._engine.factories import misfit
from shim._engine.names import (
    MISSING,
    Chain,
    Change,
    Imported,
    Key,
    Layer,
    Replaced,
    Slot,
    UndoList,
    Write,
    describe,
    find_aliases,
    found_by_name,
    namespace_of,
    rewrap,
    unwrap,
)
from shim._errors import BindError
from shim._releases.fingerprint import split_target

__all__ = ["Binder"]


class Draft(Records):
    """A copy of the records, brought to what is wanted. `writes` makes the process and the records the same."""

    def __init__(self, records: Records, found: Findings) -> None:
        """Not what Records does: everything is of `records`, or a copy of it."""
        self._of = records
        self.modules = records.modules.draft()
        self.wrappers = records.wrappers.draft()
        self.places = records.places.draft()
        self.chains = dict(records.chains)
        self.found = found.copy()
        self.first = dict(records.first)
        self.known_ways = records.known_ways
        self.missed: set[str] = set()  # modules of wanted targets that were not loaded, or were seen too late

    def bring_to(self, wanted: Mapping[str, tuple[Layer, ...]], imported: Imported | None) -> None:
        """Bring the chains of all loaded targets to `wanted`. See Binder.commit."""
        places = self.places
        places.drop_replaced(self._base_of)
        returned = {slot.key: slot for slot in places.regain()}
        for slot in returned.values():
            if self._is_on_target(slot):  # of an alias nothing follows for what stands on the target
                self.chains.pop(slot.target, None)  # the name may hold an older wrapper now
                self.found.drop(slot.target)
        self._renew_replaced()
        opened = list(self._open({**dict.fromkeys(self.chains, ()), **wanted}))  # a factory may import a further target
        changes = [self._build(chain, layers) for chain, layers in opened if chain.layers != layers]
        self._keep_pairs(changes)
        self._write_all(changes, imported, returned)
        for _, after in changes:
            if after.layers:
                self.chains[after.target] = after
                self.wrappers.note(after)
            else:
                self.chains.pop(after.target, None)

    def writes(self) -> Iterator[Write]:
        """All writes, in their order: names, and the records last."""
        yield from self.places.drafted.values()
        of = self._of
        for mine, theirs, names in (
            (self, of, ("chains", "found", "first")),
            (self.places, of.places, ("slots", "replaced")),
            (self.wrappers, of.wrappers, ("before", "added")),
            (self.modules, of.modules, ("unfinished", "searched")),
        ):
            for name in names:
                yield Write(theirs, name, getattr(theirs, name), getattr(mine, name))

    def _renew_replaced(self) -> None:
        """Drop chains whose object was replaced by a function that their patches go around: they are built above it."""
        for target, value in self.found.renewed.items():
            chain = self.chains.get(target)
            replaced = None if chain is None else self.places.replaced.get(chain.key)
            if replaced is not None and replaced.slot.current() is value:
                del self.chains[target]

    def _open(self, wanted: Mapping[str, tuple[Layer, ...]]) -> Iterator[tuple[Chain, tuple[Layer, ...]]]:
        """Each chain with its wanted layers. Loaded targets without a chain get a new one."""
        for target, layers in wanted.items():
            chain, module = self.chains.get(target), split_target(target)[0]
            if chain is None and layers and self.loaded(module) is None:
                self.missed.add(module)
            elif chain is None and layers:
                owner, name, value = self.resolve(target, layers[0].may_be_missing)
                base = self.wrappers.beneath(value)
                before = self.places.replaced.get((id(owner), name))
                known = self.places.slots.get((id(owner), name)) or (None if before is None else before.slot)
                if not self._was_looked_at(target, value, known):
                    if target not in self.found.seen:
                        self.missed.add(module)  # it was imported since
                        continue
                    message = f"{target} was replaced by {describe(unwrap(value))} while shim was about to bind it"
                    raise BindError(message, layers[0].patch)
                self.places.replaced.pop((id(owner), name), None)
                if known is not None and base is value is known.written:
                    base = known.original  # shim's own object is back, and it is no function that says what is beneath
                around = self.found.wrapped.get(target)
                if around is not None and around.foreign is value:
                    chain = Chain(target, owner, name, around.upstream, around.upstream)
                    original = around.upstream if before is None else before.slot.original
                    slot = Slot(owner, name, original, around.upstream, target)
                    self.places.move_into(slot, value, around.held, around.upstream)
                    yield chain, layers
                    continue
                # with_conflicts() has found that a patch can hold on this object.
                # An inherited object belongs to the base class.
                top = value if name in namespace_of(owner) else base
                chain = Chain(target, owner, name, base, top)
                around_it = any(bound == target for _, bound in self.found.around)
                # What stands on a name that upstream may lack tells nothing: anybody may give it.
                if base is not MISSING and not layers[0].may_be_missing and not around_it:
                    self.first.setdefault(target, unwrap(base))
            if chain is not None:
                yield chain, layers

    def _was_looked_at(self, target: str, value: Any, known: Slot | None) -> bool:
        """Whether shim has seen whose object stands on a target that gets a new chain: this very object, or its own."""
        seen = (
            self.found.seen.get(target),
            self.found.renewed.get(target),
            *(() if known is None else (known.original,)),
        )
        return (
            any(value is one for one in seen)
            or self.wrappers.is_ours(value)
            or (known is not None and value is known.written)
        )

    def _build(self, chain: Chain, layers: tuple[Layer, ...]) -> Change:
        """Let the factories build the new object of the target, from the inside out. Writes nothing."""
        inner = unwrap(chain.base)
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
        borrowed = chain.base is MISSING or (inner is not unwrap(chain.base) and found_by_name(inner))
        wraps = not borrowed and inner is not unwrap(chain.base) and "__wrapped__" in getattr(top, "__dict__", ())
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
            if after.layers or partner is None or self.places.is_replaced(chain.key):
                continue
            if self._is_governed_inside(partner.key):  # the other function calls upstream's again
                continue
            replaced = next((item for item in self.places.replaced_now() if item.slot.key == partner.key), None)
            if replaced is not None and self.effect_of(replaced) != "replaced":
                why = f"stays bound, because {partner.name} was replaced"
                self.places.give_up(self.places.slots[chain.key], why, partner.key)

    def _write_all(self, changes: Sequence[Change], imported: Imported | None, returned: Container[Key]) -> None:
        """Write targets and known places first, aliases second, so that a concurrent import takes no old object."""
        # Asked before the search: a module that finishes its import during the search may have been searched too early.
        overdue = self.modules.overdue()
        self.modules.looked_through(overdue)
        if changes:
            self.modules.note_search()
        old: dict[int, Change] = {}
        near: list[Any] = []
        far: list[Any] = []
        for chain, after in changes:
            self.places.put(chain.owner, chain.name, chain, after)
            inner = unwrap(chain.top)
            # Constants have no identity, so only callables have aliases.
            no_aliases = chain.top is chain.base and after.layers and after.layers[0].no_aliases
            if callable(inner) and not self._is_borrowed(chain) and not no_aliases:
                old[id(inner)] = (chain, after)
                (near if imported is not None and self._is_new(chain, imported[0]) else far).append(inner)
                beneath = unwrap(chain.base)
                if not chain.layers and beneath is not inner and callable(beneath):
                    # Other code has put shim's older object back. Aliases hold upstream's meanwhile.
                    old[id(beneath)] = (chain, after)
                    far.append(beneath)
        self._write_known(changes)
        self._write_governed(changes, returned)
        found = find_aliases(far)
        if near and imported is not None:
            found += find_aliases(near, imported[1])
        for owner, name, raw in found:
            chain, after = old[id(unwrap(raw))]
            self.places.put(owner, name, chain, after)
        self._write_late(changes, overdue)

    def _write_known(self, changes: Sequence[Change]) -> None:
        """Write to known aliases, and restore aliases whose target has no chain any more."""
        by_target = {chain.target: (chain, after) for chain, after in changes}
        for slot in list(self.places.slots.values()):
            change = by_target.get(slot.target)
            if change is not None:
                chain, after = change
                # After a reload, older places keep the older wrapper until the chain loses its layers.
                beneath = unwrap(self.wrappers.beneath(slot.written))
                same = beneath is unwrap(chain.base) or slot.original is chain.base
                if same or not after.layers:
                    self.places.put(slot.owner, slot.name, chain, after)
            elif slot.target not in self.chains:
                self.places.restore(slot)

    def _write_governed(self, changes: Iterable[Change], returned: Container[Key]) -> None:
        """Write to places that may hold upstream's function, or an older one of shim's, beneath a chain that stays.

        These are places inside of other objects, and names that other code has given back.
        """
        now = {**self.chains, **{after.target: after for _, after in changes}}
        for slot in list(self.places.slots.values()):
            chain = now.get(slot.target)
            if chain is None or unwrap(slot.written) is unwrap(chain.top):
                continue
            # What an alias holds of the time before a reload is not beneath this chain.
            beneath = unwrap(self.wrappers.beneath(slot.written))
            if slot.within or (slot.key in returned and beneath is unwrap(chain.base)):
                self.places.put(slot.owner, slot.name, chain, chain)

    def _is_on_target(self, slot: Slot) -> bool:
        chain = self.chains.get(slot.target)
        return chain is None or chain.key == slot.key

    def _write_late(self, changes: Iterable[Change], overdue: set[str]) -> None:
        """Rebind aliases in modules that finished importing late, also for chains that do not change."""
        changed = {chain.target: (chain, after) for chain, after in changes}
        governed: dict[int, tuple[Any, Change]] = {}
        older = self.wrappers.by_target() if overdue else {}
        for target, chain in ({**self.chains, **{t: c for t, (c, _) in changed.items()}} if overdue else {}).items():
            before, after = changed.get(target, (chain, chain))
            slot, inner = self.places.slots.get(chain.key), unwrap(chain.base)
            # An inherited object belongs to the base class.
            own = self._is_governed_inside(chain.key) if slot is None else slot.original is not MISSING
            if after.layers and callable(inner) and own and not after.borrowed and not after.layers[0].no_aliases:
                # A module that came while another plan was in force took what was bound then.
                for taken in (inner, *(old for old in older.get(target, ()) if old is not unwrap(after.top))):
                    governed[id(taken)] = taken, (before, after)
        for owner, name, raw in find_aliases([inner for inner, _ in governed.values()], overdue):
            self.places.put(owner, name, *governed[id(unwrap(raw))][1])

    def _is_borrowed(self, chain: Chain) -> bool:
        """Whether `top` belongs to someone else: to a base class, or to the place a factory took it from."""
        slot = self.places.slots.get(chain.key)
        inherited = chain.top is chain.base and slot is not None and slot.original is MISSING
        return inherited or chain.borrowed

    def _is_new(self, chain: Chain, module: str) -> bool:
        """Whether the module that was just imported defined the object on the target."""
        made_in = getattr(unwrap(chain.top), "__module__", None)
        return not chain.layers and split_target(chain.target)[0] == module == made_in


TRIES = 3  # of a transaction whose names other code writes meanwhile


class Binder(Records):
    """The records, and the transactions that change them and the process.

    Invariant: a transaction (`commit`) is all or nothing. It computes everything on a copy of the records and calls all
    factories first. Then an UndoList writes the names and the records.
    """

    def __init__(self) -> None:
        super().__init__()
        self._unfinished: UndoList | None = None
        self.missed: frozenset[str] = frozenset()  # by the last commit, see Draft

    # Modules that run again, or whose import fails

    def renew(self, module: types.ModuleType) -> None:
        """Forget chains and places in a module whose code has run again, if it holds new objects there."""
        name = namespace_of(module)["__name__"]
        inside = f"{name}:"
        gone = {t for t, chain in self.chains.items() if t.startswith(inside) and not self._stands(chain)}
        if gone:
            self.chains = {target: chain for target, chain in self.chains.items() if target not in gone}
        if any(target.startswith(inside) for target in self.first):
            self.first = {t: first for t, first in self.first.items() if not t.startswith(inside)}
        self.places.forget_what_was_replaced_in(module)

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
    ) -> list[Replaced]:
        """Bring the chains of all loaded targets to `wanted`, all or nothing. Returns the names found replaced.

        `wanted` maps targets to their layers, innermost first. A target that is not named loses all layers.
        `imported` limits the search for aliases of objects that a module has just defined. `also`: what is written in
        the same transaction. `found`: what was found about other people's objects for these layers. Everything new is
        built before, and every write is read back.
        """
        replaced = self._commit(wanted, imported, also, found or self.found)
        if self.modules.came_meanwhile():
            # Another thread has imported something since the search for aliases, and may hold what stood there before.
            replaced += self._commit(wanted, imported, (), self.found)
        return replaced

    def _commit(
        self,
        wanted: Mapping[str, tuple[Layer, ...]],
        imported: Imported | None,
        also: Sequence[Write],
        found: Findings,
    ) -> list[Replaced]:
        self.recover()
        for _ in range(TRIES):
            draft = Draft(self, found)
            draft.bring_to(wanted, imported)
            writes = [*draft.writes(), *also]
            if draft.places.is_up_to_date():
                break
        before = self.places.replaced
        self._perform(UndoList(writes))
        self.missed = frozenset(draft.missed)
        return [replaced for key, replaced in self.places.replaced.items() if before.get(key) is not replaced]

    def _perform(self, writes: UndoList) -> None:
        self._unfinished = writes
        try:
            writes.perform()
        except Exception as error:
            failing = writes.failing()
            self.recover()
            if failing is None:
                raise
            message = f"{failing.label} cannot be written: {type(error).__name__}: {error}"
            raise BindError(message, failing.patch) from error
        except BaseException:
            self.recover()
            raise
        failing = writes.failing()
        self.recover()
        if failing is not None:
            raise BindError(f"{failing.label} does not read back", failing.patch)

    def recover(self) -> None:
        """Take back writes of which one failed, or that a process was forked or a thread interrupted among."""
        if self._unfinished is not None:
            if self._unfinished.failing() is not None:
                self._unfinished.undo()
            self._unfinished = None
