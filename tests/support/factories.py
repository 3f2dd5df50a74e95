"""The imports of a patch's factories when they run."""

from __future__ import annotations

import builtins
import contextlib
import importlib
import sys
from collections.abc import Iterator
from typing import Any
from unittest import mock

from shim._engine.names import unwrap
from shim._engine.transactions import Binder
from shim._planning.plan import Plan
from shim._releases.fingerprint import split_target

__all__ = ["imports_of_factories"]


def imports_of_factories(plan: Plan, id: str) -> list[str]:
    """The imports of the factories of patch `id` on the installed releases: "target imports module", sorted.

    The list must be empty, because the engine runs factories under its lock. An import may wait for another thread's
    import, even of a loaded module, and that thread may wait for the lock. Modules of the standard library do not
    count. This function imports the modules of all targets.
    """
    decision = plan[id]
    module = importlib.import_module(plan.matrix.patches[id].module)
    binder = Binder()
    found: set[str] = set()
    for target in decision.targets:
        importlib.import_module(split_target(target)[0])
    for target, factory in module.bindings(decision.variant, dict(decision.options)).items():
        value = binder.resolve(target, target in decision.may_be_missing)[2]
        loaded = set(sys.modules)
        with _recorded() as names:
            factory(unwrap(value))
        for added in set(sys.modules) - loaded:  # a factory may add a module, which revert() would take away
            del sys.modules[added]
        found.update(f"{target} imports {name}" for name in names)
    return sorted(found)


@contextlib.contextmanager
def _recorded() -> Iterator[list[str]]:
    """Names of the modules imported inside, without those of the standard library."""
    names: list[str] = []
    import_statement, import_module = builtins.__import__, importlib.import_module

    def note(name: str) -> None:
        if name.partition(".")[0] not in sys.stdlib_module_names:
            names.append(name)

    def statement(name: str, *args: Any, **kwargs: Any) -> Any:
        note(name)
        return import_statement(name, *args, **kwargs)

    def function(name: str, package: str | None = None) -> Any:
        note(name)
        return import_module(name, package)

    with mock.patch.object(builtins, "__import__", statement), mock.patch.object(importlib, "import_module", function):
        yield names
