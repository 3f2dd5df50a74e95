"""What a command says while it takes seconds: one line on a terminal, seldom elsewhere, nothing of others."""

import io
import logging
import sys
import warnings

from shim._tools.progress import Progress, hushed


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_on_a_terminal_one_line_overwrites_itself_and_is_taken_away():
    stream = Terminal()
    progress = Progress(stream)
    progress("a long first step")
    progress("short")
    assert stream.getvalue() == "\ra long first step\rshort" + " " * 12
    progress.done()
    progress.done()
    assert stream.getvalue().endswith("\r     \r") and stream.getvalue().count("\r") == 4


def test_elsewhere_a_line_is_printed_where_nothing_was_said_for_a_while():
    stream = io.StringIO()
    quiet, talking = Progress(stream, patience=3600), Progress(stream, patience=0)
    quiet("not yet")
    talking("now")
    talking.done()
    assert stream.getvalue() == "now\n"


def test_without_standard_error_nothing_is_said(monkeypatch, capfd):
    """As under pythonw and in some services."""
    monkeypatch.setattr(sys, "stderr", None)
    progress = Progress()
    progress("lost")
    progress.done()
    assert capfd.readouterr() == ("", "")


def test_what_others_say_is_kept_from_the_terminal_and_what_shim_logs_is_not(capsys):
    log = logging.getLogger("shim")
    handlers = list(log.handlers)
    with hushed():
        print("of others")
        print("of others", file=sys.stderr)
        warnings.warn("of others")
        log.warning("drifted")
    said = capsys.readouterr()
    assert (said.out, said.err) == ("", "shim: drifted\n")
    assert log.handlers == handlers
