"""What a function holds: the places inside of somebody else's object from which it can call another function."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Iterator
from typing import Any

from shim._engine.aliases import namespace_of, unwrap
from shim._engine.chain import Held

__all__ = ["reached"]

# Bounds for what a foreign object may hold. Wrappers of trainers hold a handful of objects.
LIMIT = 300  # objects looked at
ENTRIES = 200  # of a container

_Names = tuple[frozenset[str], frozenset[str]]  # globals and attributes that byte code reads


def reached(
    value: Any, owner: Any, name: str, wanted: Callable[[Any], bool], ours: Callable[[Any], bool]
) -> list[Held]:
    """The places from which `value` can call an object that is `wanted`.

    Looks at closures, defaults, the globals that the code reads, attributes of callable objects, and containers, one
    level deep. An object found in a container or in an attribute that the code does not name is not `certain`: nobody
    knows whether it is called. Which branch of the code runs is not followed.

    owner, name: where `value` stands. Of a class, the other attributes that the code reads count too: trainers keep the
        earlier method there. Globals and such attributes are followed further only if they have this name or wrap
        something.
    ours: whether shim made an object. What lies inside that is for shim's factories only.
    """
    found: list[Held] = []
    waiting: list[tuple[Any, bool]] = [(unwrap(value), True)]
    seen: set[int] = {id(waiting[0][0])}
    while waiting and len(seen) < LIMIT:
        holder, certain = waiting.pop(0)
        for held, follow in _inside(holder, owner, name):
            inner = unwrap(held.value)
            place = held if certain else Held(held.owner, held.name, held.value, False)
            if wanted(inner):
                found.append(place)
            elif follow and id(inner) not in seen and not ours(inner):
                seen.add(id(inner))
                waiting.append((inner, place.certain))
    return found


def _inside(holder: Any, owner: Any, name: str) -> Iterator[tuple[Held, bool]]:
    """What `holder` holds, and whether to follow each further. `owner` is None where shim cannot write."""
    kind = type(holder)
    if kind is types.FunctionType:
        yield from _in_function(holder, owner, name)
    elif kind is types.MethodType:
        yield Held(None, "", holder.__func__, True), True
    elif kind is property:
        yield Held(None, "", holder.fget, True), True
    elif issubclass(kind, functools.partial):
        for value in (holder.func, *holder.args, *holder.keywords.values()):
            yield Held(None, "", value, value is holder.func), _is_followed(value)
    elif issubclass(kind, (dict, list, tuple)):
        values = list(holder.values() if issubclass(kind, dict) else holder)[:ENTRIES]
        yield from ((Held(None, "", value, False), type(value) is types.FunctionType) for value in values)
    elif not issubclass(kind, (type, types.ModuleType, types.BuiltinFunctionType)):
        yield from _in_object(holder)


def _in_function(function: types.FunctionType, owner: Any, name: str) -> Iterator[tuple[Held, bool]]:
    code = function.__code__
    for cell in function.__closure__ or ():
        try:
            value = cell.cell_contents
        except ValueError:  # it is still empty
            continue
        yield Held(cell, "cell_contents", value, not _is_container(value)), _is_followed(value)
    for value in (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()):
        yield Held(None, "", value, not _is_container(value)), _is_followed(value)
    globals_read, attributes_read = _names_in(code)
    for read in globals_read & function.__globals__.keys():
        value = function.__globals__[read]
        yield Held(None, "", value, not _is_container(value)), _is_container(value) or _is_earlier(value, name)
    attributes = namespace_of(owner) if issubclass(type(owner), type) else {}
    for read in (attributes_read & attributes.keys()) - {name}:
        yield Held(owner, read, attributes[read], True), _is_earlier(unwrap(attributes[read]), name)
    # functools.wraps leaves this attribute, also where the code never calls the function.
    if "__wrapped__" in attributes_read and hasattr(function, "__wrapped__"):
        yield Held(function, "__wrapped__", function.__wrapped__, True), True


def _in_object(holder: Any) -> Iterator[tuple[Held, bool]]:
    """The attributes of a callable object, or of one that a function keeps others in."""
    wrapper = getattr(holder, "_self_wrapper", None)
    if wrapper is not None:  # of wrapt: wrapper(wrapped, instance, args, kwargs)
        value = getattr(holder, "__wrapped__", None)
        code = getattr(wrapper, "__code__", None)
        yield Held(holder, "__wrapped__", value, code is not None and _reads_first(code)), True
        return
    try:
        attributes = object.__getattribute__(holder, "__dict__")
    except AttributeError:
        return
    call = next((c.__dict__["__call__"] for c in type(holder).__mro__ if "__call__" in c.__dict__), None)
    _, named = _names_in(call.__code__) if type(call) is types.FunctionType else (frozenset(), frozenset())
    for attribute, value in list(attributes.items())[:ENTRIES]:
        certain = attribute in named and not _is_container(value)
        yield Held(holder, attribute, value, certain), _is_followed(value)


def _is_earlier(value: Any, name: str) -> bool:
    """Whether an object may be what somebody found under the name before."""
    named = getattr(value, "__name__", None) == name
    return type(value) is types.FunctionType and (named or hasattr(value, "__wrapped__"))


def _is_followed(value: Any) -> bool:
    return callable(value) or _is_container(value) or type(value).__dict__.get("__call__") is not None


def _is_container(value: Any) -> bool:
    return issubclass(type(value), (dict, list, tuple))


@functools.lru_cache(maxsize=256)
def _names_in(code: types.CodeType) -> _Names:
    """The globals and the attributes that code reads, with the functions defined in it."""
    import dis  # here, because most processes have no foreign object on a target

    names: set[str] = set()
    attributes: set[str] = set()
    for step in dis.get_instructions(code):
        if step.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
            names.add(str(step.argval))
        elif step.opname in ("LOAD_ATTR", "LOAD_METHOD"):
            attributes.add(str(step.argval))
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            inner = _names_in(constant)
            names |= inner[0]
            attributes |= inner[1]
    return frozenset(names), frozenset(attributes)


def _reads_first(code: types.CodeType) -> bool:
    """Whether code reads its first parameter."""
    import dis

    first = code.co_varnames[0] if code.co_argcount else ""
    steps = [step for step in dis.get_instructions(code) if step.opname.startswith("LOAD_")]
    reads = {name for step in steps for name in (step.argval if isinstance(step.argval, tuple) else (step.argval,))}
    return bool(first) and first in reads
