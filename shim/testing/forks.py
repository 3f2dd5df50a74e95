"""Forks that leave alone what they inherit."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterator

__all__ = ["forking"]


@contextlib.contextmanager
def forking() -> Iterator[Callable[[], None]]:
    """Fork inside: no process that is forked here collects garbage of the process that forks it.

    The destructors of some garbage belong to one process. That of a process group of gloo waits for threads that a fork
    does not have: it hangs or crashes. So the garbage collector is off inside, in both processes. A forked process may
    call what this yields: it turns the collector on again, if it was on, for objects that come later.
    """
    enabled = gc.isenabled()

    def collect_what_comes() -> None:
        gc.freeze()
        if enabled:
            gc.enable()

    gc.disable()
    try:
        yield collect_what_comes
    finally:
        if enabled:
            gc.enable()
