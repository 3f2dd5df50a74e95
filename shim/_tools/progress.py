"""Progress of a command that takes seconds, on standard error."""

from __future__ import annotations

import contextlib
import io
import logging
import shutil
import sys
import time
import warnings
from collections.abc import Iterator
from typing import TextIO

from shim._printing.masks import masked
from shim._printing.printable import fits, one_line
from shim._tools.terminal import for_stream

__all__ = ["Progress", "hushed", "masked_log"]

PATIENCE = 1.0  # seconds between lines without a terminal


class Progress:
    """Names the step that runs: on a terminal in one line that overwrites itself, elsewhere in a line now and then."""

    def __init__(self, stream: TextIO | None = None, patience: float = PATIENCE) -> None:
        self._stream = sys.stderr if stream is None else stream
        self._terminal = self._stream is not None and self._stream.isatty()
        self._patience = patience
        self._said = time.monotonic()
        self._width = 0

    def __call__(self, text: str) -> None:
        """Name the step that begins: on a terminal at once, elsewhere only after `patience` seconds of silence."""
        if self._stream is None:
            return
        text = fits(one_line(masked(text)), self._stream.encoding)
        text = text[: shutil.get_terminal_size().columns - 1]  # on a terminal a longer line could not be overwritten
        if self._terminal:
            self._stream.write("\r" + text.ljust(self._width))
            self._stream.flush()
            self._width = len(text)
        elif time.monotonic() - self._said >= self._patience:
            print(text, file=self._stream, flush=True)
            self._said = time.monotonic()

    def done(self) -> None:
        """Clear the line."""
        if self._terminal and self._width:
            self._stream.write("\r" + " " * self._width + "\r")
            self._stream.flush()
            self._width = 0


class _Masked(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        return for_stream(fits(masked(super().format(record)), getattr(sys.stderr, "encoding", None)), sys.stderr)


@contextlib.contextmanager
def masked_log() -> Iterator[None]:
    """Print what shim logs to standard error, as it is now, and masked as all that a command prints."""
    log = logging.getLogger("shim")
    if sys.stderr is None or any(isinstance(handler.formatter, _Masked) for handler in log.handlers):
        yield
        return
    ours = logging.StreamHandler(sys.stderr)
    ours.setFormatter(_Masked("shim: %(message)s"))
    log.addHandler(ours)
    try:
        yield
    finally:
        log.removeHandler(ours)


@contextlib.contextmanager
def hushed() -> Iterator[None]:
    """Keep the prints, logs and warnings of others off the terminal. shim's own logs go to standard error."""
    nowhere = io.StringIO()
    quiet = contextlib.redirect_stdout(nowhere), contextlib.redirect_stderr(nowhere)
    with masked_log(), quiet[0], quiet[1], warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
