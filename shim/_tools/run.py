"""`shim run`: a command with shim in every Python process. It imports little: it waits in front of each job."""

from __future__ import annotations

import argparse

from shim._errors import OptionError
from shim._planning.options import Arguments, asked_matrix, resolve
from shim._tools.arguments import held
from shim._tools.output import tell
from shim._workers.environment import CommandError, run

__all__ = ["do_run"]


def do_run(arguments: argparse.Namespace) -> int:
    command = arguments.command_line[1:] if arguments.command_line[:1] == ["--"] else arguments.command_line
    if not command:
        raise OptionError("shim run needs a command behind --, for instance: shim run -- torchrun train.py")
    given = held(arguments)
    asked = Arguments(**given)
    # Names that each process of the command would refuse are refused here.
    resolve(asked_matrix(asked), asked)
    try:
        run(command, **given)
    except CommandError as error:
        tell(f"shim: {error}")
        return error.exit_code
    raise AssertionError("exec returned")
