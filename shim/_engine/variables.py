"""Environment variables that a patch sets for a package that reads them at its import."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator

from shim._matrix.model import Variable
from shim._planning.plan import Plan

__all__ = ["Variables", "concerning"]


def concerning(plan: Plan) -> Iterator[tuple[str, Variable]]:
    """Pairs (patch, variable): the variables of patches to apply that concern the installed releases."""
    versions = plan.environment.versions
    for decision in plan.decisions.values():
        for variable in plan.matrix.patches[decision.id].variables if decision.wanted else ():
            if variable.concerns(versions):
                yield decision.id, variable


class Variables:
    """The variables that shim has set, with their values before."""

    def __init__(self) -> None:
        self._set: dict[str, tuple[str | None, str]] = {}
        self._for: dict[str, str] = {}  # variable -> the patch it was set for

    def resources(self) -> Iterator[tuple[str, str]]:
        """Pairs (patch, text) for each variable that shim has set and that still has shim's value."""
        for name, (_, mine) in self._set.items():
            if os.environ.get(name) == mine:
                yield self._for[name], f"{name}={mine} in the environment"

    def sync(self, plan: Plan | None) -> list[str]:
        """Set the variables that the plan's options ask for, and restore the others. Returns warnings for late ones.

        A variable that somebody else has changed meanwhile is left alone.
        """
        asked = [] if plan is None else list(concerning(plan))
        wanted = {v.name: (id, v) for id, v in asked if plan is not None and plan[id].options.get(v.option)}
        for name in self._set.keys() - wanted.keys():
            before, mine = self._set[name]
            if os.environ.get(name) == mine:
                if before is None:
                    del os.environ[name]
                else:
                    os.environ[name] = before
            self._set.pop(name, None)  # last: who is interrupted before has it done again
        late = []
        for id, variable in wanted.values():
            if os.environ.get(variable.name) == variable.value:
                continue
            if variable.before in sys.modules:
                late.append(
                    f"{id}: {variable.before} was imported before {variable} could be set: {variable.without}. Remedy: "
                    f"call shim.apply() earlier, or start the process with {variable}."
                )
                continue
            self._set[variable.name] = os.environ.get(variable.name), variable.value
            self._for[variable.name] = id
            os.environ[variable.name] = variable.value
        return late
