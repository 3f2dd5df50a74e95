"""Conflicts: patches that are not bound because somebody else's object stands on one of their targets."""

from __future__ import annotations

from collections.abc import Iterator

from shim._engine.aliases import unwrap
from shim._engine.binder import Binder
from shim._engine.chain import MISSING
from shim._engine.foreign import describe, foreign_on
from shim._errors import BindError, NotMetError
from shim._planning.plan import Decision, Plan
from shim._record import replace
from shim._releases.fingerprint import ABSENT, split_target

__all__ = ["require_none", "warnings_for", "with_conflicts"]


def with_conflicts(plan: Plan, binder: Binder) -> Plan:
    """The plan with each patch in ``conflict`` if somebody else's object stands on a target, and out of it otherwise.

    Returns the same plan object if nothing changes.
    """
    decisions = {id: decision.displaced or decision for id, decision in plan.decisions.items()}
    for id, decision in list(decisions.items()):
        found = _conflict(decision, plan, binder) if decision.wanted else ""
        if found:
            remedy = f"call shim.apply() before the other patch is made, or exclude {id}"
            decisions[id] = replace(decision, action="conflict", reason=found, remedy=remedy, displaced=decision)
    return plan if decisions == plan.decisions else replace(plan, decisions=decisions)


def _conflict(decision: Decision, plan: Plan, binder: Binder) -> str:
    """The foreign object on a target of a patch that is about to be bound, in words; "" if there is none."""
    for target in decision.targets:
        # A bound target was checked when it was bound. An object that replaced it since is found as lost.
        if target in binder.chains or binder.loaded(split_target(target)[0]) is None:
            continue
        try:
            value = binder.resolve(target, target in decision.added)[2]
        except BindError as error:
            return str(error)
        if value is MISSING:
            continue
        if decision.fingerprints.get(target) == ABSENT:
            return f"{target}, which the release lacks, holds {describe(unwrap(value))}"
        body = (decision.wiring and decision.wiring.inherits(target)) or target
        found = foreign_on(body, unwrap(binder.wrappers.beneath(value)), plan.environment.sources)
        if found:
            return f"{target} holds {found}"
    return ""


def require_none(plan: Plan, module: str | None) -> None:
    """NotMetError if a required patch is in conflict. `module`: look only at patches of this just imported module."""
    for id in plan.options.require:
        decision = plan[id]
        if decision.action == "conflict" and (module is None or module in decision.modules):
            raise NotMetError(f"required, but {id} is in conflict: {decision.reason}. Remedy: {decision.remedy}.")


def warnings_for(plan: Plan) -> Iterator[str]:
    """One warning for each correctness patch that cannot be applied."""
    for decision in plan.decisions.values():
        if decision.kind == "correctness" and decision.action in ("drifted", "conflict"):
            yield (
                f"{decision.id} is not applied ({decision.action}): {decision.reason}. "
                f"{_stays_wrong(plan, decision.id)}Remedy: {decision.remedy}."
            )


def _stays_wrong(plan: Plan, id: str) -> str:
    entry = plan.matrix.patches[id]
    return f"What stays wrong: {entry.without}. " if entry.without else f"What is missing: {entry.summary}. "
