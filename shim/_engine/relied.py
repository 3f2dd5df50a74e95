"""Step 5, verify: whether the functions that patches rely on, without binding them, are still upstream's own."""

from __future__ import annotations

from collections.abc import Iterator

from shim._engine.aliases import unwrap
from shim._engine.foreign import foreign_on
from shim._engine.records import Records
from shim._engine.states import Claim
from shim._errors import BindError
from shim._planning.plan import Plan
from shim._releases.fingerprint import split_target

__all__ = ["others_relied_on"]


def others_relied_on(plan: Plan, binder: Records) -> Iterator[Claim]:
    """A sentence for each body that a patch `reads` and that somebody else has replaced or wrapped.

    The fingerprint of such a body was taken from its file, so it says nothing about the object that runs.
    Called without the engine's lock: it may read files.
    """
    for decision in plan.decisions.values():
        for body in decision.wiring.reads if decision.wanted and decision.wiring else ():
            found = _instead_of(body, plan, binder)
            if found:
                yield Claim(decision.id, "", f"it relies on {body}, which is now {found}")


def _instead_of(body: str, plan: Plan, binder: Records) -> str:
    """What stands there instead of upstream's object or shim's, in words; "" if nothing does or nobody knows."""
    if binder.loaded(split_target(body)[0]) is None:
        return ""
    try:
        value = binder.resolve(body)[2]
    except BindError:
        return ""  # upstream defines some names only beside Transformer Engine
    return foreign_on(body, unwrap(binder.wrappers.beneath(value)), plan.environment.sources)
