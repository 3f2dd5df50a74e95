"""te-grouped-mlp-hybrid: which recipes fuse a grouped MLP."""

from importlib import import_module
from importlib.util import find_spec

import pytest
from transformer_engine.common.recipe import DelayedScaling

import shim
from shim.patches.transformer_engine.te_grouped_mlp_hybrid import FUSE
from shim.patches.transformer_engine.te_grouped_mlp_hybrid.proof import Fused, is_fused
from shim.testing.proof import CannotRunError

CELLS = {"0.17.1+2.14.1": "all"}

ID = "te-grouped-mlp-hybrid"
NEEDED = shim.plan()[ID].wanted
needed = pytest.mark.skipif(not NEEDED, reason="this release needs no patch")


@needed
def test_gradients_in_e4m3_are_fused_as_on_stock():
    assert is_fused("E4M3") and is_fused("HYBRID")
    with shim.patched(only=[ID], require=[ID]):
        assert is_fused("E4M3") and not is_fused("HYBRID")


@needed
def test_no_recipe_and_another_recipe():
    module, _, name = FUSE[shim.plan()[ID].variant].partition(":")
    ops = [object()]
    with shim.patched(only=[ID], require=[ID]):
        fuse = getattr(import_module(module), name)
        for recipe in (None, DelayedScaling()):
            assert fuse(ops, recipe=recipe, fused_op_cls=Fused) == ops


@pytest.mark.skipif(NEEDED, reason="this release needs the patch")
def test_this_release_needs_no_patch():
    """It fuses nothing, or nothing of this format."""
    try:
        assert not is_fused("HYBRID") and is_fused("E4M3")
        assert shim.plan()[ID].action == "upstream"
    except CannotRunError:
        assert shim.plan()[ID].action == "not-needed"
        assert find_spec("transformer_engine.pytorch.ops.fused.grouped_mlp") is None
