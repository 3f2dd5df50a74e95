"""The objects that shim has bound, in force or retired, and the objects before them."""

from __future__ import annotations

import types
import weakref
from collections.abc import Iterable
from typing import Any

from shim._engine.aliases import rewrap, unwrap
from shim._engine.chain import MISSING, Chain
from shim._engine.retired import Retired

__all__ = ["Wrappers"]


class Wrappers:
    """Functions and classes of patches by identity, as weak references: an unused wrapper is forgotten.

    A wrapper may outlive revert(): a module took it, somebody wrapped it, or a graph of autograd references it. If the
    wrapper appears on a target again, shim recognises it and does not call it foreign.
    """

    def __init__(self) -> None:
        self._before: weakref.WeakKeyDictionary[Any, tuple[str, Any]] = weakref.WeakKeyDictionary()
        self._added: weakref.WeakSet[Any] = weakref.WeakSet()  # objects under added names
        self._inert = Retired()

    def __len__(self) -> int:
        return len(self._before)

    def note(self, chain: Chain) -> None:
        """Remember the object that a chain puts on its target, which is in force from now on."""
        inner = unwrap(chain.top)
        self._inert.revive(inner)
        if not _is_plain(inner):
            return
        if chain.base is MISSING:
            self._added.add(inner)
        elif inner is not unwrap(chain.base) and not chain.borrowed:
            self._before[inner] = chain.target, chain.base

    def retire(self, chain: Chain) -> None:
        """Let the objects that stood on the target of a chain, which has ended, do what the object beneath them does.

        Who kept one of them may put it on a name again.
        """
        if chain.borrowed or chain.base is MISSING:
            return  # it is not shim's own, or upstream has nothing there
        self._inert.retire(unwrap(chain.top), unwrap(chain.base))
        for inner, (target, base) in list(self._before.items()):
            if target == chain.target:
                self._inert.retire(inner, unwrap(base))

    def inert(self, target: str) -> list[Any]:
        """The functions of shim's that stood on a target and do by now what upstream's does."""
        return [inner for inner, (of, _) in list(self._before.items()) if of == target and inner in self._inert]

    def beneath(self, value: Any) -> Any:
        """The object beneath `value` if `value` is shim's, else `value`."""
        inner = unwrap(value)
        if not _is_plain(inner):
            return value
        if inner in self._added:
            return None  # upstream's guarded import of a missing name leaves None
        if inner not in self._before:
            return value
        base = self._before[inner][1]
        return base if type(base) is type(value) else rewrap(value, unwrap(base))

    def is_ours(self, value: Any) -> bool:
        """Whether shim made the object."""
        return self.beneath(value) is not value

    def retired(self, in_force: Iterable[Chain]) -> list[Any]:
        """Wrappers that stand on no target now."""
        tops = {id(unwrap(chain.top)) for chain in in_force}
        return [inner for inner in list(self._before) if id(inner) not in tops]

    def origin(self, inner: Any) -> tuple[str, Any]:
        """The target a wrapper stood on, and the object before it."""
        return self._before[inner]


def _is_plain(inner: Any) -> bool:
    # type(), because isinstance accepts a proxy of a function, which also equals the function.
    return issubclass(type(inner), (types.FunctionType, type))
