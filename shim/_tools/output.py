"""Output of the command line: results go to standard output, errors to standard error."""

from __future__ import annotations

import json
import os
import sys
from typing import Any, TextIO

from shim._errors import NotMetError

__all__ = ["NOT_MET", "OK", "USAGE", "complain", "nobody_reads", "put", "say"]

OK, NOT_MET, USAGE = 0, 1, 2


def put(data: Any, text: str, as_json: bool) -> None:
    say(json.dumps(data, indent=2, default=str) if as_json else text)


def say(text: str) -> None:
    """Print. Where the reader has gone, as in `shim plan | head`, the exit code stays the same."""
    try:
        print(text, flush=True)
    except BrokenPipeError:
        nobody_reads(sys.stdout)
    except OSError as error:  # a full disk, for instance
        nobody_reads(sys.stdout)
        raise NotMetError(f"standard output cannot be written: {error}") from None


def complain(error: Exception) -> None:
    try:
        print(f"shim: {error}", file=sys.stderr)
    except BrokenPipeError:
        nobody_reads(sys.stderr)


def nobody_reads(stream: TextIO) -> None:
    # Without this the interpreter flushes again at its end, and prints an error.
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
