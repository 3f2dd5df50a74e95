"""Locks that a forked process gets anew, as the thread that holds one at the fork is not in it; the task of asyncio."""

from __future__ import annotations

import os
import sys
import weakref
from collections.abc import Callable
from typing import Any

__all__ = ["current_task", "renew_in_children"]

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


def current_task() -> Any:
    """The task of asyncio that the caller runs in, or None. Does not import asyncio."""
    asyncio = sys.modules.get("asyncio")
    try:
        return asyncio.current_task() if asyncio is not None else None
    except RuntimeError:  # no loop is running in this thread
        return None
