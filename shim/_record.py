"""computed_once: what a frozen dataclass computes from its fields on first use."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, TypeVar

__all__ = ["computed_once"]

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
