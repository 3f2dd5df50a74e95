"""The command `shim`, also as ``python -m shim``. Ctrl-C is one line and exit code 130, while it is imported, too."""

import os
import signal
import sys

INTERRUPTED = 130


def _leave(number: int, frame: object, write: object = os.write, leave: object = os._exit) -> None:
    """End the process: nothing is under way that would have to be put back.

    An exception could be raised anywhere in an import, or at the end of the interpreter, which prints it.
    write, leave: at the end of the interpreter a module may be empty already.
    """
    try:
        write(2, b"shim: interrupted\n")  # type: ignore[operator]
    finally:
        leave(INTERRUPTED)  # type: ignore[operator]


def main() -> int:
    """Run the command line. shim._tools.cli.main() handles Ctrl-C while a command runs."""
    at_a_terminal = signal.getsignal(signal.SIGINT) is signal.default_int_handler  # not in the background of a shell
    if at_a_terminal:
        signal.signal(signal.SIGINT, _leave)
    from shim._tools.cli import main as run

    try:
        if at_a_terminal:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        return run()
    except KeyboardInterrupt:  # between two lines of this function
        _leave(signal.SIGINT, None)
        raise
    finally:
        if at_a_terminal:
            signal.signal(signal.SIGINT, _leave)


if __name__ == "__main__":
    sys.exit(main())
