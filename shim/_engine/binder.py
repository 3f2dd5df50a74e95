"""Step 4, bind: write ordered chains of patches onto targets, in transactions, with a journal of every write."""

from __future__ import annotations

import types
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from typing import Any

from shim._compatible import marks_of
from shim._engine.aliases import find_aliases, namespace_of, rewrap, unwrap
from shim._engine.call_watch import CallWatch
from shim._engine.chain import MISSING, Chain, Change, Held, Imported, Key, Layer, Lost, Slot, found_by_name
from shim._engine.foreign import describe
from shim._engine.modules import Modules
from shim._engine.places import Places
from shim._engine.reach import reached
from shim._engine.replacements import Around, Question
from shim._engine.wrappers import Wrappers
from shim._errors import BindError
from shim._record import Record, replace
from shim._releases.fingerprint import split_target

__all__ = ["Binder", "Wrapped"]


class Wrapped(Record):
    """Somebody else's object on a target that shim has not bound yet, and where upstream's function lies inside it."""

    foreign: Any
    upstream: Any
    held: tuple[Held, ...]


class Findings:
    """What with_conflicts() found about other people's functions, for the plan that it looked at last.

    wrapped: of a target without a chain, the object from inside of which upstream's function is called.
    around: patch and target -> the function of somebody's that the patch goes around.
    open: patch and body -> the question that only a model can answer.
    doubts: patch -> a body, and what nobody knows about it, in words.
    renewed: target -> what stands there in the place of shim's object, for the patches to go around.
    """

    def __init__(self) -> None:
        self.wrapped: dict[str, Wrapped] = {}
        self.around: dict[tuple[str, str], Around] = {}
        self.open: dict[tuple[str, str], Question] = {}
        self.doubts: dict[str, tuple[str, str]] = {}
        self.renewed: dict[str, Any] = {}

    def forget(self, bound: Container[str]) -> None:
        """Begin anew, except with what was found when the targets in `bound` were bound."""
        self.wrapped = {target: found for target, found in self.wrapped.items() if target in bound}
        self.around = {key: found for key, found in self.around.items() if key[1] in bound}
        self.open, self.doubts, self.renewed = {}, {}, {}

    def drop(self, target: str) -> None:
        """Forget what was found when a target was bound, and nothing about other targets, which may be bound next."""
        self.wrapped.pop(target, None)
        self.around = {key: found for key, found in self.around.items() if key[1] != target}

    def stands_around(self, target: str) -> bool:
        """Whether what shim has bound on a target goes around somebody's own function."""
        return any(bound == target for _, bound in self.around)


class Binder:
    """Owns the chains of one process and the places they stand on. Not thread-safe: the engine holds a lock.

    Invariants between transactions:
    - `chains` has one chain for each target with layers. `places` has a slot for the target and for each alias,
      unless that place is lost. Every slot's target has a chain.
    - A slot holds the chain's top, in the descriptor that was there before. After a reload a slot may hold an older top
      of the same target; the binder restores it together with the chain.
    - A transaction (`commit`) is all or nothing. An exception leaves chains, slots, lost names and the process as they
      were. Nothing is written before everything new is built.
    """

    def __init__(self) -> None:
        self.modules = Modules()
        self.wrappers = Wrappers()
        self.places = Places(self.wrappers.beneath)
        self.chains: dict[str, Chain] = {}
        self.calls = CallWatch()
        self.found = Findings()
        self.first: dict[
            str, Any
        ] = {}  # target -> what stood there when shim first bound it, and nobody had been there
        self.known_ways: dict[str, Any] = {}  # name -> upstream's own function there: see ways.py

    # Reading targets

    def loaded(self, name: str) -> types.ModuleType | None:
        """See Modules.loaded."""
        return self.modules.loaded(name)

    def resolve(self, target: str, added: bool = False) -> tuple[Any, str, Any]:
        """Owner, name and value of a target in a loaded module. BindError if the target is gone and not `added`."""
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
        if value is MISSING and not added:
            raise BindError(f"{target} is gone from the installed release")
        return owner, name, value

    def bound(self, patch: str, target: str) -> bool:
        """Whether the patch is on the target right now, read back from the target itself."""
        chain = self.chains.get(target)
        if chain is None or all(layer.patch != patch for layer in chain.layers):
            return False
        slot = self.places.slots.get(chain.key)
        return slot is not None and slot.current() is slot.written

    def lost_targets(self) -> dict[str, Lost]:
        """The entries of `lost_now` that are targets; aliases are left out."""
        targets = {chain.key: target for target, chain in self.chains.items()}
        return {targets[lost.slot.key]: lost for lost in self.places.lost_now() if lost.slot.key in targets}

    def is_back(self, owner: Any, name: str) -> bool:
        """Whether a name that somebody had replaced holds shim's or upstream's object again."""
        lost = self.places.lost.get((id(owner), name))
        return lost is not None and self.places.is_back(lost)

    def will_be_followed(self, lost: Lost) -> bool:
        """Whether the next transaction puts shim's object back, or into what somebody has put in its place."""
        if self.places.is_back(lost):
            return True
        slot, base = lost.slot, self._base_of(lost.slot)
        wanted = self.places.leads_to(base)
        found = [] if base is None else reached(slot.current(), slot.owner, slot.name, wanted, self.wrappers.is_ours)
        return any(held.owner is not None for held in found)

    def is_not_the_first(self, target: str, inner: Any) -> bool:
        """Whether another object stood on a target when shim first bound it. Of an import nothing else may tell."""
        return target in self.first and self.first[target] is not inner

    def put_there_since(self, owner: Any, name: str, value: Any) -> str:
        """What somebody has put in the place of shim's object, in words; "" if nobody did, or it is gone again."""
        lost = self.places.lost.get((id(owner), name))
        since = lost is not None and lost.partner is None and not self.places.is_back(lost)
        return describe(unwrap(value)) if since else ""

    def effect_of(self, lost: Lost) -> str:
        """Whether shim's function is called although somebody else's object stands on the name.

        ``called``: the object holds shim's function, and its code names it. ``kept``: it says that it does what the
        patch does (shim.compatible). ``unknown``: it holds the function where reading does not tell. ``replaced``: it
        does not hold the function, or an older one. ``released``: shim has taken it out, and nothing is bound.
        """
        chain, current = self.chains.get(lost.slot.target), lost.slot.current()
        if chain is None and lost.held:
            return "released"
        if chain is None or current is MISSING:
            return "replaced"
        top = unwrap(chain.top)
        slot = lost.slot
        found = reached(current, slot.owner, slot.name, lambda value: value is top, self.wrappers.is_ours)
        if any(held.certain for held in found):
            return "called"
        if slot.target in marks_of(current):
            return "kept"
        if found:
            return "called" if self.calls.saw(current, top) else "unknown"
        return "replaced"

    # Modules that run again, or whose import fails

    def renew(self, module: types.ModuleType) -> None:
        """Forget chains and places in a module whose code has run again, if it holds new objects there."""
        name = namespace_of(module)["__name__"]
        for target, chain in list(self.chains.items()):
            if split_target(target)[0] == name and not self._stands(chain):
                del self.chains[target]
        self.first = {t: first for t, first in self.first.items() if split_target(t)[0] != name}
        self.places.forget_what_was_replaced_in(module)

    def _stands(self, chain: Chain) -> bool:
        try:
            owner, _, value = self.resolve(chain.target)
        except BindError:
            return False
        return owner is chain.owner and unwrap(value) is unwrap(chain.top)

    def abandon(self, name: str) -> None:
        """Unbind everything in a module whose import fails: the module is about to leave sys.modules."""
        self.commit({t: chain.layers for t, chain in self.chains.items() if split_target(t)[0] != name})

    # Transactions

    def commit(self, wanted: Mapping[str, tuple[Layer, ...]], imported: Imported | None = None) -> list[Lost]:
        """Bring the chains of all loaded targets to `wanted`, all or nothing. Returns the names found lost.

        `wanted` maps targets to their layers, innermost first. A target that is not named loses all layers.
        `imported` limits the search for aliases of objects that a module has just defined. Everything new is built
        before the first write, every write is read back, and an exception undoes the writes in reverse.
        """
        places = self.places
        before = dict(self.chains), dict(places.slots), dict(places.lost)
        places.journal = []
        try:
            places.follow(self._base_of)
            for slot in places.regain():
                self.chains.pop(slot.target, None)  # the name may hold an older wrapper now
                self.found.drop(slot.target)
            self._renew_replaced()
            if imported is None:
                self._adopt_returned()
            changes = [
                self._build(chain, layers)
                for chain, layers in self._open({**dict.fromkeys(self.chains, ()), **wanted})
                if chain.layers != layers
            ]
            self._keep_pairs(changes)
            self._write_all(changes, imported)
            for _, after in changes:
                if after.layers:
                    self.chains[after.target] = after
                    self.wrappers.note(after)
                else:
                    self.chains.pop(after.target, None)
            halves = {key for lost in places.lost.values() if lost.partner for key in (lost.slot.key, lost.partner)}
            for chain, after in changes:
                if chain.layers and not after.layers and chain.key not in halves:
                    self.wrappers.retire(chain)
            if not self.chains:
                self.calls.forget()
        except BaseException:
            places.undo()
            self.chains, places.slots, places.lost = before
            raise
        finally:
            places.journal = []
        return [lost for key, lost in places.lost.items() if before[2].get(key) is not lost]

    def _adopt_returned(self) -> None:
        """Govern places that hold a retired wrapper again.

        A module imported while shim was bound took the wrapper. Then somebody patched the module, so revert() did not
        find the wrapper there, and later put the wrapper back. Costs nothing if no such wrapper is alive.
        """
        for owner, name, raw in find_aliases(self.wrappers.retired(self.chains.values())):
            key = (id(owner), name)
            if key not in self.places.slots and key not in self.places.lost:
                target, base = self.wrappers.origin(unwrap(raw))
                self.places.slots[key] = Slot(owner, name, rewrap(raw, unwrap(base)), raw, target)

    def _renew_replaced(self) -> None:
        """Drop chains whose object was replaced by a function that their patches go around: they are built above it."""
        for target, value in self.found.renewed.items():
            chain = self.chains.get(target)
            lost = None if chain is None else self.places.lost.get(chain.key)
            if lost is not None and lost.slot.current() is value:
                del self.chains[target]

    def _open(self, wanted: Mapping[str, tuple[Layer, ...]]) -> Iterator[tuple[Chain, tuple[Layer, ...]]]:
        """Each chain with its wanted layers. Loaded targets without a chain get a new one."""
        for target, layers in wanted.items():
            chain = self.chains.get(target)
            if chain is None and layers and self.loaded(split_target(target)[0]) is not None:
                owner, name, value = self.resolve(target, layers[0].added)
                base = self.wrappers.beneath(value)
                before = self.places.lost.pop((id(owner), name), None)
                known = self.places.slots.get((id(owner), name)) or (None if before is None else before.slot)
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
                if base is not MISSING and not layers[0].added and not around_it:
                    self.first.setdefault(target, unwrap(base))
            if chain is not None:
                yield chain, layers

    def _build(self, chain: Chain, layers: tuple[Layer, ...]) -> Change:
        """Let the factories build the new object of the target, from the inside out. Writes nothing."""
        from shim._engine.signatures import misfit  # loaded by now: see import_what_binding_needs

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
        # Asked before the write: once bound, a wrapper too is found by upstream's name. An added name is borrowed as
        # well, because its aliases have no object to go back to.
        borrowed = chain.base is MISSING or (inner is not unwrap(chain.base) and found_by_name(inner))
        return chain, replace(chain, layers=layers, top=top, borrowed=borrowed)

    def _keep_pairs(self, changes: Iterable[Change]) -> None:
        """Keep forward bound while a foreign object on backward keeps that one from being unbound, and vice versa.

        The foreign function still calls shim's function beneath it, so half a pair would compute wrong gradients. One
        that holds nothing of shim's was written for upstream's other half, and gets that back.
        """
        for chain, after in changes:
            other = {"forward": "backward", "backward": "forward"}.get(chain.name)
            partner = self.chains.get(f"{chain.target.rpartition('.')[0]}.{other}")
            if after.layers or partner is None or self.places.is_lost(chain.key):
                continue
            if self._is_followed(partner.key):  # the other function calls upstream's again
                continue
            lost = next((item for item in self.places.lost_now() if item.slot.key == partner.key), None)
            if lost is not None and self.effect_of(lost) != "replaced":
                why = f"stays bound, because {partner.name} was replaced"
                self.places.lose(self.places.slots[chain.key], why, partner.key)

    def _write_all(self, changes: Sequence[Change], imported: Imported | None) -> None:
        """Write targets and known places first, aliases second, so that a concurrent import takes no old object."""
        # Asked before the search: a module that finishes its import during the search may have been searched too early.
        overdue = self.modules.overdue()
        self.modules.looked_through(overdue)
        if changes:
            self.modules.note_unfinished()
        old: dict[int, Change] = {}
        near: list[Any] = []
        far: list[Any] = []
        for chain, after in changes:
            self.places.put(chain.owner, chain.name, chain, after)
            inner = unwrap(chain.top)
            # Constants have no identity of their own, so only callables have aliases.
            alone = chain.top is chain.base and after.layers and after.layers[0].alone
            if callable(inner) and not self._is_borrowed(chain) and not alone:
                old[id(inner)] = (chain, after)
                (near if imported is not None and self._is_new(chain, imported[0]) else far).append(inner)
                beneath = unwrap(chain.base)
                if not chain.layers and beneath is not inner and callable(beneath):
                    # Somebody has put shim's older object back. Aliases hold upstream's meanwhile.
                    old[id(beneath)] = (chain, after)
                    far.append(beneath)
        self._write_known(changes)
        self._write_followed(changes)
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

    def _write_followed(self, changes: Iterable[Change]) -> None:
        """Write to places inside of other objects that hold upstream's function, or an older one of shim's."""
        now = {**self.chains, **{after.target: after for _, after in changes}}
        for slot in list(self.places.slots.values()):
            chain = now.get(slot.target)
            if slot.within and chain is not None and unwrap(slot.written) is not unwrap(chain.top):
                self.places.put(slot.owner, slot.name, chain, chain)

    def _write_late(self, changes: Iterable[Change], overdue: set[str]) -> None:
        """Rebind aliases in modules that finished importing late, also for chains that do not change."""
        changed = {chain.target: (chain, after) for chain, after in changes}
        governed: dict[int, tuple[Any, Change]] = {}
        for target, chain in ({**self.chains, **{t: c for t, (c, _) in changed.items()}} if overdue else {}).items():
            before, after = changed.get(target, (chain, chain))
            slot, inner = self.places.slots.get(chain.key), unwrap(chain.base)
            # An inherited object belongs to the base class.
            own = self._is_followed(chain.key) if slot is None else slot.original is not MISSING
            if after.layers and callable(inner) and own and not after.borrowed and not after.layers[0].alone:
                governed[id(inner)] = inner, (before, after)
        for owner, name, raw in find_aliases([inner for inner, _ in governed.values()], overdue):
            self.places.put(owner, name, *governed[id(unwrap(raw))][1])

    def _base_of(self, slot: Slot) -> Any:
        """Upstream's function on the target of a slot. None where nothing is bound, or nothing was there before."""
        chain = self.chains.get(slot.target)
        base = None if chain is None or chain.base is MISSING else unwrap(chain.base)
        return base if callable(base) else None

    def _is_followed(self, key: Key) -> bool:
        """Whether shim governs places inside of the object that stands on a lost name."""
        lost = self.places.lost.get(key)
        return lost is not None and any(inner in self.places.slots for inner in lost.held)

    def _is_borrowed(self, chain: Chain) -> bool:
        """Whether `top` belongs to someone else: to a base class, or to the place a factory took it from."""
        slot = self.places.slots.get(chain.key)
        inherited = chain.top is chain.base and slot is not None and slot.original is MISSING
        return inherited or chain.borrowed

    def _is_new(self, chain: Chain, module: str) -> bool:
        """Whether the module that was just imported defined the object on the target."""
        made_in = getattr(unwrap(chain.top), "__module__", None)
        return not chain.layers and split_target(chain.target)[0] == module == made_in


def _upstreams(found: type, module: str, qualname: str) -> type:
    """The class that upstream defines, if somebody has put a subclass of it in its place."""
    for cls in found.__mro__:
        if cls.__module__ == module and cls.__qualname__ == qualname:
            return cls
    return found
