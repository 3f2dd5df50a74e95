"""Open `with shim.patched()` blocks: which blocks may overlap, and which plan each end restores."""

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
    """One block: its plan, the plan in force before it, and the thread and task that entered it."""

    def __init__(self) -> None:
        self.thread, self.task = threading.get_ident(), current_task()
        self.plan: Plan | None = None
        self.beneath: Plan | None = None

    def is_around(self, thread: int, task: Any) -> bool:
        """Whether code in `thread` and `task` runs inside the block, or while the task that entered it waits."""
        # Outside of tasks, the block is further down this thread's stack. A finished task belonged to a test fixture.
        return self.thread == thread and (self.task is None or self.task is task or self.task.done())


class Contexts:
    """The open blocks, oldest first. Callers hold the engine's lock.

    Patches belong to the process. So blocks may nest, but blocks of different threads or tasks must ask for the same.
    """

    def __init__(self) -> None:
        self._open: list[Context] = []

    def enter(self, context: Context, wanted: Plan, in_force: Plan | None) -> None:
        """Open a block. OptionError if another thread or task has an open block with another plan."""
        if not self._all_around() and not all(_same(wanted, other.plan) for other in self._open):
            raise OptionError(
                "shim.patched() cannot begin, because another thread or task is within a shim.patched() with other "
                f"arguments, and patches are of the whole process. {REMEDY}."
            )
        context.plan, context.beneath = wanted, in_force
        self._open.append(context)

    def refuse_from_outside(self, what: str) -> None:
        """OptionError if a block is open that the caller is not inside: the end of the block would undo the call."""
        if not self._all_around():
            raise OptionError(
                f"shim.{what}() cannot be called while another thread or task is within shim.patched(), because the "
                f"end of that undoes it. {REMEDY}."
            )

    def leave(self, context: Context) -> bool:
        """Close a block. Returns whether its earlier plan returns now; if not, the next block restores that plan."""
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
