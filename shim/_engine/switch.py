"""Many writes in one step: no signal handler, other thread, fork or interrupt comes between two of them.

The interpreter runs signal handlers, lets other threads run and collects garbage between instructions of Python, and
not within a call of a function in C. So all writes of a transaction are made ready as such calls, and one call in C
makes them all. An interrupted call has changed nothing, or everything.
"""

from __future__ import annotations

import functools
import gc
import operator
import types
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from shim._engine.aliases import dictionary_of, namespace_of
from shim._engine.chain import MISSING, read_name
from shim._record import record

__all__ = ["Switch", "Write"]

_Step = Callable[[], object]


@record
class Write:
    """One name of a module or class, or one attribute of another object: what it holds before and after.

    label: what an error says of it.    patch: whose error that is.
    """

    owner: Any
    name: str
    before: Any
    after: Any
    label: str = ""
    patch: str | None = None

    def current(self) -> Any:
        return read_name(self.owner, self.name)


def step_of(owner: Any, name: str, value: Any) -> _Step:
    """The call that writes a value to a name, or takes the name away (MISSING). In C, but for metaclasses in Python."""
    if issubclass(type(owner), types.ModuleType):
        namespace = dictionary_of(owner)
        if value is MISSING:
            return functools.partial(dict.pop, namespace, name, None)
        return functools.partial(dict.__setitem__, namespace, name, value)
    if value is not MISSING:
        return functools.partial(setattr, owner, name, value)
    there = name in namespace_of(owner) if issubclass(type(owner), type) else read_name(owner, name) is not MISSING
    return functools.partial(delattr, owner, name) if there else functools.partial(bool)


class Switch:
    """Writes that are made together, and taken back together if one of them fails.

    A write may fail, or be interrupted, only if a class has a metaclass with a __setattr__ in Python.
    """

    def __init__(self, writes: Iterable[Write]) -> None:
        self.writes = tuple(writes)
        self._steps: tuple[_Step, ...] = ()
        self._left: Iterator[_Step] = iter(())
        self._collects = False

    def perform(self) -> None:
        """Make all writes. After an exception, undo() is due."""
        steps: list[_Step] = [step_of(write.owner, write.name, write.after) for write in self.writes]
        self._collects = gc.isenabled()
        if self._collects:  # a finalizer is also Python, and calls in C may collect garbage up to Python 3.11
            steps = [gc.disable, *steps, gc.enable]
        self._steps = tuple(steps)
        self._left = iter(self._steps)
        deque(map(_call, self._left), maxlen=0)

    def _made(self) -> tuple[Write, ...]:
        """The writes that were made, the one that failed included."""
        count = len(self._steps) - operator.length_hint(self._left) - (1 if self._collects else 0)
        return self.writes[: max(count, 0)]

    def failing(self) -> Write | None:
        """The write at which perform() stopped, or the first that does not read back. None if there is none."""
        made = self._made()
        if len(made) < len(self.writes) or operator.length_hint(self._left):
            return made[-1] if made else None
        return next((write for write in made if write.label and write.current() is not write.after), None)

    def undo(self) -> None:
        """Take back what was made, the last write first, in one step. May be called again if it was interrupted."""
        back = [
            step_of(write.owner, write.name, write.before)
            for write in reversed(self._made())
            if write.current() is not write.before
        ]
        deque(map(_call, iter(back)), maxlen=0)
        if self._collects:
            gc.enable()


_call: Callable[[_Step], object] = operator.methodcaller("__call__")
