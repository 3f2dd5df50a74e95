"""Ctrl-C is one line and exit code 130 at any moment of a command, from the first line of shim's that runs."""

import os
import signal
import subprocess
import sys

import pytest
from thorough import times
from unit_helpers import REPOSITORY

# Interrupts itself at one of the events that Python tells of: a module that is imported, a file that is opened.
PROGRAM = """
import os, signal, sys
seen, at = 0, int(sys.argv[1])
def told(event, given):
    global seen
    begun = seen or event == "import" and given[0].startswith("shim._tools")
    if begun and event in ("import", "open", "exec"):
        seen += 1
        if seen == at:
            os.kill(os.getpid(), signal.SIGINT)
sys.addaudithook(told)
sys.argv[1:] = sys.argv[2:]
from shim.__main__ import main
try:
    sys.exit(main())
finally:
    if not at:
        os.write(2, b"%d\\n" % seen)
"""
COMMANDS = (["list"], ["plan", "--for", "mtp"], ["status"], ["explain", "mtp-recompute"], ["doctor"], ["matrix"])
COMMANDS = COMMANDS[: times(3, 6)]
PLACES = times(3, 8)


def run(at, command):
    return subprocess.run(
        [sys.executable, "-c", PROGRAM, str(at), *command],
        capture_output=True,
        text=True,
        check=False,
        cwd=REPOSITORY,
        # A shell that runs the tests in its background lets them ignore SIGINT, and so what they start.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
        env={**os.environ, "PYTHONDONTWRITEBYTECODE": "1"},
    )


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command[0])
def test_an_interrupt_at_any_moment_is_one_line_and_130(command):
    events = int(run(0, command).stderr.splitlines()[-1])
    assert events > 10 * PLACES  # imports of shim itself among them
    for place in range(PLACES):
        at = 1 + place * (events - 1) // PLACES
        done = run(at, command)
        said = done.stderr.splitlines()
        assert done.returncode == 130 and len(said) == 1, (at, done.stderr)
        assert said[0].startswith("shim") and "interrupted" in said[0]


def test_an_interrupt_that_the_parent_ignores_is_ignored():
    """As that of a command in the background of a shell without job control, or under nohup."""
    program = PROGRAM.replace("import os, signal, sys", "import os, signal, sys; signal.signal(2, signal.SIG_IGN)")
    command = [sys.executable, "-c", program, "50", "list"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=REPOSITORY)
    assert (done.returncode, done.stderr) == (0, "") and done.stdout
