"""bindings() of every patch gives what the matrix says, without megatron-core and Transformer Engine to be imported."""

import importlib
import sys

import pytest

from shim._matrix.load import load_matrix

CASES = [(entry, variant) for entry in load_matrix().patches.values() for variant in entry.variants.values()]


class NoUpstream:
    """A finder that forbids what patches are for."""

    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("megatron", "transformer_engine"):
            raise ImportError(f"{name} is imported to make factories")


@pytest.fixture
def no_upstream(monkeypatch):
    monkeypatch.setattr(sys, "meta_path", [NoUpstream(), *sys.meta_path])


@pytest.mark.parametrize(("entry", "variant"), CASES, ids=[f"{entry.id}-{variant.name}" for entry, variant in CASES])
def test_factories_are_those_of_the_targets_in_the_matrix(no_upstream, entry, variant):
    """A target that only one of them has would be an error in a trainer's process, when it imports the module."""
    found = importlib.import_module(entry.module).bindings(variant.name, dict(entry.options))
    assert set(found) == set(variant.targets)
    assert all(callable(factory) for factory in dict(found).values())


def test_upstream_is_out_of_reach(no_upstream):
    """Else the test above would prove less than it says."""
    with pytest.raises(ImportError, match="is imported to make factories"):
        importlib.import_module("transformer_engine.pytorch")
