"""Overrides of patched methods: where they stand in a model, and whether they call what they override."""

from __future__ import annotations

import sys
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from shim._engine.aliases import namespace_of, unwrap
from shim._engine.code_reads import Read, is_attribute, reads_of
from shim._engine.reach import held_by, layers_of, value_of, written_layers_of, written_of
from shim._record import record

__all__ = ["Override", "calls", "overrides_of"]


@record
class Override:
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


def overrides_of(module: Any, owner: type, name: str, fixed: Any, beneath: Callable[[Any], Any]) -> Iterator[Override]:
    """The overrides of the method `name` of `owner` that stand between an instance and that class, from the outside.

    beneath: what lies beneath a function of shim's; None if it is shim's alone. What shim binds overrides nothing.
    """
    mro, held = type(module).__mro__, getattr(module, "__dict__", {})
    methods = [(key, value) for key, value in held.items() if type(value) is types.MethodType and key != name]
    kept = frozenset(key for key, value in methods if value.__func__ is fixed)
    own = held.get(name)
    function = own.__func__ if type(own) is types.MethodType else own
    if own is not None and function is not fixed:
        cls = type(module)
        does = f"an instance of {cls.__module__}.{cls.__qualname__} holds another {name} ({_place(function, cls)})"
        yield Override(function, name, does, mro, kept)
    for place, holder in enumerate(mro):
        if holder is owner:
            return
        if name in namespace_of(holder):
            function = unwrap(namespace_of(holder)[name])
            if function is fixed:
                return
            function = unwrap(beneath(function))
            if function is None:
                continue
            where = _place(function, holder)
            does = f"{holder.__module__}.{holder.__qualname__} ({where}) overrides {name}"
            yield Override(function, name, does, mro[place + 1 :], kept)


def _place(function: Any, cls: type) -> str:
    """File and line of a function; the file of `cls` if the function is no Python function."""
    code = getattr(written_of(function), "__code__", None)
    if code is not None:
        return f"{code.co_filename}:{code.co_firstlineno}"
    return getattr(sys.modules.get(cls.__module__), "__file__", None) or cls.__module__


def calls(override: Override, fixed: Sequence[Any]) -> bool:
    """Whether an override calls the method that it overrides, or a function of `fixed` itself.

    It does if its code reads `super().name`, `Class.name` or an attribute that keeps the method, or if its closure,
    its defaults or its partial hold the method, as those of a wrapper do. Which branch runs is not followed. An object
    without code calls nothing.
    """
    held = [value for layer in layers_of(override.function, fixed) for value in held_by(layer, 1) if value is not layer]
    # Types are asked of type(), because a closure may hold a lazy object.
    bare = [value.__func__ if type(value) is types.MethodType else value for value in held]
    if any(value is function for value in bare for function in fixed):
        return True
    return any(
        _is_way_to(read, layer, override)
        for layer in written_layers_of(override.function, fixed)
        for read in reads_of(getattr(layer, "__code__", None))
    )


def _is_way_to(read: Read, function: Any, override: Override) -> bool:
    """Whether a path in the code of a function is the overridden method of a base class, or an attribute keeping it."""
    before, last = read[:-1], read[-1]
    if not is_attribute(read) or last not in (override.name, *override.kept):
        return False
    if (
        last in override.kept
        or before == ("super",)
        or any(value_of(before, function) is base for base in override.beneath)
    ):
        return True
    return is_attribute(before) and before[-1] in {base.__name__ for base in override.beneath}
