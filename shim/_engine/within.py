"""Whether a call of shim comes from inside of a transaction of its own thread: from a factory, handler or finalizer."""

from __future__ import annotations

import sys
import threading
from types import FrameType
from typing import Any

from shim._errors import OptionError

__all__ = ["is_owned", "is_within", "refused_within"]


def is_owned(lock: threading.RLock) -> bool:
    """Whether this thread holds the lock."""
    return bool(lock._is_owned())  # type: ignore[attr-defined]


def is_within(lock: threading.RLock, engine: dict[str, Any]) -> bool:
    """Whether this thread holds the lock, and code of the engine runs beneath the call that asks.

    An interrupt may leave the lock held with no such code: the lock alone does not tell.

    engine: the globals of the engine's module.
    """
    if not is_owned(lock):
        return False
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_globals is engine:
        frame = frame.f_back  # the call that asks
    while frame is not None:
        if frame.f_globals is engine:
            return True
        frame = frame.f_back
    return False


def refused_within(what: str) -> OptionError:
    """The error for a change from inside of a transaction."""
    return OptionError(
        f"shim.{what}() was called from inside of another call of shim, by a patch that is being bound, by a "
        "signal handler or by a finalizer. It has changed nothing. Remedy: call it when that call has returned."
    )
