"""What a command is at, on standard error, while it takes seconds."""

from __future__ import annotations

import contextlib
import io
import logging
import sys
import time
import warnings
from collections.abc import Iterator
from typing import TextIO

__all__ = ["Progress", "hushed"]

PATIENCE = 1.0  # seconds without a word


class Progress:
    """Steps of something long: on a terminal one line that overwrites itself, elsewhere a line each few seconds."""

    def __init__(self, stream: TextIO | None = None, patience: float = PATIENCE) -> None:
        self._stream = sys.stderr if stream is None else stream
        self._terminal = self._stream is not None and self._stream.isatty()
        self._patience = patience
        self._said = time.monotonic()
        self._width = 0

    def __call__(self, text: str) -> None:
        """Say what begins now. On a terminal at once, elsewhere where nothing was said for a while."""
        if self._stream is None:
            return
        if self._terminal:
            self._stream.write("\r" + text.ljust(self._width))
            self._stream.flush()
            self._width = len(text)
        elif time.monotonic() - self._said >= self._patience:
            print(text, file=self._stream, flush=True)
            self._said = time.monotonic()

    def done(self) -> None:
        """Take the line away."""
        if self._terminal and self._width:
            self._stream.write("\r" + " " * self._width + "\r")
            self._stream.flush()
            self._width = 0


@contextlib.contextmanager
def hushed() -> Iterator[None]:
    """Keep what others print, log and warn about from the terminal; what shim logs goes to standard error."""
    log = logging.getLogger("shim")
    ours = logging.StreamHandler(sys.stderr)
    ours.setFormatter(logging.Formatter("shim: %(message)s"))
    log.addHandler(ours)
    try:
        nowhere = io.StringIO()
        with contextlib.redirect_stdout(nowhere), contextlib.redirect_stderr(nowhere), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        log.removeHandler(ours)
