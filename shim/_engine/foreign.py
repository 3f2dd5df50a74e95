"""Other people's functions: whose an object is, and whether a patch can go around it."""

from __future__ import annotations

import ast
import functools
import inspect
import os
import sys
import types
from collections.abc import Iterator
from typing import Any

from shim._engine.names import describe, is_kind, namespace_of
from shim._errors import SourceError
from shim._planning.decision import Decision
from shim._planning.plan import Plan
from shim._record import record
from shim._releases.fingerprint import Definition, absolute_origin, definitions, outline, split_target
from shim._releases.sources import Sources

__all__ = ["Around", "Question", "foreign_on", "is_method", "is_tried", "is_upstreams", "may_go_around"]


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
    if is_kind(value, property):
        value = value.fget
    if is_kind(value, type):
        return bool(value.__module__ == module and value.__qualname__ == qualname)
    if is_kind(value, types.FunctionType) and value.__globals__.get("__name__", "").startswith("torch."):
        value = getattr(value, "__wrapped__", None)  # as under torch.no_grad()
    # From Python 3.11 on byte code has the qualified name, which no decorator copies to a wrapper.
    name = getattr(value.__code__, "co_qualname", None) if is_kind(value, types.FunctionType) else None
    return name == qualname and _is_of_file(value, path)


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
            packages.add(_package(_home_of(namespace[name.id])))
    made_in = value.__globals__.get("__name__", "") if is_kind(value, types.FunctionType) else type(value).__module__
    return _package(made_in) in packages


def _home_of(value: Any) -> str:
    """The module that defines a decorator, or the object whose attribute the decorator is."""
    if is_kind(value, types.ModuleType):
        return str(namespace_of(value).get("__name__", ""))  # an attribute read would load a lazy module
    return str(getattr(value, "__module__", None) or type(value).__module__)


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


def is_upstreams(target: str, value: Any, sources: Sources) -> bool:
    """Whether `value` is what upstream defines as `target`, decorators included. False if the origin is unknown."""
    if not callable(value):
        return False
    try:
        module, qualname = _defining(target, sources)
        path = sources.path(module)
        if path is None:
            return False
        found = outline(sources, module, qualname)
    except SourceError:
        return False
    if not any(map(_is_wrapped, found)):
        return _is_from(value, path, found)
    return _may_come_of(value, module, found) and any(_is_from(layer, path, found) for layer in _layers(value))


def takes_the_same(target: str, value: Any, sources: Sources) -> bool:
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


def foreign_on(target: str, value: Any, sources: Sources) -> str:
    """The foreign object on `target`, in words; "" if the object is upstream's own or its origin is unknown.

    A function or property is upstream's own if its code is in the file and at the lines of the target's definition. If
    the definition has decorators, the wrapped functions are compared, and the outermost object must be from upstream's
    package or from a decorator's. A name that a module imports from another is looked up there. The origin of what a
    module computes is unknown.
    """
    module, qualname = split_target(target)
    try:
        path = sources.path(module)
        if path is not None and _is_plainly(value, path, module, qualname):
            return ""
        home = _defining(target, sources)
        if home != (module, qualname):
            return foreign_on(":".join(home), value, sources)
        found = outline(sources, module, qualname)
    except SourceError:
        return ""
    nodes = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    if path is None or not found or not all(isinstance(d.node, nodes) for d in found):
        return ""
    decorated = any(map(_is_wrapped, found))
    if is_kind(value, type):
        mine = value.__module__ == module and value.__qualname__ == qualname
        return "" if mine or decorated else describe(value)
    if is_kind(value, property):
        value = value.fget
    if decorated:
        layers = list(_layers(value))
        if not _may_come_of(value, module, found):
            return describe(value)
        # An object that hides the function it wraps has an unknown origin.
        hidden = not is_kind(value, types.FunctionType) and len(layers) == 1
        return "" if hidden or any(_is_from(layer, path, found) for layer in layers) else describe(value)
    return "" if _is_from(value, path, found) else describe(value)


# May a patch go around a foreign function in the place of upstream's, or try it?
#
# Both orders ask here, of a function that was there first and of one that came after shim, so that both end alike.


@record
class Around:
    """A foreign function that a target stands around, in words, and why shim takes it."""

    who: str
    why: str


@record
class Question:
    """Whether a patch has its effect with a foreign function in the place of a method. Only a model can tell.

    target: what the patch binds or relies on.    method: where the function stands, which may be on the way to it.
    """

    patch: str
    target: str
    method: str
    function: Any
    who: str


def is_method(name: str) -> bool:
    """Whether ``module:qualname`` is an attribute of a class."""
    return "." in split_target(name)[1]


def is_tried(target: str, decision: Decision, plan: Plan) -> bool:
    """Whether the patch has a way to try a foreign function on a target."""
    return target in plan.matrix.patches[decision.id].probe


def may_go_around(target: str, body: str, inner: Any, decision: Decision, plan: Plan) -> tuple[bool, str]:
    """Whether the factory of a target holds around a foreign function, and why, or why not ("": it never does).

    It does if the matrix says `wraps`, and the function takes the calls that upstream's takes. body: see
    Variant.inherits.
    """
    wiring = decision.wiring
    if wiring is None or target not in wiring.wraps_any:
        return False, ""
    if not takes_the_same(body, inner, plan.environment.sources):
        return False, "takes other arguments than upstream's"
    return True, "takes the same arguments"
