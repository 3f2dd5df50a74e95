"""Open `with shim.patched()` blocks: which may be open at once, and what is in force again when one ends."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

from shim._errors import OptionError
from shim._tasks import current_task

if TYPE_CHECKING:
    from shim._planning.plan import Plan

__all__ = ["Context", "Contexts"]

REMEDY = "Remedy: let it end first, or use the same arguments in both, or call shim.apply() once for the whole process"


class Context:
    """One block: the plan it asks for, the plan it found in force, and the thread and task that began it."""

    def __init__(self) -> None:
        self.thread, self.task = threading.get_ident(), current_task()
        self.plan: Plan | None = None
        self.beneath: Plan | None = None

    def is_around(self, thread: int, task: Any) -> bool:
        """Whether what runs in `thread` and `task` runs within the block, or while whoever began it waits."""
        # Outside of tasks, the block is further down the stack of the thread. A task that is done was a fixture's.
        return self.thread == thread and (self.task is None or self.task is task or self.task.done())


class Contexts:
    """The open blocks, oldest first. Whoever calls holds the engine's lock.

    Patches are of the process, so blocks nest, but cannot differ from each other at the same time.
    """

    def __init__(self) -> None:
        self._open: list[Context] = []

    def enter(self, context: Context, wanted: Plan, in_force: Plan | None) -> None:
        """Open a block; OptionError where another thread or task has one open that asks for something else."""
        if not self._all_around() and not all(_same(wanted, other.plan) for other in self._open):
            raise OptionError(
                "shim.patched() cannot begin, because another thread or task is within a shim.patched() with other "
                f"arguments, and patches are of the whole process. {REMEDY}."
            )
        context.plan, context.beneath = wanted, in_force
        self._open.append(context)

    def refuse_from_outside(self, what: str) -> None:
        """OptionError where a block is open that whoever calls is not in: its end would undo the call."""
        if not self._all_around():
            raise OptionError(
                f"shim.{what}() cannot be called while another thread or task is within shim.patched(), because the "
                f"end of that undoes it. {REMEDY}."
            )

    def leave(self, context: Context) -> bool:
        """Close a block; whether what it found is to be in force again. If not, the block above it gives that back."""
        place = self._open.index(context) if context in self._open else None
        if place is None:
            return False
        del self._open[place]
        if place == len(self._open):
            return True
        self._open[place].beneath = context.beneath
        return False

    def _all_around(self) -> bool:
        here = threading.get_ident(), current_task()
        return all(context.is_around(*here) for context in self._open)


def _same(one: Plan | None, other: Plan | None) -> bool:
    if one is None or other is None:
        return one is other
    return one.options == other.options and one.decisions == other.decisions
