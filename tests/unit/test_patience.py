"""Limits that guard against a hang: one function says how long they are, and no test has a number of its own."""

import os
import re

import pytest
from unit_helpers import REPOSITORY

from shim.testing.patience import patience

# At most so many seconds pass where the hang itself is the subject, and the test makes it.
MADE = 10
LIMITS = re.compile(
    r"(?:timeout=|\btimeout: float = |\.(?:wait|join|alarm)\(|started < |monotonic\(\) \+ |PATIENCE = )(\d+(?:\.\d+)?)"
)
FOLDERS = ("unit", "engine", "ops", "testing", "support", "cells", "pairs", "examples", "gpu", "integration")


@pytest.mark.parametrize(("load", "cores", "expected"), [(0.1, 2, 600), (2, 2, 600), (40, 2, 12000), (6, 4, 900)])
def test_a_limit_grows_with_what_waits_for_each_core(monkeypatch, load, cores, expected):
    monkeypatch.setattr(os, "getloadavg", lambda: (load, 0, 0))
    monkeypatch.setattr(os, "cpu_count", lambda: cores)
    assert patience() == expected
    assert patience(10) == expected / 60


def test_no_test_has_a_limit_of_its_own():
    files = [file for folder in FOLDERS for file in (REPOSITORY / "tests" / folder).rglob("*.py")]
    files += (REPOSITORY / "shim/testing").rglob("*.py")
    own = [
        f"{file.relative_to(REPOSITORY)}: {found[0]}"
        for file in files
        for found in LIMITS.finditer(file.read_text("utf-8"))
        if float(found[1]) > MADE
    ]
    assert len(files) > 300 and own == []


@pytest.mark.parametrize("text", ["timeout=%d)", "t.join(%d)", "started < %d", "deadline = time.monotonic() + %d"])
def test_a_number_is_seen(text):
    assert float(LIMITS.search(text % 30)[1]) > MADE
