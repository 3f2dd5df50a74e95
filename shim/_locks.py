"""Locks that a forked process gets anew: the thread that holds one at the fork is not in it, and would never let go."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable
from typing import Any

__all__ = ["renew_in_children"]

_HELD: list[tuple[Callable[[], Any], str, Callable[[], object]]] = []


def renew_in_children(holder: Any, name: str, make: Callable[[], object]) -> None:
    """In each process that is forked, set ``holder.name`` to a new lock, which `make` makes.

    holder: a module, or an object, which is not kept alive.
    """
    _HELD[:] = [held for held in _HELD if held[0]() is not None]
    _HELD.append((weakref.ref(holder), name, make))


def _renew() -> None:
    for holder, name, make in _HELD:
        found = holder()
        if found is not None:
            setattr(found, name, make())


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_renew)
