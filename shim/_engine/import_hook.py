"""The import hook: how far imports have come, and what lets the engine act just before and after a module's code."""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
import threading
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from itertools import filterfalse
from types import ModuleType
from typing import Any, NamedTuple

from shim._engine.log import logger
from shim._engine.names import imports_no_megatron, namespace_of
from shim._errors import SourceError
from shim._planning.plan import Plan
from shim._releases.detect import DISTRIBUTIONS, PATCHED, place_of, same_place
from shim._releases.sources import Sources, file_of, is_ours

__all__ = [
    "Concerned",
    "ImportHook",
    "Watch",
    "another_copy",
    "concerned_by",
    "imported_since",
    "is_initialising",
    "is_lazy",
    "last_module",
    "locked_modules",
]


# How far the import of a module has come, without loading lazy modules


_LAZY: type = importlib.util._LazyModule  # type: ignore[attr-defined]


def is_lazy(module: object) -> bool:
    """Whether importlib.util.LazyLoader made the module and its code has not run."""
    return issubclass(type(module), _LAZY)


def is_initialising(module: object) -> bool:
    """Whether the module's import is under way."""
    if not issubclass(type(module), ModuleType):
        return False
    try:
        # importlib writes True. A mock has anything.
        return getattr(namespace_of(module).get("__spec__"), "_initializing", False) is True
    except Exception:  # noqa: BLE001 - a foreign spec, of which importlib knows nothing
        return False


def locked_modules() -> set[str]:
    """The modules that some thread imports now, by importlib's locks.

    importlib holds the lock of a module from before its code runs until after it has taken the module out of
    sys.modules for a moment, and put it back.
    """
    locks: dict[str, Any] | None = getattr(getattr(importlib, "_bootstrap", None), "_module_locks", None)
    if locks is None:  # it does not show them
        return {name for name, module in list(sys.modules.items()) if is_initialising(module)}
    return {name for name, lock in list(locks.items()) if lock() is not None}


def imported_since(name: str) -> list[str]:
    """The modules whose import began or ended after a module became the last of sys.modules; all if it is gone.

    The last comes first.
    """
    names = list(sys.modules)
    names.reverse()  # it is one of the last of some thousand
    try:
        return names[: names.index(name)]
    except ValueError:
        return names


def last_module() -> tuple[str, Any]:
    """The last module of sys.modules, with its name."""
    try:
        name = next(reversed(sys.modules))
    except RuntimeError:  # another thread has imported something between the two steps
        name = list(sys.modules)[-1]
    return name, sys.modules.get(name)


# The hook


class _HookedLoader:
    """Replaces the real loader until the module's code runs, and leaves no trace.

    It does not derive from importlib.abc.Loader, whose import takes longer than that of the rest of the engine.
    """

    def __init__(self, loader: Any, hook: ImportHook) -> None:
        self._loader = loader
        self._hook = hook

    def __getattr__(self, name: str) -> Any:
        # pkgutil, inspect and runpy ask loaders for get_source, get_code, get_resource_reader, ...
        return getattr(self._loader, name)

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        module: ModuleType | None = self._loader.create_module(spec)
        return module

    def exec_module(self, module: ModuleType) -> None:
        name, spec = namespace_of(module)["__name__"], namespace_of(module).get("__spec__")
        if spec is not None:
            spec.loader = self._loader
        module.__loader__ = self._loader
        was_lazy = is_lazy(module)
        if not issubclass(type(self._loader), importlib.util.LazyLoader):  # a LazyLoader runs no code yet
            self._hook.before(module)
        self._loader.exec_module(module)
        if is_lazy(module) and not was_lazy:
            # The loader was importlib.util.LazyLoader. No code has run yet, and an attribute read would run it.
            self._hook.hook_lazy(module)
            return
        # Other code may load a private copy of the module. Imports get the module in sys.modules.
        if sys.modules.get(name) is module:
            self._hook.after(module, lambda: _since(name))


def _since(name: str) -> list[str]:
    """Modules imported since the import of `name` began, or half imported now: only these can already hold an alias."""
    return list(filterfalse(imports_no_megatron, {*imported_since(name), *locked_modules()}))


class ImportHook:
    """A finder in front of sys.meta_path that wraps the loaders of those modules that `wants` accepts.

    `before(module)` runs just before the module's code, also for a reload and for a private copy of the module.
    `after(module, names)` runs just after the code; `names()` are the modules imported meanwhile or half imported.
    An exception in `after` makes every import of the module raise: importlib removes the module from sys.modules and
    never binds it in its parent.
    """

    is_shim_finder = True

    def __init__(
        self,
        wants: Callable[[str], bool],
        before: Callable[[ModuleType], None],
        after: Callable[[ModuleType, Callable[[], Sequence[str]]], None],
    ) -> None:
        self.wants = wants
        self.before = before
        self.after = after
        self._searches: set[tuple[int, str]] = set()  # of the other finders, which are under way: (thread, module)

    def find_spec(self, name: str, path: Any = None, target: ModuleType | None = None) -> ModuleSpec | None:
        if not self.wants(name):
            return None
        # Another finder may also ask all of them, this one included. Then this one asks no further.
        search = threading.get_ident(), name
        if search in self._searches:
            return None
        self._searches.add(search)
        try:
            spec = self._ask_others(name, path, target)
        finally:
            self._searches.discard(search)
        return None if spec is None else self._hooked(spec)

    def _hooked(self, spec: ModuleSpec) -> ModuleSpec:
        # The loader of built-in and frozen modules is a class, and runs no code to wait for.
        has_code = hasattr(spec.loader, "exec_module") and not issubclass(type(spec.loader), (type, _HookedLoader))
        if has_code:
            spec.loader = _HookedLoader(spec.loader, self)  # type: ignore[assignment]
        return spec

    def _ask_others(self, name: str, path: Any, target: ModuleType | None) -> ModuleSpec | None:
        """What the finders behind this one find. Those in front of it have found nothing, or are asking it."""
        finders = list(sys.meta_path)
        for finder in finders[finders.index(self) + 1 :] if self in finders else finders:
            look = getattr(finder, "find_spec", None)
            if is_ours(finder) or look is None:
                continue
            spec: ModuleSpec | None = look(name, path, target)
            if spec is not None:
                return spec
        return None

    def hook_lazy(self, module: ModuleType) -> None:
        """Hook a lazy module: it is in sys.modules, but its code has not run."""
        spec = namespace_of(module).get("__spec__")
        if spec is not None and not issubclass(type(spec.loader), _HookedLoader):
            spec.loader = _HookedLoader(spec.loader, self)

    def keep_thread(self, thread: int) -> None:
        """Forget the searches of other threads, none of which is in a process that was forked."""
        self._searches = {search for search in self._searches if search[0] == thread}

    def install(self) -> None:
        """Put the hook in front, so that no other finder comes before it."""
        if self not in sys.meta_path:
            sys.meta_path.insert(0, self)
        elif sys.meta_path[0] is not self:
            # A new list, because another thread may iterate over the old one and would skip a finder.
            sys.meta_path = [self, *(finder for finder in sys.meta_path if finder is not self)]

    def remove(self) -> None:
        if self in sys.meta_path:
            # A new list, because another thread may iterate over the old one and would skip a finder.
            sys.meta_path = [finder for finder in sys.meta_path if finder is not self]


_Loaded = Callable[[str], object]  # whether a module has run to the end


# Which imports concern the plan in force


class Concerned(NamedTuple):
    """The modules whose import concerns a plan."""

    guests: frozenset[str] = frozenset()  # before whose code patches begin something
    targets: frozenset[str] = frozenset()  # that have targets
    packages: frozenset[str] = frozenset()  # the packages that patches are of


def concerned_by(plan: Plan | None) -> Concerned:
    if plan is None:
        return Concerned()
    wanted = [plan.matrix.patches[decision.id] for decision in plan.decisions.values() if decision.wanted]
    guests = frozenset(module for entry in wanted for module in entry.before)
    return Concerned(guests, frozenset(_target_modules(plan)), packages_of(plan))


class Watch:
    """The modules of one plan.

    The import hook reads the fields without the lock, for every import of the process. So a field changes under the
    engine's lock only, and is replaced as a whole, never changed in place.
    """

    def __init__(self, hook: ImportHook) -> None:
        self.hook = hook
        self.modules = Concerned()  # of the plan in force
        self.watched: frozenset[str] = frozenset()  # all of these, and those of a plan about to come into force
        self.late: frozenset[str] = frozenset()  # modules of targets that no commit has seen loaded yet

    def add(self, modules: Concerned) -> None:
        """Also watch the modules of a plan about to come into force, until `tidy`."""
        self.watched = self.watched.union(*modules)
        if self.watched:
            self.hook.install()
        for name in self.watched:
            module = sys.modules.get(name)
            if module is not None and is_lazy(module):
                self.hook.hook_lazy(module)

    def tidy(self) -> None:
        """Watch only the plan in force, and remove the hook if there is nothing to watch."""
        self.watched = frozenset().union(*self.modules)
        if self.watched:
            self.hook.install()
        else:
            self.hook.remove()

    def wait_for(self, plan: Plan, loaded: _Loaded) -> None:
        """Wait for target modules that other threads are importing now. Called without the lock."""
        for name in _target_modules(plan):
            if name not in sys.modules or loaded(name) or is_lazy(sys.modules.get(name)):
                continue
            try:
                importlib.import_module(name)  # returns at once if this thread is importing the module
            except Exception as error:  # noqa: BLE001 - raised in the importing thread; the module stays pending
                logger().debug("the import of %s, which was under way, failed: %s", name, error)


def _target_modules(plan: Plan) -> set[str]:
    """Modules with targets of patches that are wanted, or that are required but in conflict."""
    required = {id for id in plan.options.require if plan[id].action == "conflict"}
    concerned = [decision for decision in plan.decisions.values() if decision.wanted or decision.id in required]
    return {module for decision in concerned for module in decision.modules}


# Whether a package comes from another place than the plan was made for: sys.path may change after apply()


_PACKAGES = {DISTRIBUTIONS[distribution].package: distribution for distribution in PATCHED}


def packages_of(plan: Plan) -> frozenset[str]:
    """The packages that patches are of, installed or not. Empty if all patches are left out."""
    if all(decision.action == "excluded" for decision in plan.decisions.values()):
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
