"""Step 4, bind: ordered chains of patches per target, written in one transaction, every write in a journal."""

from __future__ import annotations

import importlib.util
import inspect
import sys
import types
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from shim._aliases import find_aliases, namespace_of, rewrap, unwrap
from shim._errors import BindError
from shim._fingerprint import split_target
from shim._foreign import describe

__all__ = ["MISSING", "Binder", "Chain", "Layer", "Lost", "Slot"]

Factory = Callable[[Any], Any]
LAZY: type = importlib.util._LazyModule  # type: ignore[attr-defined]


class _Missing:
    def __repr__(self) -> str:
        return "MISSING"


MISSING = _Missing()


@dataclass(frozen=True)
class Layer:
    """One patch on one target: `factory(inner)` returns what takes the place of `inner`."""

    patch: str
    target: str
    factory: Factory = field(compare=False)
    revision: int = 0  # grows when variant or options of the patch change, so that the chain is built anew


@dataclass(frozen=True)
class Slot:
    """One name shim wrote: what it held before (MISSING: nothing of its own), and what shim put there last."""

    owner: Any
    name: str
    original: Any
    written: Any
    target: str

    def current(self) -> Any:
        return namespace_of(self.owner).get(self.name, MISSING)

    def __str__(self) -> str:
        owner = self.owner
        if isinstance(owner, type):
            return f"{owner.__module__}.{owner.__qualname__}.{self.name}"
        return f"{namespace_of(owner)['__name__']}.{self.name}"


@dataclass(frozen=True)
class Lost:
    """A name shim no longer governs, mostly because somebody else replaced it: left alone, never taken back."""

    place: str
    target: str
    why: str

    def __str__(self) -> str:
        return f"{self.place} {self.why}"


@dataclass(frozen=True)
class Chain:
    """The patches on one target, in order, above the object that was there before."""

    target: str
    owner: Any
    name: str
    base: Any  # as in the owner's dictionary, or as inherited
    top: Any  # what stands on the target now, as in the dictionary
    layers: tuple[Layer, ...] = ()


def _write(owner: Any, name: str, value: Any) -> None:
    if isinstance(owner, type):
        if value is MISSING:
            delattr(owner, name)
        else:
            setattr(owner, name, value)
    else:
        namespace = object.__getattribute__(owner, "__dict__")
        if value is MISSING:
            del namespace[name]
        else:
            namespace[name] = value


def _replaced_by(value: Any) -> str:
    return "was removed" if value is MISSING else f"was replaced by {describe(unwrap(value))}"


def _misfit(new: Any, old: Any) -> str:
    """Why calls that fit `old` may not fit `new`; "" where they do. A backport may add optional parameters."""
    try:
        before, after = inspect.signature(old).parameters, inspect.signature(new).parameters
    except (TypeError, ValueError):
        return ""  # built-in functions have none
    positional = [name for name, p in before.items() if p.kind <= p.POSITIONAL_OR_KEYWORD]
    if list(after)[: len(positional)] != positional or not set(before) <= set(after):
        return f"its parameters are {', '.join(after)}; upstream's are {', '.join(before)}"
    for name, parameter in after.items():
        if name not in before:
            if parameter.default is parameter.empty:
                return f"parameter {name} is added without a default"
        # By identity: a default may be a tensor, which has no plain equality.
        elif parameter.kind is not before[name].kind or parameter.default is not before[name].default:
            return f"parameter {name} is not as upstream has it"
    return ""


Change = tuple[Chain, tuple[Layer, ...], Any]  # a chain, its layers to be, and what will stand on the target


class Binder:
    """Owns the chains and the journal of one process. Not thread-safe by itself: the engine holds a lock."""

    def __init__(self) -> None:
        self.chains: dict[str, Chain] = {}
        self.slots: dict[tuple[int, str], Slot] = {}
        self.lost: dict[tuple[int, str], tuple[Any, Lost]] = {}  # with the owner, so that its id() stays taken
        self.executed: set[str] = set()  # modules whose code has run to the end, though their import is not over
        # Wrappers of ours that are off duty but may still stand somewhere, with what they stood above.
        self._retired: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()

    # What is there

    def loaded(self, name: str) -> types.ModuleType | None:
        """The module, if its code has run to the end; None for absent, lazy and half imported ones."""
        module = sys.modules.get(name)
        # type() of the object, never an attribute of it: that would load a lazy module.
        if not issubclass(type(module), types.ModuleType) or issubclass(type(module), LAZY):
            return None
        initialising = getattr(namespace_of(module).get("__spec__"), "_initializing", False)
        return None if initialising and name not in self.executed else module

    def resolve(self, target: str) -> tuple[Any, str, Any]:
        """Owner, name and value of a target whose module is loaded; BindError where it is gone."""
        module_name, qualname = split_target(target)
        owner: Any = self.loaded(module_name)
        if owner is None:
            raise BindError(f"{module_name} is not imported")
        *path, name = qualname.split(".")
        for part in path:
            owner = namespace_of(owner).get(part, MISSING)
            if not isinstance(owner, type):
                raise BindError(f"{target} is gone: {part} is not a class of the installed release")
        value = namespace_of(owner).get(name, MISSING)
        if value is MISSING and isinstance(owner, type):
            value = next((namespace_of(c)[name] for c in owner.__mro__[1:] if name in namespace_of(c)), MISSING)
        if value is MISSING:
            raise BindError(f"{target} is gone from the installed release")
        return owner, name, value

    def beneath(self, value: Any) -> Any:
        """`value`, or what it stood above where it is an off-duty wrapper of ours that somebody put back."""
        inner = unwrap(value)
        if isinstance(inner, types.FunctionType) and inner in self._retired:
            return rewrap(value, self._retired[inner])
        return value

    def forget_module(self, module: types.ModuleType) -> None:
        """Let go of a module whose code is about to run again: its names will hold new objects."""
        for target in [t for t in self.chains if split_target(t)[0] == namespace_of(module)["__name__"]]:
            del self.chains[target]
        self.slots = {key: slot for key, slot in self.slots.items() if slot.owner is not module}

    # Transactions

    def commit(self, wanted: Mapping[str, tuple[Layer, ...]], modules: Iterable[str] | None = None) -> list[Lost]:
        """Make the chains what `wanted` says, for every target that is loaded; all of it or nothing.

        `wanted` maps targets to their layers, innermost first; a target that is not named loses all layers.
        `modules` limits the search for aliases. Everything new is built before anything is written, every write is
        read back, and an exception undoes the writes in reverse. Returns what was found lost.
        """
        changes = [
            (chain, layers, self._build(chain, layers))
            for chain, layers in self._open({**dict.fromkeys(self.chains, ()), **wanted})
            if chain.layers != layers
        ]
        lost_before = len(self.lost)
        self._keep_pairs(changes)
        slots_before = dict(self.slots)
        journal: list[tuple[Any, str, Any]] = []
        try:
            self._write_all(changes, journal, modules)
            self._read_back(journal, {chain.target: layers for chain, layers, _ in changes})
        except BaseException:
            for owner, name, value in reversed(journal):
                _write(owner, name, value)
            self.slots = slots_before
            raise
        for chain, layers, top in changes:
            self._settle(chain, layers, top)
        return [lost for _, lost in list(self.lost.values())[lost_before:]]

    def _open(self, wanted: Mapping[str, tuple[Layer, ...]]) -> Iterator[tuple[Chain, tuple[Layer, ...]]]:
        for target, layers in wanted.items():
            chain = self.chains.get(target)
            if chain is None and layers and self.loaded(split_target(target)[0]) is not None:
                owner, name, value = self.resolve(target)
                chain = Chain(target, owner, name, self.beneath(value), value)
            if chain is not None:
                yield chain, layers

    def _build(self, chain: Chain, layers: tuple[Layer, ...]) -> Any:
        inner = unwrap(chain.base)
        for layer in layers:
            try:
                outer = layer.factory(inner)
            except Exception as error:
                message = f"{layer.target}: {type(error).__name__}: {error}"
                raise BindError(message, layer.patch) from error
            problem = _misfit(outer, inner) if callable(inner) and callable(outer) else ""
            if problem:
                raise BindError(f"{layer.target} would no longer take the calls it took: {problem}", layer.patch)
            inner = outer
        return rewrap(chain.base, inner) if layers else chain.base

    def _keep_pairs(self, changes: Iterable[Change]) -> None:
        """Leave forward in place where backward cannot be taken off because somebody stands on it, and vice versa.

        The foreign function still calls ours beneath it, so a pair torn apart would compute wrong gradients.
        """
        for chain, layers, _ in changes:
            other = {"forward": "backward", "backward": "forward"}.get(chain.name)
            partner = self.chains.get(f"{chain.target.rpartition('.')[0]}.{other}")
            if not layers and partner is not None and self._is_lost(partner) and not self._is_lost(chain):
                self._lose(chain.owner, chain.name, chain.target, f"stays bound, because {partner.name} was replaced")

    def _is_lost(self, chain: Chain) -> bool:
        slot = self.slots.get((id(chain.owner), chain.name))
        return (id(chain.owner), chain.name) in self.lost or (slot is not None and slot.current() is not slot.written)

    def _lose(self, owner: Any, name: str, target: str, why: str) -> None:
        place = str(Slot(owner, name, None, None, target))
        self.lost[id(owner), name] = (owner, Lost(place, target, why))
        self.slots.pop((id(owner), name), None)

    def _write_all(self, changes: Iterable[Change], journal: list[Any], modules: Iterable[str] | None) -> None:
        """First the targets and all places known, then the aliases, so that an import meanwhile takes no old one."""
        old: dict[int, tuple[Chain, Any]] = {}
        for chain, _, top in changes:
            self._put(chain.owner, chain.name, chain, top, journal)
            inner = unwrap(chain.top)
            # Nothing else is known by identity, and what a subclass inherits is not an alias of the subclass's name.
            inherited = chain.top is chain.base and self._inherited(chain)
            if isinstance(inner, (types.FunctionType, type)) and not inherited:
                old[id(inner)] = (chain, top)
        by_target = {chain.target: (chain, top) for chain, _, top in changes}
        for slot in list(self.slots.values()):
            chain_top = by_target.get(slot.target)
            if chain_top is not None:
                chain, top = chain_top
                # After a reload, older places keep the older wrapper, but give it up in the end.
                if top is chain.base or unwrap(slot.written) is unwrap(chain.top):
                    self._put(slot.owner, slot.name, chain, top, journal)
            elif slot.target not in self.chains:
                self._restore(slot, journal)
        for owner, name, raw in find_aliases([unwrap(c.top) for c, _ in old.values()], modules):
            chain, top = old[id(unwrap(raw))]
            self._put(owner, name, chain, top, journal)

    def _inherited(self, chain: Chain) -> bool:
        slot = self.slots.get((id(chain.owner), chain.name))
        return slot is not None and slot.original is MISSING

    def _put(self, owner: Any, name: str, chain: Chain, top: Any, journal: list[Any]) -> None:
        """Write `top` to one place (the original, where `top` is the base), unless somebody else holds it now."""
        key = (id(owner), name)
        current = namespace_of(owner).get(name, MISSING)
        slot = self.slots.get(key)
        if key in self.lost:
            if self.beneath(current) is current and unwrap(current) is not unwrap(chain.base):
                return
            del self.lost[key]  # whoever replaced it has put ours or upstream's back
        if slot is not None and current is not slot.written:
            self._lose(owner, name, chain.target, _replaced_by(current))
            return
        if slot is None:
            # An alias taken while shim was bound would hold upstream's object, had shim never been there.
            upstream = current is MISSING or unwrap(current) is unwrap(chain.base)
            original = current if upstream else rewrap(current, unwrap(chain.base))
            slot = Slot(owner, name, original, current, chain.target)
        if top is chain.base:
            self.slots[key] = slot
            self._restore(slot, journal)
            return
        value = rewrap(chain.base if current is MISSING else current, unwrap(top))
        journal.append((owner, name, current))
        _write(owner, name, value)
        self.slots[key] = replace(slot, written=value)

    def _restore(self, slot: Slot, journal: list[Any]) -> None:
        current = slot.current()
        self.slots.pop((id(slot.owner), slot.name), None)
        if current is slot.written:
            if current is not slot.original:
                journal.append((slot.owner, slot.name, current))
                _write(slot.owner, slot.name, slot.original)
        else:
            self._lose(slot.owner, slot.name, slot.target, _replaced_by(current))

    def _read_back(self, journal: Iterable[tuple[Any, str, Any]], layers: Mapping[str, tuple[Layer, ...]]) -> None:
        for owner, name, _ in journal:
            slot = self.slots.get((id(owner), name))
            if slot is not None and slot.current() is not slot.written:
                outermost = [layer.patch for layer in layers.get(slot.target, ())][-1:]
                raise BindError(f"{slot.target} does not read back at {slot}", *outermost)

    def _settle(self, chain: Chain, layers: tuple[Layer, ...], top: Any) -> None:
        """Record what the transaction made of a chain."""
        for value in (chain.top, top):
            inner = unwrap(value)
            if isinstance(inner, types.FunctionType) and inner is not unwrap(chain.base):
                self._retired[inner] = unwrap(chain.base)
        if layers:
            if isinstance(unwrap(top), types.FunctionType):
                self._retired.pop(unwrap(top), None)
            self.chains[chain.target] = replace(chain, layers=layers, top=top)
        else:
            self.chains.pop(chain.target, None)

    # Reading

    def lost_now(self) -> list[Lost]:
        """What others have replaced, including what no transaction has noticed yet; changes nothing."""
        fresh = [
            Lost(str(slot), slot.target, _replaced_by(slot.current()))
            for slot in self.slots.values()
            if slot.current() is not slot.written
        ]
        return [*(lost for _, lost in self.lost.values()), *fresh]

    def is_target_place(self, lost: Lost) -> bool:
        """Whether what was lost is the target itself, not one of its aliases."""
        return lost.place == lost.target.replace(":", ".")

    def bound(self, patch: str, target: str) -> bool:
        """Whether the patch is on the target right now, read back from the target itself."""
        chain = self.chains.get(target)
        if chain is None or all(layer.patch != patch for layer in chain.layers):
            return False
        slot = self.slots.get((id(chain.owner), chain.name))
        return slot is not None and slot.current() is slot.written
