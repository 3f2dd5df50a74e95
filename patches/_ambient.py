"""What a call tells the functions that it calls, and that upstream gives no argument for it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from shim.patches._named import Named

__all__ = ["Ambient"]


class Ambient(Named, threading.local):
    """A value of each thread, None outside of the calls that give it one. `home`: the module that it is a global of.

    Per thread, because backward runs in threads of autograd. A backward is outside of the call.
    """

    value: Any = None

    def __init__(self, home: str) -> None:
        self.__module__ = home  # where pickle looks for its name

    def call(self, value: Any, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """function(*args, **kwargs), inside which this is `value`."""
        outer, self.value = self.value, value
        try:
            return function(*args, **kwargs)
        finally:
            self.value = outer
