"""Whether a package comes from another place than the plan was made for: sys.path may change after apply()."""

from __future__ import annotations

import os
import sys

from shim._engine.modules import is_lazy
from shim._errors import SourceError
from shim._planning.plan import Plan
from shim._releases.detect import DISTRIBUTIONS, PATCHED, place_of, same_place
from shim._releases.sources import Sources, file_of

__all__ = ["another_copy", "packages_of"]

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
