"""The value of a config field: read, restored, compared, and captured against changes in place."""

from __future__ import annotations

import copy
import inspect
import sys
import types
from collections import deque
from typing import Any, NamedTuple

from shim._errors import OptionError

__all__ = ["MISSING", "Captured", "Held", "held", "put", "same"]

MISSING = object()


class Held(NamedTuple):
    """The value of a field, and whether the config itself holds it (else its class, a property or a proxy)."""

    value: Any
    own: bool


def _own(config: Any) -> Any:
    """The attributes of the config itself, without __getattr__. A class may also be a config."""
    kind = type if issubclass(type(config), type) else object
    try:
        return kind.__getattribute__(config, "__dict__")
    except AttributeError:  # slots
        return {}


def _is_own(config: Any, name: str) -> bool:
    by_class = inspect.getattr_static(type(config), name, MISSING)
    return name in _own(config) and not hasattr(type(by_class), "__set__")


def held(config: Any, name: str) -> Held:
    """The current value of a field. In a class as config, a staticmethod stays one."""
    if _is_own(config, name):
        return Held(_own(config)[name], True)
    return Held(getattr(config, name, MISSING), False)


def put(config: Any, name: str, wanted: Held) -> None:
    """Make `config` hold `wanted`: as its own attribute or, if `wanted` is not its own, without one.

    A value that `config` already holds is not written. So a frozen config or a deleted attribute raises no error if
    nothing changes.
    """
    if wanted.own:
        if not (_is_own(config, name) and _own(config)[name] is wanted.value):
            setattr(config, name, wanted.value)
    elif _is_own(config, name):
        delattr(config, name)
    elif getattr(config, name, MISSING) is not wanted.value:
        if wanted.value is MISSING:
            delattr(config, name)
        else:
            setattr(config, name, wanted.value)


def same(one: Any, other: Any) -> bool:
    """Whether two values are one object, or equal and of one type. Incomparable values (tensors) are not the same."""
    if one is other:
        return True
    if type(one) is not type(other):
        return False
    try:
        return bool(one == other)
    except Exception:  # noqa: BLE001 - __eq__ may raise anything; the caller refuses values that are not the same
        return False


class Captured:
    """The value of a field at this moment. Containers are copied; other mutable objects are checked for changes."""

    def __init__(self, config: Any, name: str) -> None:
        self.config, self.name = config, name
        value, self._own = held(config, name)
        self._watched: dict[int, tuple[Any, Any]] = {}
        self._value = _copied(value, self._watched)

    def again(self) -> Held:
        """The value for one recompute, which may change its copy.

        OptionError if an object that cannot be copied was changed in place since.
        """
        for value, state in self._watched.values():
            if not _unchanged(state, _state(value)):
                raise OptionError(
                    f"config_override: the value of {self.name!r} ({type(value).__name__}) was changed in place "
                    "between a forward pass and its recompute, which would see it changed. Remedy: assign a new "
                    "object instead."
                )
        return Held(_copied(self._value, {}), self._own)


def _copied(value: Any, watched: dict[int, tuple[Any, Any]]) -> Any:
    """`value` with containers copied. Other objects stay the same; mutable ones go into `watched`."""
    if isinstance(value, tuple):
        items = [_copied(item, watched) for item in value]
        if all(map(lambda ours, theirs: ours is theirs, items, value)):
            return value
        return type(value)._make(items) if hasattr(value, "_make") else tuple(items)
    if isinstance(value, (list, deque, dict)):
        result: Any = copy.copy(value)
        for key, item in value.items() if isinstance(value, dict) else enumerate(value):
            result[key] = _copied(item, watched)
        return result
    if isinstance(value, (set, bytearray)) or type(value).__module__ == "numpy":
        return copy.copy(value)
    if id(value) not in watched:
        watched[id(value)] = (value, None)  # stops at cycles
        watched[id(value)] = (value, _state(value))
        if watched[id(value)][1] is None:
            del watched[id(value)]
    return value


def _state(value: Any) -> Any:
    """A snapshot that shows changes in place; None for immutable objects and objects compared by identity."""
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(value, torch.Tensor):
        return None if value.is_inference() else value._version
    if isinstance(value, (type, types.ModuleType)) or callable(value) or not hasattr(value, "__dict__"):
        return None
    containers = (list, dict, set)
    return {name: copy.copy(item) if isinstance(item, containers) else item for name, item in vars(value).items()}


def _unchanged(then: Any, now: Any) -> bool:
    if isinstance(then, dict) and isinstance(now, dict):
        return then.keys() == now.keys() and all(_unchanged(then[key], now[key]) for key in then)
    return same(then, now)
