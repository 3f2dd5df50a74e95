"""How often what takes long is repeated: less under `make test`, in full under `make matrix`."""

import os

import pytest

THOROUGH = os.environ.get("SHIM_TEST_THOROUGH") == "1"


def times(everyday, in_full):
    """One of two numbers: of turns, of examples, or the stride of a sweep."""
    return in_full if THOROUGH else everyday


# For a test that takes many seconds, and whose parts other tests show.
in_full = pytest.mark.skipif(not THOROUGH, reason="only under make matrix")
