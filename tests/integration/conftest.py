"""A browser for the tests of pages, one for each file of tests."""

import pytest
from chromium import Chromium


@pytest.fixture(scope="module")
def browser():
    started = Chromium()
    yield started
    started.close()
