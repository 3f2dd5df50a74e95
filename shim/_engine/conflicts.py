"""Conflicts: a foreign object on a target keeps a patch, or a part of it, from its effect."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from typing import Any

from shim._compatible import marks_of
from shim._engine.chains import Findings, Records, Wrapped
from shim._engine.foreign import Around, Question, foreign_on, is_method, is_tried, is_upstreams, may_go_around
from shim._engine.names import MISSING, Held, describe, namespace_of, replaced_by, unwrap
from shim._engine.reach import callable_paths, has_code, holds_in_closure, leads_to
from shim._errors import BindError, NotMetError
from shim._planning.plan import Decision, Plan
from shim._record import record
from shim._releases.fingerprint import ABSENT, split_target

__all__ = [
    "others_relied_on",
    "remedy_for",
    "remedy_in_doubt",
    "remedy_untried",
    "require_none",
    "warnings_for",
    "with_conflicts",
]


# Whether a call still reaches a body, if a foreign function stands on its way there or in its place
#
# `reached_by` in the matrix names the ways: the functions and methods through which a call comes. "Applied" is what a
# call reaches, so a patch whose target is bound, and which nothing calls any more, is not applied. Of a body that a
# patch `reads`, a report says who has replaced it.


@record
class Cut:
    """A foreign function on the way to a body, which does not lead there.

    certain: False if reading does not tell.
    """

    body: str
    way: str
    function: Any
    who: str
    certain: bool

    def __str__(self) -> str:
        return f"{self.way} was replaced by {self.who}, which does not lead to {self.body}"


def cuts(decision: Decision, plan: Plan, binder: Records) -> Iterator[Cut]:
    """The ways to targets and reads of a patch that a foreign function has cut off now."""
    for body, ways in decision.wiring.reached_by.items() if decision.wiring else ():
        for way in ways:
            found = _cut(body, way, body in decision.targets, plan, binder)
            if found is not None:
                yield found


def _cut(body: str, way: str, binds: bool, plan: Plan, binder: Records) -> Cut | None:
    if binder.loaded(split_target(way)[0]) is None or binder.loaded(split_target(body)[0]) is None:
        return None
    try:
        owner, name, value = binder.resolve(way)
        _, _, target = binder.resolve(body)
    except BindError:
        return None
    inner = unwrap(binder.wrappers.beneath(value))
    # Upstream's own function leads there. It is compared once, because its file is read.
    if binder.known_ways.get(way) is inner:
        return None
    who = foreign_on(way, inner, plan.environment.sources)
    if not who:
        binder.known_ways[way] = inner
        return None
    if not {body, way}.isdisjoint(marks_of(inner)):
        return None
    held = upstreams_inside(inner, way, owner, name, plan, binder)
    if any(place.certain for place in held):
        return None
    bound, upstreams = unwrap(target), unwrap(binder.wrappers.beneath(target))
    # shim also binds names that a module has imported. A function in a closure stays upstream's.
    stale = binds and holds_in_closure(inner, upstreams)
    if not stale and leads_to(inner, (bound, upstreams)):
        return None
    return Cut(body, way, inner, who, stale or (not held and has_code(inner)))


def upstreams_inside(value: Any, body: str, owner: Any, name: str, plan: Plan, binder: Records) -> list[Held]:
    """The places from which a foreign object calls upstream's function, or shim's of an earlier plan."""

    def wanted(held: Any) -> bool:
        return is_upstreams(body, unwrap(binder.wrappers.beneath(held)), plan.environment.sources)

    return callable_paths(value, owner, name, wanted, binder.wrappers.is_ours)


def _standing(name: str, binder: Records) -> tuple[Any, str, Any]:
    if binder.loaded(split_target(name)[0]) is None:
        raise BindError(f"{name} is not imported")
    return binder.resolve(name)


def others_relied_on(plan: Plan, binder: Records) -> Iterator[tuple[str, str]]:
    """Pairs (patch, sentence), one for each body that a patch `reads` and that other code has replaced or wrapped.

    The fingerprint of such a body was taken from its file, so it says nothing about the object that runs.
    Called without the engine's lock: it may read files.
    """
    for decision in plan.decisions.values():
        for body in decision.wiring.depends_on if decision.wanted and decision.wiring else ():
            found = _instead_of(body, plan, binder)
            if found:
                yield decision.id, f"it relies on {body}, which is now {found}"


def _instead_of(body: str, plan: Plan, binder: Records) -> str:
    """What stands there instead of upstream's object or shim's, in words; "" if nothing does or it cannot be told."""
    try:
        value = _standing(body, binder)[2]
    except BindError:
        return ""  # upstream defines some names only beside Transformer Engine
    return foreign_on(body, unwrap(binder.wrappers.beneath(value)), plan.environment.sources)


# What foreign objects keep from a plan


@record
class _Foreign:
    """An object that keeps a patch from a target: who it is, what is said of it, and what to do.

    what: "" if the object says itself that it keeps what the patch does there (shim.compatible).
    """

    who: str
    what: str
    remedy: str
    value: Any = None


def with_conflicts(plan: Plan, binder: Records) -> tuple[Plan, Findings]:
    """The plan with what foreign objects keep from it now, and what was found about them. Changes nothing.

    Returns the same plan object if nothing changes.

    A patch is in ``conflict`` if such an object stands on a target that it cannot do without, or on the way to one. No
    part of it is bound then, so that it does not matter who came first. On another target the object costs this target
    only: `Decision.skipped`. So it does if the patch can try the object in a model (`Findings.open`). An object that
    calls upstream's function is no conflict: the binder is told where it holds that function (`Findings.wrapped`). Nor
    is one that the patch can go around (`Findings.around`).
    """
    decisions = {id: decision.without_conflict or decision for id, decision in plan.decisions.items()}
    binder = binder.looking()
    binder.found.forget(binder.chains)
    overridden = binder.replaced_targets()
    wanted = {id: decision for id, decision in decisions.items() if decision.wanted}
    loaded = {name for name in set().union(*(d.modules for d in wanted.values())) if binder.loaded(name)}
    for id, decision in wanted.items():
        skipped: dict[str, str] = {}  # and those whose chains stand, for the sake of aliases
        conflict: _Foreign | None = None
        for target in decision.targets:
            if target not in binder.chains and split_target(target)[0] not in loaded:
                continue
            found = _foreign_on(target, decision, plan, binder, overridden)
            if found is None:
                continue
            if not found.what:
                skipped[target] = ""
            elif found.value is not None and is_tried(target, decision, plan):
                binder.found.open[id, target] = Question(id, target, target, found.value, found.who)
                skipped[target] = found.who
            elif decision.wiring is not None and target in decision.wiring.skippable:
                skipped[target] = found.who
            else:
                conflict = found
                break
        conflict = conflict or _without_any(decision, skipped, binder) or _cut_off(decision, plan, binder)
        if conflict is not None:
            decisions[id] = replace(
                decision, action="conflict", reason=conflict.what, remedy=conflict.remedy, without_conflict=decision
            )
        elif skipped.keys() - overridden.keys():
            kept = {target: who for target, who in skipped.items() if target not in overridden}
            decisions[id] = replace(decision, skipped=kept, without_conflict=decision)
    if decisions != plan.decisions:
        plan = replace(plan, decisions=decisions)
    return plan, binder.found


def _without_any(decision: Decision, skipped: Mapping[str, str], binder: Records) -> _Foreign | None:
    """A patch can do without each of its targets, and not without all."""
    if not skipped or len(skipped) < len(decision.targets) or not all(skipped.values()):
        return None
    if any((decision.id, target) in binder.found.open for target in skipped):
        return None
    who = " and ".join(dict.fromkeys(skipped.values()))
    return _Foreign(who, f"{', '.join(skipped)} hold {who}", remedy_for(decision.id, who))


def _cut_off(decision: Decision, plan: Plan, binder: Records) -> _Foreign | None:
    """The function on the way to a body that keeps every call from it. Doubts and questions go to the binder."""
    for cut in cuts(decision, plan, binder):
        if is_method(cut.way) or is_tried(cut.way, decision, plan):
            binder.found.open.setdefault(
                (decision.id, cut.body), Question(decision.id, cut.body, cut.way, cut.function, cut.who)
            )
        elif not cut.certain:
            binder.found.doubts[decision.id] = (
                cut.body,
                f"{cut.who}, which replaces {cut.way}, leads to {cut.body}",
            )
        elif decision.wiring is None or cut.body not in decision.wiring.skippable:
            return _Foreign(cut.who, str(cut), remedy_for(decision.id, cut.who))
    return None


def _foreign_on(
    target: str, decision: Decision, plan: Plan, binder: Records, overridden: Collection[str]
) -> _Foreign | None:
    """The foreign object that keeps a patch from a target, which is bound, or about to be."""
    if target in binder.chains:
        # It was looked at when it was bound, but for other patches than those that join now.
        if target in overridden:
            return _in_place_of_ours(target, decision, plan, binder)
        return _beneath_ours(target, decision, plan, binder) if binder.found.stands_around(target) else None
    try:
        owner, name, value = binder.resolve(target, target in decision.may_be_missing)
    except BindError as error:
        return _Foreign("nothing", str(error), f"exclude {decision.id}")
    binder.found.seen[target] = value
    if value is MISSING or binder.is_back(owner, name):
        return None
    inner = unwrap(binder.wrappers.beneath(value))
    if decision.fingerprints.get(target) == ABSENT:
        who = describe(unwrap(value))
        return _Foreign(who, f"{target}, which the release lacks, holds {who}", remedy_for(decision.id, who))
    wiring = decision.wiring
    body = (wiring and wiring.inherits(target)) or target
    who = foreign_on(body, inner, plan.environment.sources)
    since = "" if who else binder.put_there_since(owner, name, value)
    if not who and not since and binder.is_not_the_first(target, inner):
        since = describe(inner)
    if since and not is_upstreams(body, inner, plan.environment.sources):
        who = since
    if not who:
        return None
    if target in marks_of(inner):
        return _Foreign(who, "", "")
    found = upstreams_inside(value, body, owner, name, plan, binder)
    certain = any(held.certain for held in found)
    if since and certain:
        return None  # it may be upstream's own, as a decorator has left it, and calls upstream's function in any case
    writable = tuple(held for held in found if held.owner is not None and held.certain)
    # An inherited object also belongs to another class, so this class may not change its inside. A property's
    # function is no property.
    if writable and name in namespace_of(owner) and type(inner) is not property:
        upstream = unwrap(binder.wrappers.beneath(unwrap(writable[0].value)))
        binder.found.wrapped[target] = Wrapped(value, upstream, writable)
        return None
    what = f"{target} holds {who}, which does not call upstream's function"
    hidden = _unless_around(target, body, inner, decision, plan, binder, who, what)
    if hidden is None or (certain and name not in namespace_of(owner)):
        return None
    if found:
        what = f"{target} holds {who}, and shim cannot get beneath it"
        remedy = f"call shim.apply() before {who} is put there" if certain else remedy_in_doubt(decision.id, who)
        return _Foreign(who, what, remedy, inner)
    return hidden


def _unless_around(
    target: str, body: str, inner: Any, decision: Decision, plan: Plan, binder: Records, who: str, what: str
) -> _Foreign | None:
    """A foreign function as an obstacle, unless the patch goes around it."""
    goes, why = may_go_around(target, body, inner, decision, plan)
    if goes:
        binder.found.around[decision.id, target] = Around(who, why)
        return None
    return _Foreign(who, what + (f" and {why}" if why else ""), remedy_for(decision.id, who), inner)


def _beneath_ours(target: str, decision: Decision, plan: Plan, binder: Records) -> _Foreign | None:
    """The consequence for a patch if shim's object on a target goes around a foreign function."""
    inner = unwrap(binder.chains[target].base)
    body = (decision.wiring and decision.wiring.inherits(target)) or target
    who = describe(inner)
    what = f"{target} holds {who}, which does not call upstream's function"
    return _unless_around(target, body, inner, decision, plan, binder, who, what)


def _in_place_of_ours(target: str, decision: Decision, plan: Plan, binder: Records) -> _Foreign | None:
    """The consequence if other code has replaced shim's object on a target by one that does not call it."""
    replaced = binder.replaced_targets()[target]
    if replaced.partner is not None or binder.will_be_governed(replaced) or binder.effect_of(replaced) != "replaced":
        return None
    value = replaced.slot.current()
    what = f"{target}: {replaced.slot} {replaced_by(value)}, which does not call shim's function"
    if value is MISSING:
        return _Foreign("nothing", what, remedy_for(decision.id, "nothing"))
    body = (decision.wiring and decision.wiring.inherits(target)) or target
    first = target in binder.first and not binder.is_not_the_first(target, unwrap(value))
    if first or is_upstreams(body, unwrap(value), plan.environment.sources):
        binder.found.renewed[target] = (
            value  # the object beneath shim's, mostly a foreign function, has been taken back
        )
        binder.found.around.pop((decision.id, target), None)
        return None
    who = describe(unwrap(value))
    hidden = _unless_around(target, body, unwrap(value), decision, plan, binder, who, what)
    if hidden is None:
        binder.found.renewed[target] = value
    return hidden


def remedy_in_doubt(id: str, who: str) -> str:
    """The remedy for an object whose calls are unknown."""
    return f"let {who} call the original function from one of its own variables, or exclude {id}"


def remedy_for(id: str, who: str) -> str:
    """The remedy for an object that does a patch's work in another way."""
    return f"remove {who} (the patch replaces it), or keep it and exclude {id}"


def remedy_untried(name: str, who: str) -> str:
    """The remedy for an object in the place of `name` that only a trial can judge, of a method one in a model."""
    return f"call shim.check({'model' if is_method(name) else ''}), which tries {who} on a tiny input"


def require_none(plan: Plan, module: str | None) -> None:
    """NotMetError if a required patch of this just imported module is in conflict.

    None: no import. What others have done since apply() is for check() to raise, and not for a report.
    """
    for id in plan.options.require:
        decision = plan[id]
        if decision.action == "conflict" and module in decision.modules:
            raise NotMetError(f"required, but {id} is in conflict: {decision.reason}. Remedy: {decision.remedy}.")


def warnings_for(plan: Plan) -> Iterator[tuple[str, str, str, str]]:
    """For each correctness patch that is not applied, as a whole or on some target: patch, state, reason, warning.

    All patches that have drifted are one warning: on a fork there are many, and one command decides them all.
    """
    correcting = [decision for decision in plan.decisions.values() if decision.kind == "correctness"]
    drifted = [decision for decision in correcting if decision.action == "drifted"]
    if drifted:
        ids = ", ".join(decision.id for decision in drifted)
        is_one = len(drifted) == 1
        who, are = (drifted[0].id, "is") if is_one else (f"{len(drifted)} patches", "are")
        said = drifted[0].reason if is_one else f"{ids}. `shim explain ID` has the reason of each"
        without = plan.matrix.patches[drifted[0].id].without if is_one else ""
        needed = f" If this tree needs it: {without}." if without else ""
        text = f"{who} {are} not applied (drifted): {said}.{needed} Remedy: {_remedies(drifted)}."
        yield who, "drifted", drifted[0].reason if is_one else ids, text
    yield from _in_part([decision for decision in correcting if decision.dropped])
    for decision in correcting:
        if decision.action == "conflict":
            text = (
                f"{decision.id} is not applied (conflict): {decision.reason}. "
                f"{_stays_wrong(plan, decision.id)}Remedy: {decision.remedy}."
            )
            yield decision.id, decision.action, decision.reason, text
        skippable = {} if decision.wiring is None else decision.wiring.skippable
        for target, who in ((target, who) for target, who in decision.skipped.items() if who):
            if is_tried(target, decision, plan):
                text = (
                    f"{decision.id} is applied without {target}, which holds {who}. It is not known whether that has "
                    f"the effect of the patch: {remedy_untried(target, who)}."
                )
                yield decision.id, "not tried", f"without {target}", text
            if target not in skippable or is_tried(target, decision, plan):
                continue
            text = (
                f"{decision.id} is applied without {target}, which holds {who}. "
                f"Unless that does the same: {skippable[target]}. Remedy: {remedy_for(decision.id, who)}."
            )
            yield decision.id, "applied in part", f"without {target}", text


def _in_part(decisions: list[Decision]) -> Iterator[tuple[str, str, str, str]]:
    """One warning for all patches of which bodies are not known that they can do without."""
    if not decisions:
        return
    if len(decisions) == 1:
        [decision] = decisions
        skippable = {} if decision.wiring is None else decision.wiring.skippable
        without, whys = ", ".join(decision.dropped), "; ".join(decision.dropped.values())
        wrong = "; ".join(skippable[target] for target in decision.dropped)
        said = f"{decision.id} is applied without {without}: {whys}. If this tree needs it: {wrong}"
        who = decision.id
    else:
        who, without = f"{len(decisions)} patches", ", ".join(decision.id for decision in decisions)
        said = f"{who} are applied in part: {without}. `shim explain ID` says without what"
    yield who, "applied in part", f"without {without}", f"{said}. Remedy: {_remedies(decisions)}."


def _remedies(drifted: list[Decision]) -> str:
    """The remedies of patches that have drifted, each once, with its patches unless they share it."""
    found: dict[str, list[str]] = {}
    for decision in drifted:
        found.setdefault(decision.remedy, []).append(decision.id)
    if len(found) == 1:
        return next(iter(found))
    return "; ".join(f"of {', '.join(ids)}: {remedy}" for remedy, ids in found.items())


def _stays_wrong(plan: Plan, id: str) -> str:
    """Whether the object in the patch's place does what the patch does was not tried."""
    entry = plan.matrix.patches[id]
    return f"Unless that does the same: {entry.without}. " if entry.without else f"Missing: {entry.summary}. "
