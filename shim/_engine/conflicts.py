"""Conflicts: somebody else's object on a target keeps a patch, or a part of it, from its effect."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from shim._compatible import marks_of
from shim._engine.aliases import namespace_of, unwrap
from shim._engine.binder import Binder, Wrapped
from shim._engine.chain import MISSING
from shim._engine.foreign import describe, foreign_on, is_upstreams, takes_the_same
from shim._engine.reach import reached
from shim._errors import BindError, NotMetError
from shim._planning.plan import Decision, Plan
from shim._record import Record, replace
from shim._releases.fingerprint import ABSENT, split_target

__all__ = ["remedy_for", "remedy_in_doubt", "require_none", "warnings_for", "with_conflicts"]


class _Foreign(Record):
    """An object that keeps a patch from a target: who it is, what is said of it, and what to do.

    what: "" if the object says itself that it keeps what the patch does there (shim.compatible).
    """

    who: str
    what: str
    remedy: str


def with_conflicts(plan: Plan, binder: Binder) -> Plan:
    """The plan with what somebody else's objects keep from it now. Returns the same plan object if nothing changes.

    A patch is in ``conflict`` if such an object stands on a target that it cannot do without. On another target the
    object costs this target only: `Decision.left`. An object that calls upstream's function is no conflict: the binder
    is told where it holds that function (`Binder.wrapped`).
    """
    decisions = {id: decision.displaced or decision for id, decision in plan.decisions.items()}
    binder.wrapped = {target: around for target, around in binder.wrapped.items() if target in binder.chains}
    for id, decision in list(decisions.items()):
        left: dict[str, str] = {}
        for target in decision.targets if decision.wanted else ():
            found = _foreign_on(target, decision, plan, binder)
            if found is None:
                continue
            if not found.what:
                left[target] = ""
                continue
            if decision.wiring is None or target not in decision.wiring.spared:
                decisions[id] = replace(
                    decision, action="conflict", reason=found.what, remedy=found.remedy, displaced=decision
                )
                break
            left[target] = found.who
        else:
            if left:
                decisions[id] = replace(decision, left=left, displaced=decision)
    return plan if decisions == plan.decisions else replace(plan, decisions=decisions)


def _foreign_on(target: str, decision: Decision, plan: Plan, binder: Binder) -> _Foreign | None:
    """The foreign object that keeps a patch about to be bound from a target."""
    # A bound target was looked at when it was bound. An object that replaced it since is found as lost.
    if target in binder.chains or binder.loaded(split_target(target)[0]) is None:
        return None
    try:
        owner, name, value = binder.resolve(target, target in decision.added)
    except BindError as error:
        return _Foreign("nothing", str(error), f"exclude {decision.id}")
    if value is MISSING:
        return None
    inner = unwrap(binder.wrappers.beneath(value))
    if decision.fingerprints.get(target) == ABSENT:
        who = describe(unwrap(value))
        return _Foreign(who, f"{target}, which the release lacks, holds {who}", remedy_for(decision.id, who))
    wiring = decision.wiring
    body = (wiring and wiring.inherits(target)) or target
    who = foreign_on(body, inner, plan.environment.sources)
    if not who:
        return None
    if target in marks_of(inner):
        return _Foreign(who, "", "")
    found = _held_inside(value, body, owner, name, plan, binder)
    certain = any(held.certain for held in found)
    writable = tuple(held for held in found if held.owner is not None and held.certain)
    # An inherited object is another class's too, so what lies inside it is not for this class to change. A property's
    # function is no property.
    if writable and name in namespace_of(owner) and type(inner) is not property:
        upstream = unwrap(binder.wrappers.beneath(unwrap(writable[0].value)))
        binder.wrapped[target] = Wrapped(value, upstream, writable)
        return None
    above = wiring is not None and target in wiring.wraps and takes_the_same(body, inner, plan.environment.sources)
    if above or (certain and name not in namespace_of(owner)):
        return None
    if found:
        what = f"{target} holds {who}, and shim cannot get beneath it"
        return _Foreign(
            who, what, f"call shim.apply() before {who} is put there" if certain else remedy_in_doubt(decision.id, who)
        )
    what = f"{target} holds {who}, which does not call upstream's function"
    return _Foreign(who, what, remedy_for(decision.id, who))


def _held_inside(value: Any, body: str, owner: Any, name: str, plan: Plan, binder: Binder) -> list[Any]:
    """The places from which a foreign object calls upstream's function, or shim's of an earlier plan."""
    sources = plan.environment.sources

    def wanted(held: Any) -> bool:
        beneath = binder.wrappers.beneath(held)
        return is_upstreams(body, unwrap(beneath), sources)

    return reached(value, owner, name, wanted, binder.wrappers.is_ours)


def remedy_in_doubt(id: str, who: str) -> str:
    """What to do about an object of which nobody knows what it calls."""
    return f"let {who} call the function that it took from a variable of its own, or exclude {id}"


def remedy_for(id: str, who: str) -> str:
    """What to do about an object that does a patch's work its own way."""
    return f"remove {who}, whose work the patch does, or keep it and exclude {id}"


def require_none(plan: Plan, module: str | None) -> None:
    """NotMetError if a required patch is in conflict. `module`: look only at patches of this just imported module."""
    for id in plan.options.require:
        decision = plan[id]
        if decision.action == "conflict" and (module is None or module in decision.modules):
            raise NotMetError(f"required, but {id} is in conflict: {decision.reason}. Remedy: {decision.remedy}.")


def warnings_for(plan: Plan) -> Iterator[tuple[str, str, str, str]]:
    """For each correctness patch that is not applied, as a whole or on some target: patch, state, reason, warning."""
    for decision in plan.decisions.values():
        if decision.kind != "correctness":
            continue
        if decision.action in ("drifted", "conflict"):
            text = (
                f"{decision.id} is not applied ({decision.action}): {decision.reason}. "
                f"{_stays_wrong(plan, decision.id)}Remedy: {decision.remedy}."
            )
            yield decision.id, decision.action, decision.reason, text
        spared = {} if decision.wiring is None else decision.wiring.spared
        for target, who in ((target, who) for target, who in decision.left.items() if who):
            text = (
                f"{decision.id} is applied without {target}, which holds {who}. "
                f"What stays wrong: {spared[target]}. Remedy: {remedy_for(decision.id, who)}."
            )
            yield decision.id, "applied in part", f"without {target}", text


def _stays_wrong(plan: Plan, id: str) -> str:
    entry = plan.matrix.patches[id]
    return f"What stays wrong: {entry.without}. " if entry.without else f"What is missing: {entry.summary}. "
