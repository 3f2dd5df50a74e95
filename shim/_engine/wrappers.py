"""What shim has ever put on a target, in force or retired, and what was there before it."""

from __future__ import annotations

import types
import weakref
from collections.abc import Iterable
from typing import Any

from shim._engine.aliases import rewrap, unwrap
from shim._engine.chain import MISSING, Chain

__all__ = ["Wrappers"]


class Wrappers:
    """Functions and classes of patches by identity. Kept weakly: one that nobody holds any more is forgotten.

    A wrapper outlives revert() where a module took it as its own, where somebody wrapped it, and in graphs of autograd.
    Wherever it turns up again, it is known for what it is, and not taken for a foreign object.
    """

    def __init__(self) -> None:
        self._before: weakref.WeakKeyDictionary[Any, tuple[str, Any]] = weakref.WeakKeyDictionary()
        self._added: weakref.WeakSet[Any] = weakref.WeakSet()  # what shim has put where nothing was

    def __len__(self) -> int:
        return len(self._before)

    def note(self, chain: Chain) -> None:
        """Remember what a chain has put on its target."""
        inner = unwrap(chain.top)
        if not _is_plain(inner):
            return
        if chain.base is MISSING:
            self._added.add(inner)
        elif inner is not unwrap(chain.base) and not chain.borrowed:
            self._before[inner] = chain.target, chain.base

    def beneath(self, value: Any) -> Any:
        """`value`, or where it is ours what was there before it."""
        inner = unwrap(value)
        if not _is_plain(inner):
            return value
        if inner in self._added:
            return None  # what upstream's guarded import of it would have left
        if inner not in self._before:
            return value
        base = self._before[inner][1]
        return base if type(base) is type(value) else rewrap(value, unwrap(base))

    def retired(self, in_force: Iterable[Chain]) -> list[Any]:
        """Those that stand on no target now."""
        tops = {id(unwrap(chain.top)) for chain in in_force}
        return [inner for inner in list(self._before) if id(inner) not in tops]

    def origin(self, inner: Any) -> tuple[str, Any]:
        """The target that it stood on, and what was there before."""
        return self._before[inner]


def _is_plain(inner: Any) -> bool:
    # Asked of type(): a proxy passes for the function it wraps, and equals it too.
    return issubclass(type(inner), (types.FunctionType, type))
