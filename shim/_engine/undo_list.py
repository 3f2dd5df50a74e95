"""The writes of a transaction, and how they are taken back if one of them fails."""

from __future__ import annotations

import types
from collections.abc import Iterable
from typing import Any

from shim._engine.aliases import dictionary_of, namespace_of
from shim._engine.chain import MISSING, read_name
from shim._record import record

__all__ = ["UndoList", "Write"]


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


class UndoList:
    """Writes that are made one after the other, all or none."""

    def __init__(self, writes: Iterable[Write]) -> None:
        self._writes = tuple(writes)
        self._begun = 0
        self._done = False

    def perform(self) -> None:
        for number, write in enumerate(self._writes):
            self._begun = number + 1
            _write(write.owner, write.name, write.after)
        self._done = True

    def failing(self) -> Write | None:
        """The write at which perform() stopped, or the first that does not read back. None if there is none."""
        if not self._done:
            return self._writes[self._begun - 1] if self._begun else None
        return next((write for write in self._writes if write.label and write.current() is not write.after), None)

    def undo(self) -> None:
        """Take back what was made, the last write first."""
        for write in reversed(self._writes[: self._begun]):
            if write.current() is not write.before:
                _write(write.owner, write.name, write.before)


def _write(owner: Any, name: str, value: Any) -> None:
    """Write a value to a name, or take the name away (MISSING)."""
    if issubclass(type(owner), types.ModuleType):  # past a __setattr__ of the module's own class
        if value is MISSING:
            dictionary_of(owner).pop(name, None)
        else:
            dictionary_of(owner)[name] = value
    elif value is not MISSING:
        setattr(owner, name, value)
    elif name in namespace_of(owner) if issubclass(type(owner), type) else read_name(owner, name) is not MISSING:
        delattr(owner, name)
