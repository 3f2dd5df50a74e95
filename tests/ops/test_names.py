"""The public names of shim.ops, after other modules of it were imported."""

import types

import pytest

pytest.importorskip("torch")

import shim.ops


@pytest.mark.parametrize("name", shim.ops.__all__)
def test_a_name_is_no_module(name):
    """A submodule of the same name would take its place, once anything imports it."""
    assert not isinstance(getattr(shim.ops, name), types.ModuleType)
