"""Acts at a place within shim's engine, as a signal handler does, and forks to ask in the child."""

import contextlib
import linecache
import os
import sys
from pathlib import Path

import shim

SHIM = Path(shim.__file__).parent
FILES = {str(SHIM / "_api.py"), *map(str, (SHIM / "_engine").glob("*.py"))}


def interrupt():
    raise KeyboardInterrupt


def refused(call):
    """A handler that calls shim, and goes on if it is refused."""

    def handle():
        with contextlib.suppress(shim.OptionError):
            call()

    return handle


ACTS = {
    "interrupt": interrupt,
    "revert": refused(lambda: shim.revert()),
    "apply": refused(lambda: shim.apply()),
    "status": refused(lambda: shim.status()),
}


@contextlib.contextmanager
def acting(at, act):
    """Within the block, call `act` before the line number `at` of the engine that this thread comes to."""
    left = at

    def trace(frame, event, argument):
        nonlocal left
        if frame.f_code.co_filename not in FILES:
            return None
        # At the end of a with-block a trace may raise before the lock is released, where Python raises no signal.
        if event == "line" and not linecache.getline(frame.f_code.co_filename, frame.f_lineno).lstrip().startswith(
            "with "
        ):
            left -= 1
            if left == 0:
                sys.settrace(None)
                act()
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        yield
    except KeyboardInterrupt:
        pass
    finally:
        sys.settrace(before)


def holds_in_a_fork(*questions):
    """Whether all questions, asked one after the other in a forked process, raise nothing there."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            for question in questions:
                question()
            code = 0
        finally:
            os._exit(code)
    return os.waitpid(pid, 0)[1] == 0
