"""Records: immutable values with named fields, as frozen dataclasses are.

Every process of a job makes a plan, often hundreds of processes. Importing dataclasses and generating twenty classes
takes longer than everything else in a plan (benchmarks/startup.py).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar, Generic, NoReturn, TypeVar

if TYPE_CHECKING:
    from typing_extensions import dataclass_transform
else:

    def dataclass_transform(**_):
        return lambda cls: cls


__all__ = ["EMPTY", "Record", "computed_once", "replace"]

EMPTY: dict[str, Any] = {}  # a shared default; nobody writes to it

R = TypeVar("R", bound="Record")
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
        value = instance.__dict__[self.name] = self.function(instance)
        return value


@dataclass_transform(frozen_default=True)
class Record:
    """Base of the records: the annotations of a class are its fields, in that order. A class attribute is a default.

    Two records of one class are equal, and have the same hash, when all their fields are equal. Fields that `_aside`
    names are neither compared nor shown. Records share their defaults, so defaults are immutable or never written to.
    """

    _fields: ClassVar[tuple[str, ...]] = ()
    _names: ClassVar[frozenset[str]] = frozenset()
    _defaults: ClassVar[dict[str, Any]] = {}
    _aside: ClassVar[tuple[str, ...]] = ()

    def __init_subclass__(cls) -> None:
        annotations = cls.__dict__.get("__annotations__", {})  # noqa: RUF063 - not by inspect, whose import takes long
        own = [name for name in annotations if not name.startswith("_")]
        cls._fields = (*cls._fields, *(name for name in own if name not in cls._fields))
        cls._names = frozenset(cls._fields)
        cls._defaults = {name: getattr(cls, name) for name in cls._fields if hasattr(cls, name)}

    if not TYPE_CHECKING:  # type checkers make an __init__ of the fields

        def __init__(self, *args, **kwargs) -> None:
            fields = self._fields
            given = self.__dict__
            given.update(self._defaults)
            given.update(zip(fields, args))
            given.update(kwargs)
            twice = args and not kwargs.keys().isdisjoint(fields[: len(args)])
            if twice or given.keys() != self._names or len(args) > len(fields):
                _complain(type(self), args, kwargs)

    @classmethod
    def from_plain(cls: type[R], fields: dict[str, Any]) -> R:
        """The record that had these fields by name, all of them. Not checked, for what shim itself has written."""
        record = cls.__new__(cls)
        record.__dict__.update(fields)
        return record

    def __setattr__(self, name: str, value: object) -> NoReturn:
        raise AttributeError(f"{type(self).__name__} is immutable: cannot set {name!r}; use replace()")

    def __delattr__(self, name: str) -> NoReturn:
        raise AttributeError(f"{type(self).__name__} is immutable: cannot delete {name!r}")

    def _compared(self) -> tuple[Any, ...]:
        return tuple(self.__dict__[name] for name in self._fields if name not in self._aside)

    def __eq__(self, other: object) -> bool:
        if type(other) is not type(self):
            return NotImplemented
        return self._compared() == other._compared()

    def __hash__(self) -> int:
        return hash((type(self), self._compared()))

    def to_plain(self) -> dict[str, Any]:
        """The fields by name. The values are not copied."""
        return {name: self.__dict__[name] for name in self._fields}

    def __repr__(self) -> str:
        shown = (f"{name}={self.__dict__[name]!r}" for name in self._fields if name not in self._aside)
        return f"{type(self).__name__}({', '.join(shown)})"


def _complain(cls: type[Record], args: tuple[Any, ...], kwargs: dict[str, Any]) -> NoReturn:
    fields, name = cls._fields, cls.__name__
    if len(args) > len(fields):
        raise TypeError(f"{name} takes {len(fields)} fields, and {len(args)} were given")
    twice = [field for field in fields[: len(args)] if field in kwargs]
    unknown = [field for field in kwargs if field not in fields]
    if twice or unknown:
        raise TypeError(f"{name} got {', '.join(twice + unknown)} {'twice' if twice else 'which are no fields of it'}")
    missing = [field for field in fields[len(args) :] if field not in kwargs and field not in cls._defaults]
    raise TypeError(f"{name} lacks {', '.join(missing)}")


def replace(record: R, **changes: Any) -> R:
    """A copy of `record` with other values in some fields. TypeError for a name that is no field."""
    return type(record)(**{**record.to_plain(), **changes})
