"""The release on PYTHONPATH: in `make test` one that packs rows with MTP and one that does not."""

import chosen

from shim import testing
from shim.testing.cells import EVERYDAY


def pytest_ignore_collect(collection_path):
    return True if chosen.left_out(collection_path, testing.release(), EVERYDAY) else None
