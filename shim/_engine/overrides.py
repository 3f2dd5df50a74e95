"""Overrides of patched methods: where they stand in a model, and what their text says they call."""

from __future__ import annotations

import ast
import functools
import sys
import types
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any

from shim._engine.aliases import namespace_of, unwrap
from shim._engine.texts import texts_of
from shim._record import Record

__all__ = [
    "Override",
    "calls",
    "holds_in_closure",
    "is_readable",
    "is_upstreams",
    "leads_to",
    "overrides_of",
    "reaches",
    "written_of",
]


class Override(Record):
    """A function that an instance runs instead of the method `name` of the class that shim patched.

    function: without descriptor, and not bound.
    does: who overrides what, in words, with file and line.
    beneath: the classes whose methods `super()` finds from there.
    kept: the attributes under which the instance keeps the patched method, as those do who mean to put it back.
    """

    function: Any
    name: str
    does: str
    beneath: tuple[type, ...]
    kept: frozenset[str]


def overrides_of(module: Any, owner: type, name: str, mended: Any) -> Iterator[Override]:
    """The overrides of the method `name` of `owner` that stand between an instance and that class, from the outside."""
    mro, held = type(module).__mro__, getattr(module, "__dict__", {})
    methods = [(key, value) for key, value in held.items() if type(value) is types.MethodType and key != name]
    kept = frozenset(key for key, value in methods if value.__func__ is mended)
    own = held.get(name)
    function = own.__func__ if type(own) is types.MethodType else own
    if own is not None and function is not mended:
        cls = type(module)
        does = f"an instance of {cls.__module__}.{cls.__qualname__} holds a {name} of its own ({_place(function, cls)})"
        yield Override(function, name, does, mro, kept)
    for place, holder in enumerate(mro):
        if holder is owner:
            return
        if name in namespace_of(holder):
            function = unwrap(namespace_of(holder)[name])
            if function is mended:
                return
            where = _place(function, holder)
            does = f"{holder.__module__}.{holder.__qualname__} ({where}) overrides {name}"
            yield Override(function, name, does, mro[place + 1 :], kept)


def _place(function: Any, cls: type) -> str:
    """File and line of a function; the file of `cls` if the function is no Python function."""
    code = getattr(_written(function)[0], "__code__", None)
    if code is not None:
        return f"{code.co_filename}:{code.co_firstlineno}"
    return getattr(sys.modules.get(cls.__module__), "__file__", None) or cls.__module__


UPSTREAM = ("megatron.core.", "transformer_engine.")
DECORATORS = ("torch.", "contextlib", "functools")


DEEPEST = 20  # layers


def _layers(function: Any, mended: Sequence[Any] = ()) -> list[Any]:
    """A function, and what lies beneath each functools.wraps and partial, down to a function of `mended`."""
    found: list[Any] = []
    while function is not None and len(found) < DEEPEST:
        bare = function.__func__ if type(function) is types.MethodType else function
        if found and any(bare is one for one in mended):
            break
        found.append(bare)
        beneath = getattr(bare, "__wrapped__", None)
        function = getattr(bare, "func", None) if beneath is None else beneath
    return found


def _written(function: Any, mended: Sequence[Any] = ()) -> list[Any]:
    """The layers that somebody wrote who is neither upstream nor a maker of decorators; else the innermost.

    Asks for the module in which the code runs, because functools.wraps copies the name of upstream's.
    """
    layers = _layers(function, mended)
    own = [layer for layer in layers if not _module_of(layer).startswith((*UPSTREAM, *DECORATORS))]
    return own or layers[-1:]


def _module_of(layer: Any) -> str:
    """Where the code of a layer runs. A partial has no code, and counts as functools'."""
    known = getattr(layer, "__globals__", None)
    return "functools" if known is None else str(known.get("__name__", ""))


def is_upstreams(override: Override) -> bool:
    """Whether a release itself defines the override, so that it is no other people's code."""
    return _module_of(_written(override.function)[0]).startswith(UPSTREAM)


# What the text of an override says


def calls(override: Override, mended: Sequence[Any]) -> bool:
    """Whether an override calls the method that it overrides, or a function of `mended` itself.

    It does where its text has `super().name`, `Class.name` or an attribute that keeps the method, or where its closure,
    its defaults or its partial hold the method, as those of a wrapper do. Which branch runs is not followed. A text
    that cannot be read calls nothing.
    """
    held = [value for layer in _layers(override.function, mended) for value in _held_by(layer)]
    # Types are asked of type(), because a closure may hold a lazy object.
    bare = [value.__func__ if type(value) is types.MethodType else value for value in held]
    if any(value is function for value in bare for function in mended):
        return True
    return any(
        node.attr in override.kept or (node.attr == override.name and _is_base(node.value, known, override.beneath))
        for function in _written(override.function, mended)
        for known in [_names_known_to(function)]
        for node in _nodes_of(function)
        if isinstance(node, ast.Attribute)
    )


def _held_by(layer: Any) -> Iterator[Any]:
    """What a function has in its closure and its defaults, and a partial as its function and arguments."""
    yield from _closure_of(layer).values()
    yield from getattr(layer, "__defaults__", None) or ()
    yield from (getattr(layer, "__kwdefaults__", None) or {}).values()
    if type(layer) is functools.partial:
        yield from (layer.func, *layer.args, *layer.keywords.values())


def reaches(override: Override, mended: Sequence[Any], depth: int = 3) -> bool:
    """Whether the text of an override names a function of `mended`, or a function whose text does.

    depth: how many functions lie at most between the two. Only functions of modules are followed, by their names.
    """
    return leads_to(override.function, mended, depth)


def leads_to(function: Any, mended: Sequence[Any], depth: int = 3) -> bool:
    """See `reaches`, of any function."""
    seen: set[int] = set()
    return any(_reaches(written, mended, depth, seen) for written in _written(function, mended))


def written_of(function: Any) -> Any:
    """The outermost layer of a function that somebody wrote who is no maker of decorators."""
    return _written(function)[0]


def holds_in_closure(function: Any, held: Any) -> bool:
    """Whether the closure of a function, or of one that it wraps, holds the object itself."""
    return any(value is held for layer in _layers(function) for value in _closure_of(layer).values())


def is_readable(function: Any) -> bool:
    """Whether the text of a function can be read."""
    codes = [getattr(written, "__code__", None) for written in _written(function)]
    return all(code is not None and texts_of(code) for code in codes)


def _reaches(function: Any, mended: Sequence[Any], depth: int, seen: set[int]) -> bool:
    seen.add(id(function))
    known, left = _names_known_to(function), []
    for node in _nodes_of(function):
        value = _value_of(node, known)
        if value is None:
            continue
        if any(value is one for one in mended):
            return True
        if type(value) is types.FunctionType and id(value) not in seen:
            left.append(value)
    return depth > 0 and any(_reaches(_written(value)[0], mended, depth - 1, seen) for value in left)


def _value_of(node: ast.AST, known: Mapping[str, Any]) -> Any:
    """What a name, an attribute of a module, or an import in a text stands for; None if it is nothing of these."""
    if isinstance(node, ast.Name):
        return known.get(node.id)
    if isinstance(node, ast.Attribute) and isinstance(node.value, (ast.Name, ast.Attribute)):
        module = _value_of(node.value, known)
        return namespace_of(module).get(node.attr) if type(module) is types.ModuleType else None
    if isinstance(node, ast.alias):
        module_name, _, name = getattr(node, "whole", "").rpartition(".")
        module = sys.modules.get(module_name)
        return namespace_of(module).get(name) if type(module) is types.ModuleType else None
    return None


def _names_known_to(function: Any) -> Mapping[str, Any]:
    return {**getattr(function, "__globals__", {}), **_closure_of(function)}


def _closure_of(function: Any) -> dict[str, Any]:
    code, cells = getattr(function, "__code__", None), getattr(function, "__closure__", None)
    found: dict[str, Any] = {}
    for name, cell in zip(code.co_freevars, cells, strict=True) if code is not None and cells else ():
        try:
            found[name] = cell.cell_contents
        except ValueError:  # it is still empty
            continue
    return found


def _nodes_of(function: Any) -> tuple[ast.AST, ...]:
    code = getattr(function, "__code__", None)
    return () if code is None else _nodes_in(code)


@lru_cache(maxsize=256)  # by the code and not by the function, whose closure could keep a model alive
def _nodes_in(code: types.CodeType) -> tuple[ast.AST, ...]:
    """The names, attributes and imports in the text of a function. Each import tells its module, in `whole`."""
    found: list[ast.AST] = []
    for node in (node for text in texts_of(code) for node in ast.walk(text)):
        if isinstance(node, (ast.Attribute, ast.Name)):
            found.append(node)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            for alias in node.names:
                alias.whole = f"{node.module}.{alias.name}"  # type: ignore[attr-defined]
                found.append(alias)
    return tuple(found)


def _is_base(node: ast.expr, known: Mapping[str, Any], bases: Iterable[type]) -> bool:
    """Whether an expression is `super(...)`, or the name of a base class, with its module or without."""
    if isinstance(node, ast.Call):
        return isinstance(node.func, ast.Name) and node.func.id == "super"
    if isinstance(node, ast.Attribute):
        return node.attr in {base.__name__ for base in bases}
    return isinstance(node, ast.Name) and any(known.get(node.id) is base for base in bases)
