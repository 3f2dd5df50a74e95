"""Whether a call still reaches a body, if a foreign function stands on its way there or in its place.

`reached_by` in the matrix names the ways: the functions and methods through which a call comes. "Applied" is what a
call reaches, so a patch whose target is bound, and which nothing calls any more, is not applied. Of a body that a patch
`reads`, a report says who has replaced it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from shim._compatible import marks_of
from shim._engine.aliases import unwrap
from shim._engine.chain import Held
from shim._engine.foreign import foreign_on, is_upstreams
from shim._engine.reach import callable_paths, has_code, holds_in_closure, leads_to
from shim._engine.records import Records
from shim._errors import BindError
from shim._planning.decision import Decision
from shim._planning.plan import Plan
from shim._record import record
from shim._releases.fingerprint import split_target

__all__ = ["Cut", "cuts", "others_relied_on", "upstreams_inside"]


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
    # Upstream's own function leads there, by the patches' contracts. It is compared once, because its file is read.
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
