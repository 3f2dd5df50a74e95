"""Whether the object on a target is upstream's own or other code's patch."""

from __future__ import annotations

import ast
import functools
import inspect
import os
import sys
import types
from collections.abc import Iterator
from typing import Any

from shim._engine.aliases import namespace_of
from shim._errors import SourceError
from shim._printing.printable import one_line
from shim._releases.fingerprint import Definition, absolute_origin, definitions, outline, split_target
from shim._releases.sources import Sources

__all__ = ["describe", "foreign_on", "is_upstreams", "takes_the_same"]


DESCRIBED = 400  # characters


def _is(value: Any, kind: type | tuple[type, ...]) -> bool:
    """Whether the type of `value` is a `kind`. isinstance would also accept a proxy."""
    return issubclass(type(value), kind)


def describe(value: Any) -> str:
    """Module, name and file of an object, for messages: one printable line, with any name."""
    return one_line(_described(value), DESCRIBED)


def _described(value: Any) -> str:
    if not _is(value, (types.FunctionType, types.BuiltinFunctionType, type)):
        kind = type(value)
        text = f"{kind.__module__}.{kind.__qualname__}"
        # The function inside a wrapt.FunctionWrapper, a partial or a property says more than the type.
        names = ("_self_wrapper", "func", "fget")
        inner = next((found for name in names if _is(found := getattr(value, name, None), types.FunctionType)), None)
        return text if inner is None else f"{text} with {_described(inner)}"
    code = getattr(value, "__code__", None)
    if not isinstance(code, types.CodeType):
        return f"{getattr(value, '__module__', None) or type(value).__module__}.{value.__qualname__}"
    # functools.wraps copies names. Globals and byte code keep those of the wrapper.
    module = value.__globals__.get("__name__") or value.__module__
    name = getattr(code, "co_qualname", code.co_name)
    return f"{module}.{name} in {code.co_filename}:{code.co_firstlineno}"


def _layers(value: Any) -> Iterator[Any]:
    """The object and the objects it wraps, as functools.wraps records them."""
    seen: set[int] = set()
    while value is not None and id(value) not in seen:
        seen.add(id(value))
        yield value
        value = getattr(value, "__wrapped__", None)


def _is_from(value: Any, path: str, found: list[Definition]) -> bool:
    if not _is(value, types.FunctionType):
        return False
    line = value.__code__.co_firstlineno
    return _is_of_file(value, path) and any(first <= line <= last for first, last in (d.lines for d in found))


def _is_plainly(value: Any, path: str, module: str, qualname: str) -> bool:
    """Whether names and file alone prove the object upstream's own. Parsing would take most of apply()'s time."""
    if _is(value, property):
        value = value.fget
    if _is(value, type):
        return bool(value.__module__ == module and value.__qualname__ == qualname)
    if _is(value, types.FunctionType) and value.__globals__.get("__name__", "").startswith("torch."):
        value = getattr(value, "__wrapped__", None)  # as under torch.no_grad()
    # From Python 3.11 on byte code has the qualified name, which no decorator copies to a wrapper.
    name = getattr(value.__code__, "co_qualname", None) if _is(value, types.FunctionType) else None
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
    if _is(value, functools.partial):
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
    made_in = value.__globals__.get("__name__", "") if _is(value, types.FunctionType) else type(value).__module__
    return _package(made_in) in packages


def _home_of(value: Any) -> str:
    """The module that defines a decorator, or the object whose attribute the decorator is."""
    if _is(value, types.ModuleType):
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
    if _is(value, type):
        mine = value.__module__ == module and value.__qualname__ == qualname
        return "" if mine or decorated else describe(value)
    if _is(value, property):
        value = value.fget
    if decorated:
        layers = list(_layers(value))
        if not _may_come_of(value, module, found):
            return describe(value)
        # An object that hides the function it wraps has an unknown origin.
        hidden = not _is(value, types.FunctionType) and len(layers) == 1
        return "" if hidden or any(_is_from(layer, path, found) for layer in layers) else describe(value)
    return "" if _is_from(value, path, found) else describe(value)
