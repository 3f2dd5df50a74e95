"""Tests of a patch run where the installed releases need it. That others are right on stock, its proofs say."""

import pytest

import shim


def needed(id):
    """A mark: skips a test, or with `pytestmark` a file, where nothing needs the patch."""
    return pytest.mark.skipif(not shim.plan()[id].wanted, reason="this release needs no patch")
