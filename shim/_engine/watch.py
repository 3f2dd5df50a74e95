"""Which imports concern the plan in force: modules that the import hook acts on, and modules that came past it."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterable

from shim._engine.deferred_log import logger
from shim._engine.import_hook import ImportHook
from shim._engine.modules import is_lazy
from shim._planning.plan import Plan

__all__ = ["Watch"]

_Loaded = Callable[[str], object]  # whether a module has run to the end


class Watch:
    """The modules of one plan.

    The import hook reads the fields without the lock, for every import of the process. So a field changes under the
    engine's lock only, and is replaced as a whole, never changed in place.
    """

    def __init__(self, hook: ImportHook) -> None:
        self._hook = hook
        self._guests: frozenset[str] = frozenset()  # modules that may run with a stand-in for a package
        self.targets: frozenset[str] = frozenset()  # modules that have targets
        self.patches: frozenset[str] = frozenset()  # patch modules and their parent packages
        self.watched: frozenset[str] = frozenset()  # targets and guests, and the targets of a plan about to be adopted
        self.late: frozenset[str] = frozenset()  # modules of targets that no commit has seen loaded yet

    def follow(self, plan: Plan | None, guests: Iterable[str], loaded: _Loaded) -> None:
        self._guests = frozenset(guests)
        self.targets = frozenset() if plan is None else frozenset(_target_modules(plan))
        self.patches = frozenset() if plan is None else frozenset(_patch_modules(plan))
        self.late = frozenset(name for name in self.targets if not loaded(name))
        self._watch(self.targets | self._guests)

    def add(self, plan: Plan) -> None:
        """Also watch the targets of a plan about to be adopted, until `tidy`."""
        self._watch(self.watched | _target_modules(plan))

    def _watch(self, names: frozenset[str]) -> None:
        self.watched = names
        if names:
            self._hook.install()
        for name in names:
            module = sys.modules.get(name)
            if module is not None and is_lazy(module):
                self._hook.adopt_lazy(module)

    def tidy(self) -> None:
        """Watch only the plan in force, and remove the hook if there is nothing to watch."""
        self.watched = self.targets | self._guests
        if not self.watched:
            self._hook.remove()

    def take_ready(self, loaded: _Loaded) -> bool:
        """Whether some late modules have run by now. They are no longer late."""
        ready = {name for name in self.late if loaded(name)}
        self.late -= ready
        return bool(ready)

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


def _patch_modules(plan: Plan) -> set[str]:
    """The modules of all patches, and their parent packages."""
    parts = [entry.module.split(".") for entry in plan.matrix.patches.values()]
    return {".".join(path[:count]) for path in parts for count in range(1, len(path) + 1)}
