"""The command `shim`. All its commands but run take --json.

Exit codes: 0 fine, 1 a requirement is not met, 2 wrong usage, 130 interrupted. `run` exits with that of its command.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Callable, Sequence

from shim._errors import MatrixError, OptionError, ShimError
from shim._tools.arguments import command_line
from shim._tools.output import INTERRUPTED, NOT_MET, USAGE, complain, nobody_reads, tell
from shim._tools.progress import masked_log

__all__ = ["main"]


# The module of shim._tools and its function. Only that of the command is imported.
COMMANDS = {
    "audit": "commands:do_audit",
    "bisect": "bisect:do_bisect",
    "diff": "diff:do_diff",
    "doctor": "commands:do_doctor",
    "explain": "commands:do_explain",
    "info": "commands:do_info",
    "list": "commands:do_list",
    "matrix": "commands:do_matrix",
    "new-patch": "commands:do_new_patch",
    "pin": "commands:do_pin",
    "plan": "commands:do_plan",
    "prove": "prove:do_prove",
    "run": "run:do_run",
    "status": "commands:do_status",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line. Returns the exit code. On wrong usage argparse itself exits with 2."""
    given = sys.argv[1:] if argv is None else list(argv)
    try:
        return _main(given)
    except KeyboardInterrupt:
        command = next((word for word in given if word in COMMANDS), "")
        tell(f"shim{command and f' {command}'}: interrupted. Nothing was written, and nothing is left patched.")
        return INTERRUPTED
    finally:
        try:
            if sys.stdout is not None:
                sys.stdout.flush()
        except BrokenPipeError:
            nobody_reads(sys.stdout)


def _main(given: Sequence[str]) -> int:
    parser = command_line()
    if not given:
        parser.print_help(sys.stderr)
        return USAGE
    arguments = parser.parse_args(given)
    try:
        with masked_log():
            return _function_of(arguments.command)(arguments)
    except (OptionError, MatrixError) as error:
        complain(error)
        return USAGE
    except ShimError as error:
        complain(error)
        return NOT_MET


def _function_of(command: str) -> Callable[[argparse.Namespace], int]:
    module, _, name = COMMANDS[command].partition(":")
    found: Callable[[argparse.Namespace], int] = getattr(importlib.import_module(f"shim._tools.{module}"), name)
    return found
