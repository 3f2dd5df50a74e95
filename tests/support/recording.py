"""Keeps what a run of tests has spent and skipped, if SHIM_TEST_RECORD names a file: one line of JSON for each.

Every process of pytest adds its lines; everything.py makes one table of them.
"""

import json
import os
import sys
import time
from pathlib import Path

import pytest

# How a test begins the reason to skip it when the sources of a release or commit cannot be had here.
NO_SOURCES = "no sources of "
RECORD = os.environ.get("SHIM_TEST_RECORD")
TICKS = os.sysconf("SC_CLK_TCK")


def cpu_seconds():
    """User and system time of this process and of all processes below it, ended ones included."""
    spent = sum(os.times()[:4])
    below, seen = {}, {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:  # it has ended meanwhile
            continue
        process = int(stat.parent.name)
        below.setdefault(int(fields[1]), []).append(process)
        seen[process] = sum(map(int, fields[11:15])) / TICKS
    waiting = list(below.get(os.getpid(), ()))
    while waiting:
        process = waiting.pop()
        spent += seen[process]
        waiting += below.get(process, ())
    return spent


class Recorder:
    """Sums by file; a worker of pytest-xdist gets tests of many files in turn."""

    def __init__(self):
        self.begun = cpu_seconds(), time.monotonic()
        self.files = {}

    def write(self, **line):
        line = {"target": os.environ.get("SHIM_TEST_TARGET", ""), **line}
        with open(RECORD, "a") as file:
            file.write(json.dumps(line) + "\n")

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item, nextitem):
        if self.begun is None:
            self.begun = cpu_seconds(), time.monotonic()
        result = yield
        name = item.nodeid.partition("::")[0]
        spent = self.files.setdefault(name, [0.0, 0.0, 0])
        spent[2] += 1
        if nextitem is None or nextitem.path != item.path:
            now = cpu_seconds(), time.monotonic()
            spent[:2] = [had + after - before for had, after, before in zip(spent, now, self.begun)]
            self.begun = None
        return result

    def pytest_collection_finish(self):
        self.begun = None

    def pytest_runtest_logreport(self, report):
        if report.skipped and isinstance(report.longrepr, tuple) and not hasattr(report, "node"):
            reason = report.longrepr[2].removeprefix("Skipped: ")
            if reason.startswith(NO_SOURCES):
                self.write(skipped=report.nodeid, reason=reason)

    def pytest_sessionfinish(self):
        python = f"{sys.version_info[0]}.{sys.version_info[1]}"
        for name, (cpu, wall, tests) in self.files.items():
            self.write(file=name, python=python, cpu=round(cpu, 2), wall=round(wall, 2), tests=tests)


def pytest_configure(config):
    if RECORD:
        config.pluginmanager.register(Recorder(), "recorder")
