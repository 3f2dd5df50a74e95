"""record: a frozen dataclass whose methods are not compiled anew in each process; computed_once and replace for it.

`dataclasses.dataclass` writes the text of each method and compiles it: half a millisecond a class, and 40 classes are a
fifth of `import shim; shim.apply()`. A record has the same fields and methods, shared by all. `fields` and `replace`
of dataclasses work on it; the `replace` of this module is faster.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import MISSING, Field, FrozenInstanceError, dataclass, field, fields
from itertools import repeat
from typing import TYPE_CHECKING, Any, Generic, NoReturn, TypeVar

if TYPE_CHECKING:
    from typing_extensions import dataclass_transform
else:

    def dataclass_transform(**_: Any) -> Callable[[Any], Any]:
        return lambda function: function


__all__ = ["computed_once", "record", "replace"]

T = TypeVar("T")


class computed_once(Generic[T]):
    """functools.cached_property without a lock. Two threads may compute the value; both results are right.

    Before Python 3.12 that lock is one for all instances: a process that was forked while another thread held it would
    wait for ever.
    """

    def __init__(self, function: Callable[[Any], T]) -> None:
        self.function, self.__doc__, self.name = function, function.__doc__, function.__name__

    def __get__(self, instance: Any, owner: type) -> T:
        if instance is None:
            return self  # type: ignore[return-value]
        value = self.function(instance)
        _set(instance, self.name, value)
        return value


@dataclass_transform(frozen_default=True, field_specifiers=(field,))
def record(cls: type[T]) -> type[T]:
    """Make `cls` what `@dataclass(frozen=True)` makes it. Its fields take the order, defaults and flags from there."""
    made: Any = dataclass(init=False, repr=False, eq=False)(cls)
    made.__record__ = _Fields(made)
    for name, method in _METHODS.items():
        if name not in vars(cls):
            setattr(made, name, method)
    return cls


def replace(record: T, **given: Any) -> T:
    """dataclasses.replace for records, without its look at each field."""
    names = record.__record__.names  # type: ignore[attr-defined]
    values = {**dict(zip(names, map(getattr, repeat(record), names))), **given}
    return type(record)(*values.values())


class _Fields:
    """What the methods of a record look up: its fields, once for the class."""

    def __init__(self, cls: Any) -> None:
        found: tuple[Field[Any], ...] = fields(cls)
        self.names = tuple(item.name for item in found)
        self.known = frozenset(self.names)
        self.defaults = {item.name: item.default for item in found if item.default is not MISSING}
        self.factories = {item.name: item.default_factory for item in found if item.default_factory is not MISSING}
        # So many values given -> the defaults of the fields behind them, if all have one.
        every = tuple(item.default for item in found)
        self.left = {n: every[n:] for n in range(len(every) + 1) if MISSING not in every[n:]}
        self.compared = tuple(item.name for item in found if item.compare)
        self.shown = tuple(item.name for item in found if item.repr)


_set = object.__setattr__


def _init(self: Any, *args: Any, **given: Any) -> None:
    of: _Fields = self.__record__
    if not given and len(args) in of.left:  # as most of a start's three thousand
        values: Iterable[Any] = args + of.left[len(args)]
    else:
        values = _filled(self, of, args, given)
    # In C, and not by __dict__: a look at it would make a dictionary for each record.
    any(map(_set, repeat(self), of.names, values))


def _filled(self: Any, of: _Fields, args: tuple[Any, ...], given: Mapping[str, Any]) -> Iterable[Any]:
    """The value of each field, in their order."""
    values = {**of.defaults, **dict(zip(of.names, args)), **given}
    for name, factory in of.factories.items():
        if name not in values:
            values[name] = factory()
    twice = args and given and not given.keys().isdisjoint(of.names[: len(args)])
    if twice or len(args) > len(of.names) or values.keys() != of.known:
        raise _misfit(self, of, args, given, values)
    return map(values.__getitem__, of.names)


def _misfit(
    self: Any, of: _Fields, args: tuple[Any, ...], given: Mapping[str, Any], values: Mapping[str, Any]
) -> TypeError:
    """What is wrong with the arguments of a record."""
    if len(args) > len(of.names):
        return TypeError(f"{type(self).__name__} takes {len(of.names)} arguments, and got {len(args)}")
    odd = ", ".join(sorted(given.keys() & set(of.names[: len(args)]) or values.keys() ^ of.known))
    return TypeError(f"{type(self).__name__}: missing, unknown or given twice: {odd}")


def _eq(self: Any, other: object) -> Any:
    if type(other) is not type(self):
        return NotImplemented
    return _compared(self) == _compared(other)


def _compared(self: Any) -> tuple[Any, ...]:
    return tuple([getattr(self, name) for name in self.__record__.compared])


def _hash(self: Any) -> int:
    return hash(_compared(self))


def _repr(self: Any) -> str:
    values = vars(self)
    return f"{type(self).__qualname__}({', '.join(f'{name}={values[name]!r}' for name in self.__record__.shown)})"


def _frozen(self: Any, name: str, *_: object) -> NoReturn:
    raise FrozenInstanceError(f"cannot assign to or delete the field {name!r}")


_METHODS = {
    "__init__": _init,
    "__eq__": _eq,
    "__hash__": _hash,
    "__repr__": _repr,
    "__setattr__": _frozen,
    "__delattr__": _frozen,
}
