"""The objects that shim has bound, in force or retired, and the objects before them."""

from __future__ import annotations

import types
import weakref
from collections.abc import Iterable, Iterator
from typing import Any

from shim._engine.aliases import rewrap, unwrap
from shim._engine.chain import MISSING, Chain
from shim._engine.retired import Retired, can_pass_on
from shim._engine.switch import Write

__all__ = ["Wrappers"]


class Wrappers:
    """Functions and classes of patches by identity, as weak references: an unused wrapper is forgotten.

    A wrapper may outlive revert(): a module took it, other code wrapped it, or an autograd graph references it. If the
    wrapper appears on a target again, shim recognises it and does not call it foreign.
    """

    def __init__(self) -> None:
        self.before: weakref.WeakKeyDictionary[Any, tuple[str, Any]] = weakref.WeakKeyDictionary()
        self.added: weakref.WeakSet[Any] = weakref.WeakSet()  # objects under added names
        self._inert = Retired()

    def __len__(self) -> int:
        return len(self.before)

    def draft(self) -> Wrappers:
        """A copy to try a transaction on."""
        copy = Wrappers()
        copy.before, copy.added, copy._inert = self.before.copy(), self.added.copy(), self._inert
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

    def reviving(self, tops: Iterable[Any]) -> Iterator[Write]:
        """What gives objects that are in force from now on their own code back."""
        for inner in tops:
            yield from self._inert.reviving(inner)

    def can_retire(self, chain: Chain) -> bool:
        """Whether the object on the target of a chain can do what the object beneath it does, once the chain has ended.

        Not one that is not shim's own, or without one of upstream's, nor a class or a callable object.
        """
        return not chain.borrowed and chain.base is not MISSING and can_pass_on(unwrap(chain.top), unwrap(chain.base))

    def retiring(self, ended: Iterable[Chain], tops: Iterable[Any]) -> Iterator[Write]:
        """What lets the objects on the targets of chains that have ended do what the object beneath them does.

        Who kept one of them may put it on a name again.    tops: what is in force from now on.
        """
        kept = {id(inner) for inner in tops}
        for chain in ended:
            if chain.borrowed or chain.base is MISSING:
                continue  # it is not shim's own, or upstream has nothing there
            of_target = [(inner, base) for inner, (target, base) in self.before.items() if target == chain.target]
            for inner, base in [(unwrap(chain.top), chain.base), *of_target]:
                if id(inner) not in kept:
                    kept.add(id(inner))
                    yield from self._inert.retiring(inner, unwrap(base))

    def inert(self, target: str) -> list[Any]:
        """The functions of shim's that stood on a target and do by now what upstream's does."""
        return [inner for inner, (of, _) in list(self.before.items()) if of == target and inner in self._inert]

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

    def retired(self, in_force: Iterable[Chain]) -> list[Any]:
        """Wrappers that stand on no target now."""
        tops = {id(unwrap(chain.top)) for chain in in_force}
        return [inner for inner in list(self.before) if id(inner) not in tops]

    def origin(self, inner: Any) -> tuple[str, Any]:
        """The target a wrapper stood on, and the object before it."""
        return self.before[inner]


def _is_plain(inner: Any) -> bool:
    # type(), because isinstance accepts a proxy of a function, which also equals the function.
    return issubclass(type(inner), (types.FunctionType, type))
