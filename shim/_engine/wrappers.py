"""The objects that shim has bound, and the objects before them."""

from __future__ import annotations

import types
import weakref
from typing import Any

from shim._engine.aliases import rewrap, unwrap
from shim._engine.chain import MISSING, Chain

__all__ = ["Wrappers"]


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
