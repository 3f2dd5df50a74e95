"""What a function holds, reads and calls, by its objects and its byte code. No text is read, and no call is watched.

- `held_by`: the objects inside of a function: its closure, its defaults, what its partials and methods wrap.
- `callable_paths`: the places inside of a foreign object from which it can call another function.
- `leads_to`: whether the code of a function names another function, itself or by functions of modules that it names.
- `layers_of`: a function, and what lies beneath its decorators.    `value_of`: what a path in its code stands for.

Which branch of the code runs is not followed. An object without byte code (`has_code`) tells nothing.
"""

from __future__ import annotations

import dis
import functools
import sys
import types
from collections.abc import Callable, Iterator, Sequence
from importlib.util import resolve_name
from typing import Any

from shim._engine.names import Held, namespace_of, unwrap

__all__ = [
    "Read",
    "attributes_in",
    "callable_paths",
    "has_code",
    "held_by",
    "holds_in_closure",
    "is_attribute",
    "is_releases_own",
    "layers_of",
    "leads_to",
    "reads_first",
    "reads_of",
    "value_of",
    "written_layers_of",
    "written_of",
]


# What byte code reads: the names of globals, closures and locals, the attributes of them, and imports
#
# Byte code is what runs. The text of a function may be gone, or another by now, and names in decorators and defaults
# are not calls.


# How a path begins ("global", "closure", "local", "import", "super", or "" for the result of an expression), the name
# there (none after "super" and ""), and the attributes that follow; of "import" the module and the name in it.
Read = tuple[str, ...]


@functools.lru_cache(maxsize=256)  # by the code and not by the function, whose closure could keep a model alive
def reads_of(code: types.CodeType | None) -> tuple[Read, ...]:
    """The paths that code reads, with the functions defined in it. Each path comes after those that it begins with."""
    if code is None:
        return ()
    inner = [reads_of(constant) for constant in code.co_consts if isinstance(constant, types.CodeType)]
    return tuple(dict.fromkeys(sum(inner, _own_reads_of(code))))


def is_attribute(read: Read) -> bool:
    """Whether a path ends with an attribute."""
    return read[0] != "import" and len(read) > (1 if read[0] in ("", "super") else 2)


def attributes_in(reads: Sequence[Read]) -> frozenset[str]:
    """The attributes that code reads."""
    return frozenset(read[-1] for read in reads if is_attribute(read))


def reads_first(code: types.CodeType) -> bool:
    """Whether code reads its first parameter."""
    known = [read[1] for read in _own_reads_of(code) if read[0] in ("local", "closure")]
    return code.co_argcount > 0 and code.co_varnames[0] in known


_CALLS = ("CALL", "CALL_FUNCTION", "CALL_FUNCTION_EX", "CALL_KW")
_BETWEEN = ("PRECALL", "PUSH_NULL", "EXTENDED_ARG", "CACHE", "NOP", "COPY_FREE_VARS")  # change no value on the stack


def _own_reads_of(code: types.CodeType) -> tuple[Read, ...]:
    found: list[Read] = []
    path: Read = ()  # of the value on the top of the stack
    module = ""  # that an import statement names
    in_super = False  # between `super` and the call of it
    level: Any = 0
    earlier: tuple[Any, Any] = (0, 0)  # the arguments of the two steps before: of an import, its level and its names
    for step in dis.get_instructions(code):
        operation, argument = step.opname, step.argval
        if operation in _BETWEEN:
            continue
        if operation in ("LOAD_ATTR", "LOAD_METHOD"):
            path = (*(path or ("",)), argument)
        elif operation == "LOAD_SUPER_ATTR":
            path, in_super = ("super", argument), False
        elif operation in ("LOAD_GLOBAL", "LOAD_NAME", "LOAD_FROM_DICT_OR_GLOBALS"):
            path, in_super = ("global", argument), in_super or argument == "super"
        elif "LOAD_FAST" in operation:  # some load two, or store one and load another
            names = argument if isinstance(argument, tuple) else (argument,)
            names = names[-1:] if operation.startswith("STORE") else names
            found += [("local", name) for name in names]
            path = ("local", names[-1])
        elif operation.startswith("LOAD_") and operation.endswith(("DEREF", "CLOSURE")):
            path = ("closure", argument)
        elif operation == "IMPORT_NAME":
            level = earlier[0]
            module, path = "." * (level if isinstance(level, int) else 0) + argument, ()
        elif operation == "IMPORT_FROM":
            path = ("import", module, argument)
        elif operation in _CALLS and in_super:
            path, in_super = ("super",), False
        else:
            path = ()
            in_super = in_super and operation == "LOAD_CONST"
        if len(path) > 1:
            found.append(path)
        earlier = (earlier[1], argument)
    return tuple(found)


# Bounds for what a foreign object may hold. Wrappers of trainers hold a handful of objects.
LIMIT = 300  # objects looked at
MOST_HELD = 1000  # the same, of objects that shim's own function holds
ENTRIES = 200  # of a container
DEEPEST = 20  # layers

UPSTREAM = ("megatron.core.", "transformer_engine.")
DECORATORS = ("torch.", "contextlib", "functools")


# Places inside of an object


def callable_paths(
    value: Any, owner: Any, name: str, wanted: Callable[[Any], bool], ours: Callable[[Any], bool]
) -> list[Held]:
    """The places from which `value` can call an object that is `wanted`.

    Looks at closures, defaults, the globals that the code reads, attributes of callable objects, and containers, one
    level deep. An object found in a container or in an attribute that the code does not name is not `certain`: it may
    never be called.

    owner, name: where `value` stands. Of a class, other attributes that the code reads also count: trainers keep the
        earlier method there. Globals and such attributes are followed further only if they have this name or wrap
        something.
    ours: whether shim made an object. What lies inside that is for shim's factories only.
    """
    found: list[Held] = []
    waiting: list[tuple[Any, bool]] = [(unwrap(value), True)]
    seen: set[int] = {id(waiting[0][0])}
    while waiting and len(seen) < LIMIT:
        holder, certain = waiting.pop(0)
        for held, follow in (*_parts_of(holder), *_read_by(holder, owner, name)):
            inner = unwrap(held.value)
            place = held if certain else Held(held.owner, held.name, held.value, False)
            if wanted(inner):
                found.append(place)
            elif follow and id(inner) not in seen and not ours(inner):
                seen.add(id(inner))
                waiting.append((inner, place.certain))
    return found


def held_by(function: Any, depth: int = MOST_HELD, until: Any = None) -> Iterator[Any]:
    """The objects inside of `function`, itself included; not what its code reads elsewhere.

    depth: how deep they lie at most. 1: what the function itself holds.    until: an object that is not looked into.
    """
    seen: set[int] = set()
    left = [(function, depth)]
    while left and len(seen) < MOST_HELD:
        value, deep = left.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        yield value
        # Not dictionaries: one may be the namespace of upstream's module, which references everything.
        if deep and value is not until and not issubclass(type(value), dict):
            left += [(held.value, deep - 1) for held, _ in _parts_of(value)]


def holds_in_closure(function: Any, held: Any) -> bool:
    """Whether the closure of a function, or of one that it wraps, holds the object itself."""
    return any(value is held for layer in layers_of(function) for _, _, value in _cells_of(layer))


def _parts_of(holder: Any) -> Iterator[tuple[Held, bool]]:
    """What `holder` holds, and whether to follow each further. `owner` is None if shim cannot write."""
    kind = type(holder)
    if kind is types.FunctionType:
        for _, cell, value in _cells_of(holder):
            yield Held(cell, "cell_contents", value, not _is_container(value)), _is_followed(value)
        for value in (*(holder.__defaults__ or ()), *(holder.__kwdefaults__ or {}).values()):
            yield Held(None, "", value, not _is_container(value)), _is_followed(value)
    elif kind is types.MethodType:
        yield Held(None, "", holder.__func__, True), True
    elif issubclass(kind, property):
        yield Held(None, "", holder.fget, True), True
    elif issubclass(kind, functools.partial):
        for value in (holder.func, *holder.args, *holder.keywords.values()):
            yield Held(None, "", value, value is holder.func), _is_followed(value)
    elif _is_container(holder):
        values = list(holder.values() if issubclass(kind, dict) else holder)[:ENTRIES]
        yield from ((Held(None, "", value, False), type(value) is types.FunctionType) for value in values)


_WITHOUT_ATTRIBUTES = (
    *(type, types.ModuleType, types.BuiltinFunctionType, types.MethodType),
    *(property, functools.partial, dict, list, tuple),
)


def _read_by(holder: Any, owner: Any, name: str) -> Iterator[tuple[Held, bool]]:
    """What the code of `holder` reads by name, and whether to follow each further."""
    if type(holder) is not types.FunctionType:
        if not issubclass(type(holder), _WITHOUT_ATTRIBUTES):
            yield from _in_object(holder)
        return
    reads = reads_of(holder.__code__)
    attributes_read = attributes_in(reads)
    for read in {read[1] for read in reads if read[0] == "global"} & holder.__globals__.keys():
        value = holder.__globals__[read]
        yield Held(None, "", value, not _is_container(value)), _is_container(value) or _is_earlier(value, name)
    attributes = namespace_of(owner) if issubclass(type(owner), type) else {}
    for read in (attributes_read & attributes.keys()) - {name}:
        yield Held(owner, read, attributes[read], True), _is_earlier(unwrap(attributes[read]), name)
    # functools.wraps leaves this attribute, even if the code never calls the function.
    if "__wrapped__" in attributes_read and hasattr(holder, "__wrapped__"):
        yield Held(holder, "__wrapped__", holder.__wrapped__, True), True


def _in_object(holder: Any) -> Iterator[tuple[Held, bool]]:
    """The attributes of a callable object, or of one that a function keeps others in."""
    wrapper = getattr(holder, "_self_wrapper", None)
    if wrapper is not None:  # of wrapt: wrapper(wrapped, instance, args, kwargs)
        value = getattr(holder, "__wrapped__", None)
        code = getattr(wrapper, "__code__", None)
        yield Held(holder, "__wrapped__", value, code is not None and reads_first(code)), True
        return
    try:
        attributes = object.__getattribute__(holder, "__dict__")
    except AttributeError:
        return
    call = next((c.__dict__["__call__"] for c in type(holder).__mro__ if "__call__" in c.__dict__), None)
    named = attributes_in(reads_of(call.__code__)) if type(call) is types.FunctionType else ()
    for attribute, value in list(attributes.items())[:ENTRIES]:
        certain = attribute in named and not _is_container(value)
        yield Held(holder, attribute, value, certain), _is_followed(value)


def _is_earlier(value: Any, name: str) -> bool:
    """Whether an object may be what other code found under the name before."""
    named = getattr(value, "__name__", None) == name
    return type(value) is types.FunctionType and (named or hasattr(value, "__wrapped__"))


def _is_followed(value: Any) -> bool:
    return callable(value) or _is_container(value) or type(value).__dict__.get("__call__") is not None


def _is_container(value: Any) -> bool:
    return issubclass(type(value), (dict, list, tuple))


def _cells_of(function: Any) -> Iterator[tuple[str, Any, Any]]:
    """The names, the cells and the values of a closure."""
    code, cells = getattr(function, "__code__", None), getattr(function, "__closure__", None)
    for name, cell in zip(code.co_freevars, cells, strict=True) if code is not None and cells else ():
        try:
            yield name, cell, cell.cell_contents
        except ValueError:  # it is still empty
            continue


# Layers


def layers_of(function: Any, until: Sequence[Any] = ()) -> list[Any]:
    """A function, and what lies beneath each functools.wraps and partial, down to a function of `until`."""
    found: list[Any] = []
    while function is not None and len(found) < DEEPEST:
        bare = function.__func__ if type(function) is types.MethodType else function
        if found and any(bare is one for one in until):
            break
        found.append(bare)
        beneath = getattr(bare, "__wrapped__", None)
        function = getattr(bare, "func", None) if beneath is None else beneath
    return found


def written_layers_of(function: Any, until: Sequence[Any] = ()) -> list[Any]:
    """The layers whose author is neither upstream nor a maker of decorators; else the innermost.

    Asks for the module in which the code runs, because functools.wraps copies the name of upstream's.
    """
    layers = layers_of(function, until)
    own = [layer for layer in layers if not _module_of(layer).startswith((*UPSTREAM, *DECORATORS))]
    return own or layers[-1:]


def written_of(function: Any) -> Any:
    """The outermost of `written_layers_of`."""
    return written_layers_of(function)[0]


def is_releases_own(function: Any) -> bool:
    """Whether a release itself defines a function, so that it is no other people's code."""
    return _module_of(written_of(function)).startswith(UPSTREAM)


def _module_of(layer: Any) -> str:
    """Where the code of a layer runs. A partial has no code, and counts as functools'."""
    known = getattr(layer, "__globals__", None)
    return "functools" if known is None else str(known.get("__name__", ""))


# What code reads


def has_code(function: Any) -> bool:
    """Whether there is byte code that tells what a function calls."""
    return all(hasattr(layer, "__code__") for layer in written_layers_of(function))


def leads_to(function: Any, wanted: Sequence[Any]) -> bool:
    """Whether the code of a function names one of `wanted`, or a function whose code does, three functions deep.

    Only functions of modules are followed, by their names.
    """
    seen: set[int] = set()
    return any(_leads_to(layer, wanted, 3, seen) for layer in written_layers_of(function, wanted))


def _leads_to(function: Any, wanted: Sequence[Any], depth: int, seen: set[int]) -> bool:
    seen.add(id(function))
    values = [value_of(read, function) for read in reads_of(getattr(function, "__code__", None))]
    if any(value is one for value in values for one in wanted):
        return True
    left = [value for value in values if type(value) is types.FunctionType and id(value) not in seen]
    return depth > 0 and any(_leads_to(written_of(value), wanted, depth - 1, seen) for value in left)


def value_of(read: Read, function: Any) -> Any:
    """What a path in the code of `function` stands for, attributes of modules included; None if that is not known."""
    root, name, *attributes = read if len(read) > 1 else (*read, "")
    known = getattr(function, "__globals__", {})
    if root == "global":
        value = known.get(name)
    elif root == "closure":
        value = next((value for free, _, value in _cells_of(function) if free == name), None)
    elif root == "import":
        value = sys.modules.get(_absolute(name, str(known.get("__package__") or "")))
    else:
        return None
    for attribute in attributes:
        value = namespace_of(value).get(attribute) if type(value) is types.ModuleType else None
    return value


def _absolute(module: str, package: str) -> str:
    try:
        return resolve_name(module, package)
    except (ImportError, ValueError):  # a relative name outside of a package
        return ""
