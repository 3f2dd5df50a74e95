"""Names of modules and classes, the objects on them, their aliases, and the chains that shim puts there."""

from __future__ import annotations

import functools
import sys
import types
from collections.abc import Callable, Iterable, Mapping
from dataclasses import field
from itertools import compress, repeat
from typing import Any, NamedTuple

from shim._matrix.model import Variant
from shim._printing.printable import one_line
from shim._record import computed_once, record

__all__ = [
    "Chain",
    "Change",
    "Held",
    "Imported",
    "Key",
    "Layer",
    "MISSING",
    "Replaced",
    "Slot",
    "Write",
    "describe",
    "dictionary_of",
    "find_aliases",
    "found_by_name",
    "imports_no_megatron",
    "is_kind",
    "namespace_of",
    "read_name",
    "replaced_by",
    "rewrap",
    "unwrap",
]


# Aliases: other names under which modules and classes hold the same function or class


# (module or class, name in its dictionary, the value found there)
Location = tuple[Any, str, Any]

# issubclass(type(x), ...) instead of isinstance: isinstance reads x.__class__, which loads lazy objects.
DESCRIPTORS = (staticmethod, classmethod)


def unwrap(raw: Any) -> Any:
    """The function inside a staticmethod or classmethod; anything else is returned as it is."""
    return raw.__func__ if issubclass(type(raw), DESCRIPTORS) else raw


def rewrap(raw: Any, inner: Any) -> Any:
    """`inner` in the kind of descriptor that `raw` is."""
    return type(raw)(inner) if issubclass(type(raw), DESCRIPTORS) else inner


# Python's own descriptors: a class may have a `__dict__` that computes another, or raises.
_OF_CLASS = vars(type)["__dict__"]
_OF_MODULE = vars(types.ModuleType)["__dict__"]


def namespace_of(owner: Any) -> Mapping[str, Any]:
    """The dictionary of a module or class, without an attribute read, which would load a lazy module.

    Empty if there is none: C code may hold a class that it has not made ready, such as _socket before socket is
    imported, and sys.modules may hold anything.
    """
    kind = type(owner)
    if kind is types.ModuleType:  # as most
        return _OF_MODULE.__get__(owner) or {}
    if issubclass(kind, type):
        found: Mapping[str, Any] | None = _OF_CLASS.__get__(owner)
    elif issubclass(kind, types.ModuleType):
        found = _OF_MODULE.__get__(owner)
    else:
        try:
            found = object.__getattribute__(owner, "__dict__")
        except Exception:  # noqa: BLE001 - it has none, or foreign code computes it
            found = None
    return found if issubclass(type(found), (dict, types.MappingProxyType)) else {}  # type: ignore[return-value]


def dictionary_of(module: types.ModuleType) -> dict[str, Any]:
    """The dictionary of a module, to be written to."""
    found: dict[str, Any] = _OF_MODULE.__get__(module)
    return found


# Python, torch, and what torch requires: most of the modules of a process.
_STRANGERS = frozenset(
    {*sys.stdlib_module_names, "torch", "triton", "numpy", "sympy", "mpmath", "networkx", "jinja2", "fsspec"}
)


@functools.cache  # each import of the process asks, and each search for aliases of some thousand names
def imports_no_megatron(name: str) -> bool:
    """Whether a module is of a package that never imports megatron-core or Transformer Engine."""
    return name.partition(".")[0] in _STRANGERS


def _of_type(kinds: type | tuple[type, ...], values: list[Any]) -> list[Any]:
    """The values whose type is derived from one of `kinds`. In C, because a start asks it of a hundred thousand."""
    return list(compress(values, map(issubclass, map(type, values), repeat(kinds))))


def _others_than(names: frozenset[str]) -> Callable[[str], bool]:
    return lambda name: name not in names


def find_aliases(objects: Iterable[Any], modules: Iterable[str] | None = None) -> list[Location]:
    """All places that hold one of `objects`, in one pass over sys.modules (or over the named modules).

    The search covers the dictionaries of modules and of the classes in them, and looks inside staticmethod and
    classmethod. It does not reach instances, closures, default arguments and containers, nor packages that never import
    megatron-core: they are nine tenths of the modules of a process.
    """
    wanted = {id(item) for item in objects}
    passed_over = imports_no_megatron if modules is None else _others_than(frozenset(modules))
    names = [name for name in list(sys.modules if modules is None else modules) if not passed_over(str(name))]
    if not wanted or not names:
        return []
    # The search looks at some hundred thousand values, so both tests for each value are cheap: whether its id is wanted
    # (in C), and whether it is a class or a descriptor. Dictionaries are copied first, because another thread may write
    # to them.
    absent = wanted.isdisjoint
    found: list[Location] = []
    seen: set[int] = set()
    for name in names:
        module = sys.modules.get(name)
        if not issubclass(type(module), types.ModuleType) or f"{name}.".startswith("shim."):
            continue
        namespace = namespace_of(module)
        values = list(namespace.values())
        if not absent(map(id, values)):
            found += [(module, key, value) for key, value in list(namespace.items()) if id(value) in wanted]
        left = _of_type(type, values)
        while left:
            cls = left.pop()
            if id(cls) in seen:
                continue
            seen.add(id(cls))
            namespace = _OF_CLASS.__get__(cls) or {}  # as namespace_of(), a call for each of thousands
            if passed_over(str(namespace.get("__module__"))):
                continue  # such as torch's Tensor, which almost every module holds
            values = list(namespace.values())
            inside = _of_type((type, *DESCRIPTORS), values)
            held = []
            if inside:  # few classes have a class or a descriptor
                left += _of_type(type, inside)
                held = [value.__func__ for value in _of_type(DESCRIPTORS, inside)]
            if not absent(map(id, values)) or not absent(map(id, held)):
                found += [(cls, key, value) for key, value in list(namespace.items()) if id(unwrap(value)) in wanted]
    return found


Factory = Callable[[Any], Any]


Key = tuple[int, str]  # id() of a module or class, and a name in it


# Chains
#
# Patches that share a target nest in the order of version_matrix.yaml. The first patch in the file is innermost and
# gets upstream's object. Each further patch gets the result of the one before it. Callers see the last. Neither the
# order of imports nor the order of apply() calls changes this: whenever a layer is added or removed, the chain is
# built anew.


class _Missing:
    def __repr__(self) -> str:
        return "MISSING"


MISSING = _Missing()


@record
class Layer:
    """One patch on one target. `factory(inner)` returns the replacement of `inner`."""

    patch: str
    target: str
    factory: Factory = field(compare=False, repr=False)
    wiring: Variant | None = field(default=None, compare=False, repr=False)  # the variant that names the target
    content: object = None  # variant and options of the patch; a change rebuilds the chain

    @property
    def no_aliases(self) -> bool:
        """Whether upstream's object belongs to another module, so that its other names are no aliases."""
        return self.wiring is not None and self.target in self.wiring.no_aliases

    @property
    def may_be_missing(self) -> bool:
        """Whether upstream may lack the name. Then `inner` is MISSING, and the factory creates the object."""
        return self.wiring is not None and self.target in self.wiring.may_be_missing


class Held(NamedTuple):
    """A place inside of an object: what it holds, and whether the object surely calls it.

    owner: a closure's cell, or an object with the attribute `name`. None if shim cannot write to the place.
    """

    owner: Any
    name: str
    value: Any
    certain: bool


@record
class Slot:
    """One name that shim wrote: its object before (MISSING: none), and the object that shim wrote last.

    within: whose object the place lies in, in words, if it is no name of a module or class.
    """

    owner: Any
    name: str
    original: Any
    written: Any
    target: str
    within: str = ""

    @computed_once
    def key(self) -> Key:
        return id(self.owner), self.name

    def current(self) -> Any:
        return read_name(self.owner, self.name)

    def is_written(self) -> bool:
        """Whether the name holds what shim wrote."""
        return read_name(self.owner, self.name) is self.written

    def __str__(self) -> str:
        owner = self.owner
        if self.within:
            return f"the function that {self.within} calls"
        if issubclass(type(owner), type):
            return f"{owner.__module__}.{owner.__qualname__}.{self.name}"
        return f"{namespace_of(owner).get('__name__', 'a module without a name')}.{self.name}"


@record
class Replaced:
    """A name that shim no longer governs, mostly because other code replaced the object. shim leaves it alone.

    partner: the replaced place that is the reason, if this one was not replaced itself.
    foreign: the other object.    held: the places inside of it that shim governs instead.
    """

    slot: Slot
    why: str
    partner: Key | None = None
    foreign: Any = None
    held: tuple[Key, ...] = ()

    def __str__(self) -> str:
        return f"{self.slot} {self.why}"


@record
class Chain:
    """The layers on one target, in order, above the object that was there before."""

    target: str
    owner: Any
    name: str
    base: Any  # as in the owner's dictionary, or as inherited
    top: Any  # the object on the target now, as in the owner's dictionary
    layers: tuple[Layer, ...] = ()
    borrowed: bool = False  # `top` belongs to someone else, so its aliases are not rebound

    @computed_once
    def key(self) -> Key:
        return id(self.owner), self.name

    @computed_once
    def beneath(self) -> Any:
        """The function in `base`, if that is a descriptor."""
        return unwrap(self.base)

    @computed_once
    def inner(self) -> Any:
        """The function in `top`, if that is a descriptor."""
        return unwrap(self.top)

    @computed_once
    def has_aliases(self) -> bool:
        """Whether other names that hold the object beneath are to hold `top`."""
        return bool(self.layers) and not self.borrowed and not self.layers[0].no_aliases and callable(self.beneath)


def read_name(owner: Any, name: str) -> Any:
    """The object under a name of a module or class, in a cell, or in an attribute of another object; or MISSING."""
    kind = type(owner)
    if kind is types.ModuleType:  # as most: each transaction reads all names that shim has written
        return _OF_MODULE.__get__(owner).get(name, MISSING)
    if kind is type:
        return _OF_CLASS.__get__(owner).get(name, MISSING)
    if issubclass(kind, (type, types.ModuleType)):
        return namespace_of(owner).get(name, MISSING)
    try:
        return getattr(owner, name)
    except (AttributeError, ValueError):  # ValueError: an empty cell
        return MISSING


def replaced_by(value: Any) -> str:
    return "was removed" if value is MISSING else f"was replaced by {describe(unwrap(value))}"


def found_by_name(value: Any) -> bool:
    """Whether the module and qualified name of `value` lead back to `value`. If so, no factory made it."""
    found: Any = sys.modules.get(getattr(value, "__module__", None) or "")
    for part in getattr(value, "__qualname__", "").split("."):
        if not issubclass(type(found), (types.ModuleType, type)):
            return False
        found = unwrap(namespace_of(found).get(part, MISSING))
    return found is value


Change = tuple[Chain, Chain]  # before and after


Imported = tuple[str, Iterable[str]]  # a module just imported, and the modules that may already hold its new objects


# An object, in words


DESCRIBED = 400  # characters


def is_kind(value: Any, kind: type | tuple[type, ...]) -> bool:
    """Whether the type of `value` is a `kind`. isinstance would also accept a proxy."""
    return issubclass(type(value), kind)


def describe(value: Any) -> str:
    """Module, name and file of an object, for messages: one printable line, with any name."""
    return one_line(_described(value), DESCRIBED)


def _described(value: Any) -> str:
    if not is_kind(value, (types.FunctionType, types.BuiltinFunctionType, type)):
        kind = type(value)
        text = f"{kind.__module__}.{kind.__qualname__}"
        # The function inside a wrapt.FunctionWrapper, a partial or a property says more than the type.
        names = ("_self_wrapper", "func", "fget")
        inner = next(
            (found for name in names if is_kind(found := getattr(value, name, None), types.FunctionType)), None
        )
        return text if inner is None else f"{text} with {_described(inner)}"
    code = getattr(value, "__code__", None)
    if not isinstance(code, types.CodeType):
        return f"{getattr(value, '__module__', None) or type(value).__module__}.{value.__qualname__}"
    # functools.wraps copies names. Globals and byte code keep those of the wrapper.
    module = value.__globals__.get("__name__") or value.__module__
    name = getattr(code, "co_qualname", code.co_name)
    return f"{module}.{name} in {code.co_filename}:{code.co_firstlineno}"


# Writes


@record
class Write:
    """One name of a module or class, or one attribute of another object: what it holds before and after.

    slot: whose name it is, for errors (None: it is a record).    patch: whose error that is.
    """

    owner: Any
    name: str
    before: Any
    after: Any
    slot: Slot | None = None
    patch: str | None = None

    def current(self) -> Any:
        return read_name(self.owner, self.name)

    def make(self) -> None:
        _write(self.owner, self.name, self.after)

    def undo(self) -> None:
        _write(self.owner, self.name, self.before)


def _write(owner: Any, name: str, value: Any) -> None:
    """Write a value to a name, or take the name away (MISSING)."""
    if issubclass(type(owner), types.ModuleType):  # past a __setattr__ of the module's own class
        if value is MISSING:
            dictionary_of(owner).pop(name, None)
        else:
            dictionary_of(owner)[name] = value
    elif value is not MISSING:
        setattr(owner, name, value)
    elif name in namespace_of(owner) if issubclass(type(owner), type) else read_name(owner, name) is not MISSING:
        delattr(owner, name)
