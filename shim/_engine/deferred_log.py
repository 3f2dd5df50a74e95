"""Log messages that wait until the engine's lock is free.

A logging handler may wait for another thread while that thread waits for the engine. So messages are queued here while
the engine's lock is held, and while importlib asks finders for a module. The queue needs no lock: a deque appends and
pops atomically, and `logged` changes under the engine's lock only.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

from shim._engine.ranks import is_rank_zero
from shim._printing.printable import one_line

__all__ = ["DeferredLog", "logger"]

_LOGGED_LIMIT = 1000
_LIMIT = 8000  # characters of a message. Names of all patches take a third of it.
_LINE = 160  # characters of a warning on ranks other than 0


def logger() -> logging.Logger:
    """The logger of shim."""
    # Not again and again: an exception from another thread within getLogger leaves the lock of logging taken.
    found = logging.Logger.manager.loggerDict.get("shim")
    return found if isinstance(found, logging.Logger) else logging.getLogger("shim")


def short_of(text: str) -> str:
    """The text, whole on rank 0 and as one short line on other ranks, which mostly say the same."""
    return text if is_rank_zero() else text[:_LINE]


class DeferredLog:
    """The queue, and the warnings queued so far.

    within: whether this thread holds the engine's lock.
    """

    def __init__(self, within: Callable[[], bool]) -> None:
        self.logged: set[str] = set()
        self._within = within
        self._waiting: deque[tuple[int, str]] = deque()
        self._filtering = False

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def warn(self, text: str) -> None:
        self._waiting.append((logging.WARNING, text))

    def warn_once(self, texts: Iterable[str]) -> None:
        """Queue each text once in the process."""
        for text in texts:
            self._once(text, text)

    def warn_patch(self, patch: str, state: str, reason: str, text: str) -> None:
        """Queue a warning about a patch once in the process. Ranks other than 0 get one short line of it.

        apply() and check() find the same things, and so do mostly all ranks.
        """
        said = text if is_rank_zero() else short_of(f"{patch} ({state}): {reason}")
        self._once(f"{patch} {state} {reason}", said)

    def _once(self, about: str, text: str) -> None:
        if about not in self.logged and len(self.logged) < _LOGGED_LIMIT:
            self.warn(text)  # first: who is interrupted here says it twice, rather than never
            self.logged.add(about)

    def flush(self) -> None:
        """Log the queued messages. Called without the lock, and not while importlib asks finders for a module."""
        if self._filtering and not self._within():
            logger().removeFilter(self)  # its block was interrupted
            self._filtering = False
        for _ in range(len(self._waiting)):
            try:
                level, text = self._waiting.popleft()
            except IndexError:
                return
            logger().log(level, "%s", one_line(text, _LIMIT))

    @contextmanager
    def deferring(self) -> Iterator[None]:
        """Queue everything this thread logs in the block: factories of patches log under the lock unawares."""
        self._filtering = True
        logger().addFilter(self)
        try:
            yield
        finally:
            logger().removeFilter(self)
            self._filtering = False

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether the logger is to log a record now, as logging asks."""
        within = self._within()
        if within:
            self._waiting.append((record.levelno, record.getMessage()))
        return not within
