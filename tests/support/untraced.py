"""Tests marked `no_cover` run without a trace function.

pytest-cov measures twice in a worker of pytest-xdist, and stops one of the two for such a test.
"""

import sys
import threading

import pytest


@pytest.hookimpl(wrapper=True, trylast=True)
def pytest_runtest_call(item):
    if item.get_closest_marker("no_cover") is None:
        return (yield)
    here, elsewhere = sys.gettrace(), threading.gettrace()
    sys.settrace(None)
    threading.settrace(None)
    try:
        return (yield)
    finally:
        threading.settrace(elsewhere)
        sys.settrace(here)
