"""Locks that a forked process gets anew, as the thread that holds one at the fork is not in it; tasks of asyncio."""

from __future__ import annotations

import os
import sys
import threading
import weakref
from collections.abc import Callable
from typing import Any

__all__ = ["Block", "current_task", "renew_in_children"]

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


class Block:
    """A `with shim.patched()` that runs: the thread and the task that entered it. over: set by its end."""

    def __init__(self) -> None:
        task = current_task()
        self.thread = threading.get_ident()
        # Weakly: a task that nobody runs any more ends its block when it is collected.
        self.task = None if task is None else weakref.ref(task)
        self.over = False

    def is_around(self) -> bool:
        """Whether the caller runs inside the block, or while the task that entered it waits."""
        # Outside of tasks, the block is further down this thread's stack. A finished task belonged to a test fixture.
        if self.task is None or self.thread != threading.get_ident():
            return self.thread == threading.get_ident()
        entered = self.task()
        return entered is None or entered is current_task() or bool(entered.done())
