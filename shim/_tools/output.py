"""What the command line prints, and to whom: results to standard output, complaints to standard error."""

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
    """Print to whoever still reads: `shim plan | head` gets its lines, and the exit code is what it is."""
    try:
        print(text, flush=True)
    except BrokenPipeError:
        nobody_reads(sys.stdout)
    except OSError as error:  # a full disk, for one
        nobody_reads(sys.stdout)
        raise NotMetError(f"standard output cannot be written: {error}") from None


def complain(error: Exception) -> None:
    try:
        print(f"shim: {error}", file=sys.stderr)
    except BrokenPipeError:
        nobody_reads(sys.stderr)


def nobody_reads(stream: TextIO) -> None:
    # Else the interpreter tries again when it ends, and complains.
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
