"""State of a patch module that is pickled by its name.

Wrappers have upstream's module as theirs. Whoever has that module pickled by value (cloudpickle) pickles a wrapper with
the globals it reads, and what is of one thread or process has no value to send.
"""

from __future__ import annotations

import sys
from typing import SupportsIndex

__all__ = ["Named"]


class Named:
    """A base class for globals of the module that `__module__` names. A copy of one is the object itself."""

    def __reduce_ex__(self, protocol: SupportsIndex) -> str:
        module = sys.modules[self.__module__]
        return next(name for name, value in vars(module).items() if value is self)
