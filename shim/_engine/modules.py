"""How far the import of a module has come, asked without waking lazy modules."""

from __future__ import annotations

import importlib.util
import sys
import types

from shim._engine.aliases import namespace_of

__all__ = ["Modules", "is_initialising", "is_lazy"]

_LAZY: type = importlib.util._LazyModule  # type: ignore[attr-defined]


def is_lazy(module: object) -> bool:
    """Whether it is a module of importlib.util.LazyLoader whose code has not run."""
    return issubclass(type(module), _LAZY)


def is_initialising(module: object) -> bool:
    """Whether the import of a module is not over yet."""
    if not issubclass(type(module), types.ModuleType):
        return False
    return bool(getattr(namespace_of(module).get("__spec__"), "_initializing", False))


class Modules:
    """Which modules have run to the end, and which have to be looked through for aliases once more.

    `executed` are modules whose code has run to the end though their import is not over; the engine keeps it.
    `_unfinished` are those that were half imported when somebody looked for aliases in them: a name that they had read
    by then, and not stored yet, was out of sight.
    """

    def __init__(self) -> None:
        self.executed: set[str] = set()
        self._unfinished: set[str] = set()

    def loaded(self, name: str) -> types.ModuleType | None:
        """The module, if its code has run to the end; None for absent, lazy and half imported ones."""
        module = sys.modules.get(name)
        # type() of the object, never an attribute of it: that would load a lazy module.
        if not issubclass(type(module), types.ModuleType):
            return None
        # From Python 3.12 on a lazy module is still one while its code runs.
        if name not in self.executed and (is_lazy(module) or is_initialising(module)):
            return None
        return module

    def overdue(self) -> set[str]:
        """Modules whose import is over since somebody looked for aliases in them."""
        return {name for name in self._unfinished if not is_initialising(sys.modules.get(name))}

    def looked_through(self, names: set[str]) -> None:
        self._unfinished -= names

    def note_unfinished(self) -> None:
        """Remember what is half imported now."""
        self._unfinished |= {name for name, module in list(sys.modules.items()) if is_initialising(module)}
