"""What probes of patches say about functions of somebody's, each tried once."""

from __future__ import annotations

import sys
from typing import Any

from shim._engine.aliases import namespace_of
from shim._engine.probes import Verdict, facts_of, run
from shim._planning.plan import Decision, Plan

__all__ = ["Tries", "of_patch"]

MOST_VERDICTS = 1000


def of_patch(decision: Decision, plan: Plan, name: str) -> Any:
    """A function of the patch's module, if the module is loaded and has it; else None."""
    module = sys.modules.get(plan.matrix.patches[decision.id].module)
    return None if module is None else namespace_of(module).get(name)


class Tries:
    """The verdicts of probes on these models. Each function is tried once, and again where its module differs.

    trying: whether this is check(). A report only repeats what check() has found.
    """

    def __init__(self, plan: Plan, models: list[Any], verdicts: dict[Any, Verdict], trying: bool) -> None:
        self.plan, self.models, self.verdicts, self.trying = plan, models, verdicts, trying
        self._facts: dict[int, Any] = {}

    def of(self, decision: Decision, method: str, module: Any, function: Any) -> Verdict:
        """What the patch's probe says of `function`, which `module` runs as `method`."""
        probe = of_patch(decision, self.plan, "probe")
        if probe is None:
            return None, "shim has no way to try what becomes of the patch"
        if id(module) not in self._facts:
            self._facts[id(module)] = facts_of(module), *(type(model).__qualname__ for model in self.models)
        what = (decision.id, decision.variant, repr(sorted(decision.options.items())), method)
        key = (what, getattr(function, "__code__", function), type(module).__qualname__, self._facts[id(module)])
        if key not in self.verdicts:
            if not self.trying:
                return None, "shim.check(model) has not tried yet what becomes of the patch"
            if len(self.verdicts) >= MOST_VERDICTS:
                self.verdicts.clear()
            self.verdicts[key] = run(probe, module, method, self.models)
        return self.verdicts[key]
