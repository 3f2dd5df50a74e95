"""What shim knows about the targets of a process: chains, the places they stand on, and what others have put there."""

from __future__ import annotations

import copy
import types
from collections.abc import Container
from typing import Any, TypeVar

from shim._compatible import marks_of
from shim._engine.aliases import namespace_of, unwrap
from shim._engine.chain import MISSING, Chain, Held, Key, Replaced, Slot
from shim._engine.foreign import describe
from shim._engine.modules import Modules
from shim._engine.places import Places
from shim._engine.reach import callable_paths
from shim._engine.replacements import Around, Question
from shim._engine.wrappers import Wrappers
from shim._errors import BindError
from shim._record import record
from shim._releases.fingerprint import split_target

__all__ = ["Findings", "Records", "Wrapped"]

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
        self.known_ways: dict[str, Any] = {}  # name -> upstream's own function there: see ways.py

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
