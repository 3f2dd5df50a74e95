"""Whether a call of shim comes from inside of a transaction of its own thread: from a factory, handler or finalizer."""

from __future__ import annotations

import sys
import threading
from types import FrameType

from shim._errors import OptionError

__all__ = ["HOLDERS", "is_owned", "is_within", "refused_within"]

# The modules whose code takes the engine's lock. What they call under it (factories.py takes it too) runs above them.
HOLDERS = ("shim._engine.engine", "shim._engine.imports", "shim._engine.tied", "shim._engine.reports")


def is_owned(lock: threading.RLock) -> bool:
    """Whether this thread holds the lock."""
    return bool(lock._is_owned())  # type: ignore[attr-defined]


def is_within(lock: threading.RLock) -> bool:
    """Whether this thread holds the lock, and code of the engine runs beneath the call that asks.

    An interrupt may leave the lock held with no such code: the lock alone does not tell.
    """
    if not is_owned(lock):
        return False
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and _is_of_engine(frame):
        frame = frame.f_back  # the call that asks
    while frame is not None:
        if _is_of_engine(frame):
            return True
        frame = frame.f_back
    return False


def _is_of_engine(frame: FrameType) -> bool:
    return frame.f_globals.get("__name__") in HOLDERS


def refused_within(what: str) -> OptionError:
    """The error for a change from inside of a transaction."""
    return OptionError(
        f"shim.{what}() was called within another call of shim, by a patch that is being bound, by a "
        "signal handler or by a finalizer. It has changed nothing. Remedy: call it when that call has returned."
    )
