"""What the engine does when a module is imported: the import hook asks and tells it here."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import TYPE_CHECKING

from shim._engine.aliases import namespace_of
from shim._engine.modules import imports_no_megatron

if TYPE_CHECKING:
    from shim._engine.engine import Engine

__all__ = ["Imports"]


class Imports:
    """The three questions of the import hook, and the imports that are under way. The engine's lock guards the fields.

    running: modules of targets that have run, and whose import is not over.
    ran_within: modules of targets whose code ran within a transaction. They are late, and bound when that is over.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.running: dict[str, ModuleType] = {}
        self.ran_within: frozenset[str] = frozenset()

    def wants(self, module: str) -> bool:
        """Whether the import hook is to act on the import of a module."""
        # This runs for every import of the process, under a lock of importlib's. So it takes no lock and does no work:
        # after() does what is left when this module has run.
        engine, watch = self._engine, self._engine.watch
        if module in watch.watched:
            return True
        if imports_no_megatron(module) or not watch.ready(engine.binder.loaded):
            return False
        # A target has come past the hook. While a patch module is imported, late work would import it a second time.
        return not (engine.factories.loading or module in watch.patches or engine.is_within() or engine.renewal.threads)

    def before(self, module: ModuleType) -> None:
        """Just before the code of a module runs."""
        engine = self._engine
        engine.renewal.keep_tied(lambda plan: engine.renewal.tie.before(plan, module))
        if namespace_of(module)["__name__"] in engine.watch.guests:
            engine.begin_before(module)

    def after(self, module: ModuleType, meanwhile: Callable[[], Sequence[str]]) -> None:
        """Just after the code of a module has run: bind its targets. See ImportHook for `meanwhile` and for errors."""
        engine, watch, name = self._engine, self._engine.watch, namespace_of(module)["__name__"]
        if engine.is_within():
            self.ran_within |= {name}
            return
        if watch.is_only_tied(name) and not engine.deferred and sys.modules.keys().isdisjoint(watch.late):
            engine.renewal.keep_tied(lambda plan: engine.renewal.tie.after(plan, module))
            return
        with engine.lock:
            self.running[name] = module
            engine.binder.modules.executed.add(name)
            watch.late -= {name}
            engine.binder.renew(module)
            engine.try_again(name)
        try:
            engine.renewal.keep_tied(
                lambda plan: engine.renewal.tie.after(plan, module) or engine.renewal.tie.mismatch(plan)
            )
            engine.bind_imported((name, [name, *meanwhile()]))
        except BaseException:
            with engine.lock:
                engine.binder.modules.executed.discard(name)
                if engine.binder.loaded(name) is None:  # not a reload: importlib removes the module from sys.modules
                    engine.binder.abandon(name)
            raise
        finally:
            with engine.lock:
                engine.binder.modules.executed.discard(name)
            engine.deferred.flush()
        self.running.pop(name, None)

    def abandon_failed(self) -> None:
        """Unbind modules whose import has failed, if an interrupt kept other code from it. Under the lock."""
        for name, module in list(self.running.items()):
            if sys.modules.get(name) is not module:
                self._engine.binder.abandon(name)
                self.running.pop(name, None)

    def renew_ran_within(self) -> None:
        """Let the binder know of the modules that ran within a transaction which is over. Under the lock."""
        for name in [name for name in self.ran_within if self._engine.binder.loaded(name) is not None]:
            self._engine.binder.renew(sys.modules[name])
            self.ran_within -= {name}
