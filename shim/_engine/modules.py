"""How far the import of a module has come, without loading lazy modules, and whether it is of the planned copy."""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
import types
from collections.abc import Iterable, Iterator
from typing import Any

from shim._engine.names import imports_no_megatron, namespace_of
from shim._errors import SourceError
from shim._planning.plan import Plan
from shim._releases.detect import DISTRIBUTIONS, PATCHED, place_of, same_place
from shim._releases.sources import Sources, file_of

__all__ = [
    "Modules",
    "another_copy",
    "imported_since",
    "is_initialising",
    "is_lazy",
    "locked_modules",
    "packages_of",
]


_LAZY: type = importlib.util._LazyModule  # type: ignore[attr-defined]


def _without_strangers(names: Iterable[str]) -> frozenset[str]:
    return frozenset(name for name in names if not imports_no_megatron(name))


def is_lazy(module: object) -> bool:
    """Whether importlib.util.LazyLoader made the module and its code has not run."""
    return issubclass(type(module), _LAZY)


def is_initialising(module: object) -> bool:
    """Whether the module's import is under way."""
    if not issubclass(type(module), types.ModuleType):
        return False
    try:
        # importlib writes True. A mock has anything.
        return getattr(namespace_of(module).get("__spec__"), "_initializing", False) is True
    except Exception:  # noqa: BLE001 - a foreign spec, of which importlib knows nothing
        return False


def locked_modules() -> set[str]:
    """The modules that some thread imports now."""
    locked = _locked()
    if locked is None:
        return {name for name, module in list(sys.modules.items()) if is_initialising(module)}
    return locked


def _locked() -> set[str] | None:
    """The modules that some thread imports now, by importlib's locks. None if importlib does not show them.

    importlib holds the lock of a module from before its code runs until after it has taken the module out of
    sys.modules for a moment, and put it back.
    """
    locks: dict[str, Any] | None = getattr(getattr(importlib, "_bootstrap", None), "_module_locks", None)
    return None if locks is None else {name for name, lock in list(locks.items()) if lock() is not None}


def imported_since(name: str) -> Iterator[str]:
    """The modules whose import began or ended after a module became the last of sys.modules; all if it is gone."""
    for other in reversed(list(sys.modules)):
        if other == name:
            break
        yield other


def _last() -> tuple[str, Any]:
    """The last module of sys.modules, with its name."""
    try:
        name = next(reversed(sys.modules))
    except RuntimeError:  # another thread has imported something between the two steps
        name = list(sys.modules)[-1]
    return name, sys.modules.get(name)


class Modules:
    """Which modules have run to the end, and which must be searched for aliases again.

    executed: modules whose code has run to the end although their import is not over. The engine maintains it.
    unfinished: modules that were half imported during a search for aliases. The search could not see an object that
        such a module had read but not stored yet.
    searched: the last module of sys.modules at the last search, by name, until it is known whether others came before
        its results were written.
    """

    def __init__(self) -> None:
        self.executed: set[str] = set()
        self.unfinished: frozenset[str] = frozenset()
        self.searched: tuple[str, Any] | None = None

    def draft(self) -> Modules:
        """A copy to try a transaction on."""
        copy = Modules()
        copy.executed, copy.unfinished, copy.searched = self.executed, self.unfinished, self.searched
        return copy

    def loaded(self, name: str) -> types.ModuleType | None:
        """The module if its code has run to the end; None if it is absent, lazy or half imported."""
        module = sys.modules.get(name)
        # issubclass(type(x), ...) reads no attribute, which would load a lazy module.
        if not issubclass(type(module), types.ModuleType):
            return None
        # From Python 3.12 on a lazy module keeps its lazy type while its code runs.
        if name not in self.executed and (is_lazy(module) or is_initialising(module)):
            return None
        return module

    def overdue(self) -> set[str]:
        """Modules that were half imported at the last search for aliases, or came since, and have run by now."""
        left = self.unfinished | self._came()
        left = left - (_locked() or set()) if left else left
        return {name for name in left if not is_initialising(sys.modules.get(name))}

    def came_meanwhile(self) -> bool:
        """Whether modules came between the last search and its results. If none did, no search has to ask again."""
        if self._came():
            return True
        self.searched = None
        return False

    def _came(self) -> frozenset[str]:
        """What stands behind the module that was the last. A module comes last if its import begins, and if it ends."""
        if self.searched is None:
            return frozenset()
        (name, module), (last, now) = self.searched, _last()
        if name == last and module is now:
            return frozenset()
        return _without_strangers(imported_since(name) if sys.modules.get(name) is module else list(sys.modules))

    def looked_through(self, names: set[str]) -> None:
        self.unfinished, self.searched = (self.unfinished | self._came()) - names, None

    def note_search(self) -> None:
        """Remember which module is the last now, and which are half imported: each of those is locked."""
        self.searched = _last()
        self.unfinished |= _without_strangers(locked_modules())


# Whether a package comes from another place than the plan was made for: sys.path may change after apply()


_PACKAGES = {DISTRIBUTIONS[distribution].package: distribution for distribution in PATCHED}


def packages_of(plan: Plan | None) -> frozenset[str]:
    """The packages that patches are of, installed or not. Empty if all patches are left out."""
    if plan is None or all(decision.action == "excluded" for decision in plan.decisions.values()):
        return frozenset()
    return frozenset(_PACKAGES)


def another_copy(plan: Plan) -> str:
    """Why the plan does not fit the packages that are loaded, in a sentence with a remedy; "" if it fits.

    A package may have come past the hook. Callers do not hold the engine's lock: files are looked for here.
    """
    loaded = (name for name in packages_of(plan) if name in sys.modules and not is_lazy(sys.modules[name]))
    return next((why for name in loaded if (why := _elsewhere(plan, name))), "")


def _elsewhere(plan: Plan, package: str) -> str:
    distribution = _PACKAGES[package]
    planned = plan.environment.installed.get(distribution)
    file = file_of(sys.modules[package])
    if planned is not None and file is not None and os.path.dirname(file) == planned.location:
        return ""
    try:
        place = place_of(distribution, Sources())
    except SourceError:
        return ""
    if place is None or (planned is not None and same_place(place, planned.location)):
        return ""  # a module that other code has made by hand has no place
    expected = f"{planned} was" if planned is not None else f"no {distribution} was"
    remedy = f"Remedy: put it on sys.path before {plan.asked_by.partition(' at ')[0]}, in front of everything else"
    return f"{package} is imported from {place}, but {expected} there for {plan.asked_by}. {remedy}"
