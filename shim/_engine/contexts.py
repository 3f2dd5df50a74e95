"""Open `with shim.patched()` blocks: which blocks may overlap, and which plan each end restores."""

from __future__ import annotations

import copy
import threading
import weakref
from typing import TYPE_CHECKING, Any

from shim._errors import OptionError
from shim._tasks import current_task

if TYPE_CHECKING:
    from shim._planning.plan import Plan

__all__ = ["Block", "Context", "Contexts"]

REMEDY = "Remedy: let it end first, or use the same arguments in both, or call shim.apply() once for the whole process"


class Context:
    """What a block holds while it runs.

    over: set by its end. An interrupted block is also over, once its Context is no longer referenced.
    """

    def __init__(self) -> None:
        self.over = False


class Block:
    """An open block: its plan, the plan in force before it, and the thread and task that entered it."""

    def __init__(self, context: Context, plan: Plan, beneath: Plan | None) -> None:
        self._context = weakref.ref(context)
        self.thread = threading.get_ident()
        task = current_task()
        # Weakly: a task that is no longer run holds its block, which is over once the task is gone.
        self._task = None if task is None else weakref.ref(task)
        self.plan, self.beneath = plan, beneath

    def above(self, beneath: Plan | None) -> Block:
        """The same block, which restores another plan."""
        copied = copy.copy(self)
        copied.beneath = beneath
        return copied

    def renewed(self, old: Plan, new: Plan) -> Block:
        """The same block with a plan that was made anew in the place of the old one."""
        copied = copy.copy(self)
        copied.plan = new if _of_one(self.plan, old) else self.plan
        copied.beneath = new if _of_one(self.beneath, old) else self.beneath
        return copied

    @property
    def is_over(self) -> bool:
        context = self._context()
        return context is None or context.over

    def is_around(self, thread: int, task: Any) -> bool:
        """Whether code in `thread` and `task` runs inside the block, or while the task that entered it waits."""
        # Outside of tasks, the block is further down this thread's stack. A finished task belonged to a test fixture.
        if self.thread != thread or self._task is None:
            return self.thread == thread
        entered = self._task()
        return entered is None or entered is task or bool(entered.done())


class Contexts:
    """The open blocks, oldest first: `open` is replaced as a whole. Callers hold the engine's lock.

    Patches belong to the process. So blocks may nest, but blocks of different threads or tasks must ask for the same.
    """

    def __init__(self) -> None:
        self.open: tuple[Block, ...] = ()

    def entered(self, context: Context, wanted: Plan, in_force: Plan | None) -> tuple[Block, ...]:
        """The open blocks with one more. OptionError if another thread or task has one with another plan."""
        if not self._all_around() and not all(_same(wanted, other.plan) for other in self.open):
            raise OptionError(
                "shim.patched() cannot begin, because another thread or task is within a shim.patched() with other "
                f"arguments, and patches hold for the whole process. {REMEDY}."
            )
        return (*self.open, Block(context, wanted, in_force))

    def refuse_from_outside(self, what: str) -> None:
        """OptionError if a block is open that the caller is not inside: the end of the block would undo the call."""
        if not self._all_around():
            raise OptionError(
                f"shim.{what}() cannot be called while another thread or task is within shim.patched(), because the "
                f"end of that block would undo the call. {REMEDY}."
            )

    def over(self) -> Block | None:
        """A block that has ended and is still in the list, the newest first."""
        return next((block for block in reversed(self.open) if block.is_over), None)

    def without(self, block: Block) -> tuple[tuple[Block, ...], bool]:
        """The open blocks without one, and whether its earlier plan returns now. If not, the next block restores it."""
        place = self.open.index(block)
        older, newer = self.open[:place], self.open[place + 1 :]
        if not newer:
            return older, True
        return (*older, newer[0].above(block.beneath), *newer[1:]), False

    def keep_thread(self, thread: int) -> None:
        """Forget the blocks of other threads, none of which is in a process that was forked."""
        self.open = tuple(block for block in self.open if block.thread == thread)

    def renewed(self, old: Plan, new: Plan) -> tuple[Block, ...]:
        """The open blocks with a plan that was made anew in the place of the old one."""
        return tuple(block.renewed(old, new) for block in self.open)

    def _all_around(self) -> bool:
        here = threading.get_ident(), current_task()
        return all(context.is_around(*here) for context in self.open)


def _of_one(plan: Plan | None, other: Plan) -> bool:
    """Whether two plans are one, apart from what conflicts make of it."""
    return plan is not None and plan.environment is other.environment


def _same(one: Plan | None, other: Plan | None) -> bool:
    if one is None or other is None:
        return one is other
    return one.options == other.options and one.decisions == other.decisions
