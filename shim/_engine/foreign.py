"""Other people's functions: whose an object is, whether a patch can go around it, and what it keeps from a plan."""

from __future__ import annotations

import ast
import contextlib
import functools
import inspect
import os
import sys
import types
from collections.abc import Iterator, Mapping
from typing import Any

from shim._compatible import marks_of
from shim._engine.chains import Findings, Question, Records, Wrapped
from shim._engine.names import MISSING, Held, Replaced, describe, is_kind, namespace_of, replaced_by, unwrap
from shim._engine.reach import callable_paths, has_code, holds_in_closure, leads_to
from shim._engine.report import is_method, is_tried, remedy_for, remedy_in_doubt
from shim._errors import BindError, SourceError
from shim._planning.decision import Decision
from shim._planning.plan import Plan
from shim._record import record, replace
from shim._releases.fingerprint import (
    ABSENT,
    Definition,
    FunctionNode,
    absolute_origin,
    definitions,
    outline,
    split_target,
)
from shim._releases.sources import Sources

__all__ = [
    "foreign_on",
    "is_upstreams",
    "others_relied_on",
    "with_conflicts",
]


# Whose an object is


def _layers(value: Any) -> Iterator[Any]:
    """The object and the objects it wraps, as functools.wraps records them."""
    seen: set[int] = set()
    while value is not None and id(value) not in seen:
        seen.add(id(value))
        yield value
        value = getattr(value, "__wrapped__", None)


def _is_from(value: Any, path: str, found: list[Definition]) -> bool:
    if not is_kind(value, types.FunctionType):
        return False
    line = value.__code__.co_firstlineno
    return _is_of_file(value, path) and any(first <= line <= last for first, last in (d.lines for d in found))


def _is_plainly(value: Any, path: str, module: str, qualname: str) -> bool:
    """Whether names and file alone prove the object upstream's own. Parsing would take most of apply()'s time."""
    if is_kind(value, types.ModuleType):  # by an import statement of the module
        return value is sys.modules.get(qualname)
    if is_kind(value, property):
        value = value.fget
    if is_kind(value, type):
        return bool(value.__module__ == module and value.__qualname__ == qualname)
    # A cache around a function changes no call of it, whoever put it there.
    if type(value) is functools._lru_cache_wrapper:
        value = value.__wrapped__
    # A decorator of torch or of upstream's own package, such as torch.no_grad().
    while is_kind(value, types.FunctionType) and "__wrapped__" in vars(value):
        if _package(_decorator_of(value)) not in ("torch", _package(module)):
            break
        value = value.__wrapped__
    # From Python 3.11 on byte code has the qualified name, which no decorator copies to a wrapper.
    name = getattr(value.__code__, "co_qualname", None) if is_kind(value, types.FunctionType) else None
    return name == qualname and _is_of_file(value, path)


def _decorator_of(wrapper: types.FunctionType) -> str:
    """The module of the decorator that made a wrapper. For contextlib's, that of the context manager."""
    made_in = _made_in(wrapper)
    if made_in == "contextlib":
        held = [cell.cell_contents for cell in wrapper.__closure__ or ()]
        managers = [value for value in held if is_kind(value, contextlib.ContextDecorator)]
        made_in = next((str(getattr(manager, "func", manager).__module__) for manager in managers), made_in)
    return made_in


def _made_in(value: Any) -> str:
    """The module that has the code of a function, or else defines the type of an object."""
    return str(value.__globals__.get("__name__", "")) if is_kind(value, types.FunctionType) else type(value).__module__


def _is_of_file(function: types.FunctionType, path: str) -> bool:
    # Byte code has the path it was imported by, which may be another spelling of the same path.
    made_in = function.__code__.co_filename
    return made_in == path or os.path.realpath(made_in) == os.path.realpath(path)


def _is_wrapped(definition: Definition) -> bool:
    """Whether a decorator may have replaced the function in the source by another object."""
    plain = ("staticmethod", "classmethod", "property", "setter", "getter", "deleter", "abstractmethod")
    decorators = getattr(definition.node, "decorator_list", ())
    return any((getattr(d, "attr", None) or getattr(d, "id", None)) not in plain for d in decorators)


def _may_come_of(value: Any, module: str, found: list[Definition]) -> bool:
    """Whether upstream's decorators may have made `value`: its code is from upstream's or a decorator's package.

    True also if a decorator cannot be resolved.
    """
    if is_kind(value, functools.partial):
        return False  # else any functools decorator would explain a partial
    namespace = vars(sys.modules[module]) if module in sys.modules else {}
    packages = {_package(module)}
    for definition in found:
        for decorator in getattr(definition.node, "decorator_list", ()):
            name: ast.expr = decorator.func if isinstance(decorator, ast.Call) else decorator
            while isinstance(name, ast.Attribute):
                name = name.value
            if not isinstance(name, ast.Name) or name.id not in namespace:
                return True
            packages.update(map(_package, _homes_of(namespace[name.id])))
    made_in = _decorator_of(value) if is_kind(value, types.FunctionType) else _made_in(value)
    return _package(made_in) in packages


def _homes_of(value: Any) -> Iterator[str]:
    """The module that defines a decorator, or the object whose attribute the decorator is; and that of its code.

    The code of what contextlib.contextmanager made, and of its wrappers, is contextlib's.
    """
    if is_kind(value, types.ModuleType):
        yield str(namespace_of(value).get("__name__", ""))  # an attribute read would load a lazy module
        return
    yield str(getattr(value, "__module__", None) or type(value).__module__)
    if is_kind(value, types.FunctionType):
        yield str(value.__globals__.get("__name__", ""))


def _package(module: str) -> str:
    """The package that a module belongs to; megatron is a namespace that several distributions share."""
    return ".".join(module.split(".")[: 2 if module.startswith("megatron.") else 1])


def _defining(target: str, sources: Sources) -> tuple[str, str]:
    """The module and the name that define a target; its own, unless its module imports the name.

    SourceError as for trees.
    """
    module, qualname = split_target(target)
    seen: set[tuple[str, str]] = set()
    while "." not in qualname and (module, qualname) not in seen:
        seen.add((module, qualname))
        homes = {_imported_from(each.node, module, qualname, sources) for each in outline(sources, module, qualname)}
        if len(homes) != 1 or None in homes:
            break
        ((module, qualname),) = filter(None, homes)
    return module, qualname


def _imported_from(node: ast.stmt, module: str, name: str, sources: Sources) -> tuple[str, str] | None:
    """The module and the name that this statement of a module imports as `name`."""
    if not isinstance(node, ast.ImportFrom):
        return None
    home = absolute_origin(sources, module, node)
    imported = next(alias.name for alias in node.names if (alias.asname or alias.name) == name)
    return None if home is None else (home, imported)


def _takes_the_same(target: str, value: Any, sources: Sources) -> bool:
    """Whether a function has all parameters of upstream's definition by name: factories look for them."""
    try:
        module, qualname = _defining(target, sources)
        found = definitions(sources.tree(module), qualname)
        mine = inspect.signature(value).parameters.keys()
    except (SourceError, TypeError, ValueError):
        return False
    theirs = [d.node.args for d in found if isinstance(d.node, (ast.FunctionDef, ast.AsyncFunctionDef))]
    names = [{a.arg for a in (*args.posonlyargs, *args.args, *args.kwonlyargs)} for args in theirs]
    return any(wanted <= mine for wanted in names)


def is_upstreams(target: str, value: Any, sources: Sources) -> bool:
    """Whether `value` is what upstream defines as `target`, decorators included. False if the origin is unknown."""
    return callable(value) and _is_its_own(target, value, sources) is True


def foreign_on(target: str, value: Any, sources: Sources) -> str:
    """The foreign object on `target`, in words; "" if the object is upstream's own or its origin is unknown."""
    if _is_its_own(target, value, sources) is not False:
        return ""
    value = value.fget if is_kind(value, property) else value
    # Not contextlib's or upstream's wrapper around it.
    passed = ("contextlib", _package(target.partition(":")[0]))
    return describe(next((layer for layer in _layers(value) if _package(_made_in(layer)) not in passed), value))


def _is_its_own(target: str, value: Any, sources: Sources) -> bool | None:
    """Whether an object is what upstream defines as `target`. None if its origin is unknown.

    A function or property is upstream's own if its code is in the file and at the lines of the target's definition. If
    the definition has decorators, the wrapped functions are compared, and each object around upstream's must be from
    upstream's package or from a decorator's. A name that a module imports from another is looked up there. The origin
    of what a module computes is unknown.
    """
    module, qualname = split_target(target)
    try:
        path = sources.path(module)
        if path is not None and _is_plainly(value, path, module, qualname):
            return True
        home = _defining(target, sources)
        if home != (module, qualname):
            return _is_its_own(":".join(home), value, sources)
        found = outline(sources, module, qualname)
    except SourceError:
        return None
    if path is None or not found or not all(isinstance(d.node, (*FunctionNode, ast.ClassDef)) for d in found):
        return None
    decorated = any(map(_is_wrapped, found))
    if is_kind(value, type):
        mine = value.__module__ == module and value.__qualname__ == qualname
        return True if mine else None if decorated else False
    if is_kind(value, property):
        value = value.fget
    if not decorated:
        return _is_from(value, path, found)
    layers = list(_layers(value))
    for layer in layers:
        if _is_from(layer, path, found):
            return True
        if not _may_come_of(layer, module, found):
            return False
    # An object that hides the function it wraps has an unknown origin.
    return None if not is_kind(value, types.FunctionType) and len(layers) == 1 else False


# Whether a call still reaches a body, if a foreign function stands on its way there or in its place
#
# `reached_by` in the matrix names the ways: the functions and methods through which a call comes. "Applied" is what a
# call reaches, so a patch whose target is bound, and which nothing calls any more, is not applied. Of a body that a
# patch `reads`, a report says who has replaced it.


def _cut(body: str, way: str, decision: Decision, plan: Plan, binder: Records) -> tuple[Question, bool] | None:
    """The foreign function on a way to a body, if it does not lead there; False: reading does not tell."""
    if binder.loaded(split_target(way)[0]) is None or binder.loaded(split_target(body)[0]) is None:
        return None
    try:
        owner, name, value = binder.resolve(way)
        _, _, target = binder.resolve(body)
    except BindError:
        return None
    inner = unwrap(binder.beneath(value))
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
    bound, upstreams = unwrap(target), unwrap(binder.beneath(target))
    # shim also binds names that a module has imported. A function in a closure stays upstream's.
    stale = body in decision.targets and holds_in_closure(inner, upstreams)
    if not stale and leads_to(inner, (bound, upstreams)):
        return None
    return Question(decision.id, body, way, inner, who), stale or (not held and has_code(inner))


def upstreams_inside(value: Any, body: str, owner: Any, name: str, plan: Plan, binder: Records) -> list[Held]:
    """The places from which a foreign object calls upstream's function, or shim's of an earlier plan."""

    def wanted(held: Any) -> bool:
        return is_upstreams(body, unwrap(binder.beneath(held)), plan.environment.sources)

    return callable_paths(value, owner, name, wanted, binder.is_ours)


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
        value = binder.resolve(body)[2]
    except BindError:
        return ""  # upstream defines some names only beside Transformer Engine
    return foreign_on(body, unwrap(binder.beneath(value)), plan.environment.sources)


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


def with_conflicts(plan: Plan, binder: Records, ran: frozenset[str]) -> tuple[Plan, Findings]:
    """The plan with what foreign objects keep from it now, and what was found about them. Changes nothing.

    ran: those of the modules that the plan waits for that have run to the end.

    Returns the same plan object if nothing changes.

    A patch is in ``conflict`` if such an object stands on a target that it cannot do without, or on the way to one. No
    part of it is bound then, so that it does not matter who came first. On another target the object costs this target
    only: `Decision.skipped`. So it does if the patch can try the object in a model (`Findings.open`). An object that
    calls upstream's function is no conflict: the binder is told where it holds that function (`Findings.wrapped`). Nor
    is one that the patch can go around (`Findings.around`).
    """
    binder = binder.looking(ran)
    overridden = binder.replaced_targets()
    # What was bound was looked at then. Of it, only what others have replaced since can make a difference.
    settled = binder.chains.keys() - overridden.keys() - {target for _, target in binder.found.around}
    there = binder.chains.keys() | set().union(*(plan.targets_in.get(module, ()) for module in ran))
    hindered: dict[str, Decision] = {}
    for decision in plan.concerned(there - settled):
        looked_at = [target for target in decision.targets if target in there and target not in settled]
        conflict, skipped = _hindrance(looked_at, decision, plan, binder, overridden)
        if conflict is not None:
            hindered[decision.id] = replace(
                decision, action="conflict", reason=conflict.what, remedy=conflict.remedy, without_conflict=decision
            )
        elif skipped.keys() - overridden.keys():
            kept = {target: who for target, who in skipped.items() if target not in overridden}
            hindered[decision.id] = replace(decision, skipped=kept, without_conflict=decision)
    decisions = {**plan.unhindered, **hindered}
    if decisions != plan.decisions:
        plan = replace(plan, decisions=decisions)
    return plan, binder.found


def _hindrance(
    targets: list[str], decision: Decision, plan: Plan, binder: Records, overridden: Mapping[str, Replaced]
) -> tuple[_Foreign | None, dict[str, str]]:
    """What keeps all of a patch from these targets; else the targets that it does without, and who holds each.

    Among them are those whose chains stand, for the sake of aliases.
    """
    skipped: dict[str, str] = {}
    for target in targets:
        found = _foreign_on(target, decision, plan, binder, overridden)
        if found is None:
            continue
        if found.what and found.value is not None and is_tried(target, decision, plan):
            binder.found.open[decision.id, target] = Question(decision.id, target, target, found.value, found.who)
        elif found.what and (decision.wiring is None or target not in decision.wiring.skippable):
            return found, {}
        skipped[target] = found.who if found.what else ""
    # It can do without each of its targets, and not without all.
    all_held = len(skipped) == len(decision.targets) and all(skipped.values())
    if skipped and all_held and not any((decision.id, target) in binder.found.open for target in skipped):
        who = " and ".join(dict.fromkeys(skipped.values()))
        return _Foreign(who, f"{', '.join(skipped)} hold {who}", remedy_for(decision.id, who)), {}
    return _cut_off(decision, plan, binder) if decision.reached_by else None, skipped


def _cut_off(decision: Decision, plan: Plan, binder: Records) -> _Foreign | None:
    """The function on the way to a body that keeps every call from it. Doubts and questions go to the binder."""
    for body, way in ((body, way) for body, ways in decision.reached_by.items() for way in ways):
        cut = _cut(body, way, decision, plan, binder)
        if cut is None:
            continue
        question, certain = cut
        who = question.who
        if is_method(way) or is_tried(way, decision, plan):
            binder.found.open.setdefault((decision.id, body), question)
        elif not certain:
            binder.found.doubts[decision.id] = f"{who}, which replaces {way}, leads to {body}"
        elif decision.wiring is None or body not in decision.wiring.skippable:
            what = f"{way} was replaced by {who}, which does not lead to {body}"
            return _Foreign(who, what, remedy_for(decision.id, who))
    return None


def _foreign_on(
    target: str, decision: Decision, plan: Plan, binder: Records, overridden: Mapping[str, Replaced]
) -> _Foreign | None:
    """The foreign object that keeps a patch from a target, which is bound, or about to be."""
    if target in binder.chains:
        # It was looked at when it was bound, but for other patches than those that join now.
        if target in overridden:
            return _in_place_of_ours(target, overridden[target], decision, plan, binder)
        inner = binder.chains[target].beneath
        return _unless_around(target, inner, decision, plan, binder, describe(inner))
    try:
        owner, name, value = binder.resolve(target, target in decision.may_be_missing)
    except BindError as error:
        return _Foreign("nothing", str(error), f"exclude {decision.id}")
    replaced = binder.replaced.get((id(owner), name))
    if value is MISSING or (replaced is not None and binder.is_back(replaced)):
        return None
    inner = unwrap(binder.beneath(value))
    if decision.fingerprints.get(target) == ABSENT:
        who = describe(unwrap(value))
        return _Foreign(who, f"{target}, which the release lacks, holds {who}", remedy_for(decision.id, who))
    body = _body_of(target, decision)
    who = foreign_on(body, inner, plan.environment.sources)
    put_there = replaced is not None and replaced.partner is None
    since = describe(unwrap(value)) if put_there and not who else ""
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
        upstream = unwrap(binder.beneath(unwrap(writable[0].value)))
        binder.found.wrapped[target] = Wrapped(value, upstream, writable)
        return None
    hidden = _unless_around(target, inner, decision, plan, binder, who)
    if hidden is None or (certain and name not in namespace_of(owner)):
        return None
    if found:
        what = f"{target} holds {who}, and shim cannot get beneath it"
        remedy = f"call shim.apply() before {who} is put there" if certain else remedy_in_doubt(decision.id, who)
        return _Foreign(who, what, remedy, inner)
    return hidden


def _body_of(target: str, decision: Decision) -> str:
    """Whose body stands on a target: its own, or the one that it inherits."""
    return (decision.wiring and decision.wiring.inherits(target)) or target


def _unless_around(
    target: str, inner: Any, decision: Decision, plan: Plan, binder: Records, who: str, what: str = ""
) -> _Foreign | None:
    """A foreign function as an obstacle, unless the patch goes around it, whoever came first.

    It does if the matrix says `wraps`, and the function takes the calls that upstream's takes.
    """
    what = what or f"{target} holds {who}, which does not call upstream's function"
    if decision.wiring is not None and target in decision.wiring.wraps_any:
        if _takes_the_same(_body_of(target, decision), inner, plan.environment.sources):
            binder.found.around[decision.id, target] = who
            return None
        what += " and takes other arguments than upstream's"
    return _Foreign(who, what, remedy_for(decision.id, who), inner)


def _in_place_of_ours(
    target: str, replaced: Replaced, decision: Decision, plan: Plan, binder: Records
) -> _Foreign | None:
    """The consequence if other code has replaced shim's object on a target by one that does not call it."""
    if replaced.partner is not None or binder.will_be_governed(replaced) or binder.effect_of(replaced) != "replaced":
        return None
    value = replaced.slot.current()
    what = f"{target}: {replaced.slot} {replaced_by(value)}, which does not call shim's function"
    if value is MISSING:
        return _Foreign("nothing", what, remedy_for(decision.id, "nothing"))
    inner, hidden = unwrap(value), None
    if is_upstreams(_body_of(target, decision), inner, plan.environment.sources):
        # The object beneath shim's, mostly a foreign function, has been taken back.
        binder.found.around.pop((decision.id, target), None)
    else:
        hidden = _unless_around(target, inner, decision, plan, binder, describe(inner), what)
    if hidden is None:
        binder.found.renewed[target] = value
    return hidden
