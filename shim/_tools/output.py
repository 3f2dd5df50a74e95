"""Output of the command line: results go to standard output, errors to standard error.

All that a command prints passes through here: secrets and homes are masked, what cannot be seen is escaped, and so is
what the stream's encoding cannot hold.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import sys
from typing import Any, NoReturn, TextIO

from shim._errors import NotMetError
from shim._printing.masks import masked, masked_data
from shim._printing.printable import did_you_mean, fits, one_line, printable
from shim._tools.terminal import for_stream

__all__ = ["INTERRUPTED", "NOT_MET", "OK", "USAGE", "Parser", "complain", "nobody_reads", "put", "say", "shown", "tell"]

OK, NOT_MET, USAGE, INTERRUPTED = 0, 1, 2, 130
LONG = 20_000  # characters of a message, which may name all patches


class Parser(argparse.ArgumentParser):
    """A parser whose errors are printed as all else is: they quote what was given, and are those of the command."""

    def __init__(self, **given: Any) -> None:
        super().__init__(**given, allow_abbrev=False)  # a script's --onl means another option some day

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        found, extra = super().parse_known_args(args, namespace)
        if extra:  # argparse leaves those of a command to the parser above, which does not know its options
            option = next((word for word in extra if word.startswith("-")), "")
            known = [name for name in self._option_string_actions if name.startswith("--")]
            hint = f"; {did_you_mean(option.partition('=')[0], known)}" if option else ""
            self.error(f"unrecognized arguments: {' '.join(extra)}{hint}")
        return found, extra

    def error(self, message: str) -> NoReturn:
        wrong = re.match(r"argument COMMAND: invalid choice: '(.*)' \(choose from (.*)\)", message)
        if wrong:
            message = f"there is no command {wrong[1]!r}; {did_you_mean(wrong[1], re.findall(r'[a-z-]+', wrong[2]))}"
        self.print_usage(sys.stderr)
        self.exit(USAGE, for_stream(f"{self.prog}: error: {one_line(masked(message), LONG)}", sys.stderr) + "\n")

    def _print_message(self, message: str, file: Any = None) -> None:
        stream = sys.stderr if file is None else file
        super()._print_message(shown(message, stream), stream)


def shown(text: str, stream: TextIO | None) -> str:
    """The text as a command prints it to `stream`."""
    return fits(printable(masked(text)), getattr(stream, "encoding", None))


def put(data: Any, text: str, as_json: bool, whole: bool = False) -> None:
    """Print `text`, or `data` as JSON in ASCII: its texts are masked, and otherwise what they are.

    whole: keep lines whole in a pipe, for Markdown to be pasted.
    """
    if as_json:
        say(json.dumps(masked_data(data), indent=2))
    else:
        say(text, for_people=not whole or sys.stdout.isatty())


def say(text: str, for_people: bool = False) -> None:
    """Print. If the reader has gone, as in `shim plan | head`, the exit code stays the same.

    for_people: wrap and colour on a terminal.
    """
    text = shown(text, sys.stdout)
    try:
        print(for_stream(text, sys.stdout) if for_people else text, flush=True)
    except BrokenPipeError:
        nobody_reads(sys.stdout)
    except OSError as error:  # a full disk, for instance
        nobody_reads(sys.stdout)
        raise NotMetError(f"standard output cannot be written: {error}") from None


def tell(text: object) -> None:
    """Print one line to standard error, which a terminal gets wrapped."""
    if sys.stderr is None:  # print() would take standard output instead
        return
    try:
        print(for_stream(shown(one_line(text, LONG), sys.stderr), sys.stderr), file=sys.stderr, flush=True)
    except BrokenPipeError:
        nobody_reads(sys.stderr)
    except OSError:  # without a reader the result still has its exit code
        nobody_reads(sys.stderr)


def complain(error: Exception) -> None:
    tell(f"shim: {error}")


def nobody_reads(stream: TextIO) -> None:
    # Without this the interpreter flushes again at its end, and prints an error.
    with contextlib.suppress(OSError):  # of a stream without a file
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
