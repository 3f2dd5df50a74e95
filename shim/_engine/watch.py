"""Which imports concern the plan in force: modules that the import hook acts on, and modules that came past it."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator

from shim._engine.another_copy import packages_of
from shim._engine.deferred_log import logger
from shim._engine.import_hook import ImportHook
from shim._engine.modules import is_lazy
from shim._engine.undo_list import Write
from shim._planning.plan import Plan

__all__ = ["Watch"]

_Loaded = Callable[[str], object]  # whether a module has run to the end


class Watch:
    """The modules of one plan.

    The import hook reads the fields without the lock, for every import of the process. So a field changes under the
    engine's lock only, and is replaced as a whole, never changed in place.
    """

    def __init__(self, hook: ImportHook) -> None:
        self.hook = hook
        self.guests: frozenset[str] = frozenset()  # modules before whose code patches begin something
        self.targets: frozenset[str] = frozenset()  # modules that have targets
        self.packages: frozenset[str] = frozenset()  # the packages that patches are of
        self.watched: frozenset[str] = frozenset()  # all of these, and those of a plan about to come into force
        self.late: frozenset[str] = frozenset()  # modules of targets that no commit has seen loaded yet

    def of(self, plan: Plan | None) -> dict[str, frozenset[str]]:
        """The fields that are of a plan, by their names; without `late`, which also belongs to the process."""
        targets = frozenset(() if plan is None else _target_modules(plan))
        guests = frozenset(() if plan is None else _guests(plan))
        packages = packages_of(plan)
        return {"guests": guests, "targets": targets, "packages": packages, "watched": targets | guests | packages}

    def writes(self, modules: dict[str, frozenset[str]], loaded: _Loaded) -> Iterator[Write]:
        """What makes these the modules of the plan in force. `modules`: see `of`."""
        late = frozenset(name for name in modules["targets"] if not loaded(name))
        for name, value in {**modules, "late": late}.items():
            yield Write(self, name, getattr(self, name), value)

    def still_late(self, loaded: _Loaded) -> Write:
        """What brings `late` up to date with the process."""
        return Write(self, "late", self.late, frozenset(name for name in self.targets if not loaded(name)))

    def add(self, modules: dict[str, frozenset[str]]) -> None:
        """Also watch the modules of a plan about to come into force, until `tidy`. `modules`: see `of`."""
        self.watched |= modules["watched"]
        if self.watched:
            self.hook.install()
        for name in self.watched:
            module = sys.modules.get(name)
            if module is not None and is_lazy(module):
                self.hook.hook_lazy(module)

    def tidy(self) -> None:
        """Watch only the plan in force, and remove the hook if there is nothing to watch."""
        self.watched = self.targets | self.guests | self.packages
        if self.watched:
            self.hook.install()
        else:
            self.hook.remove()

    def ready(self, loaded: _Loaded) -> frozenset[str]:
        """The late modules that have run by now."""
        late, modules = self.late, sys.modules
        if modules.keys().isdisjoint(late):
            return frozenset()
        return frozenset(name for name in late if name in modules and loaded(name))

    def take_ready(self, loaded: _Loaded) -> bool:
        """Whether there are such modules. They are no longer late."""
        ready = self.ready(loaded)
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


def _guests(plan: Plan) -> set[str]:
    wanted = [plan.matrix.patches[decision.id] for decision in plan.decisions.values() if decision.wanted]
    return {module for entry in wanted for module in entry.before}
