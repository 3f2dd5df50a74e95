"""te-grouped-mlp-hybrid: which recipes fuse a grouped MLP."""

from importlib import import_module

from needed import needed
from transformer_engine.common.recipe import DelayedScaling

import shim
from shim.patches.transformer_engine.te_grouped_mlp_hybrid import FUSE
from shim.patches.transformer_engine.te_grouped_mlp_hybrid.proof import Fused, is_fused

CELLS = {"0.17.1+2.14.1": "all"}

ID = "te-grouped-mlp-hybrid"
pytestmark = needed(ID)


def test_gradients_in_e4m3_are_fused_as_on_stock():
    assert is_fused("E4M3") and is_fused("HYBRID")
    with shim.patched(only=[ID], require=[ID]):
        assert is_fused("E4M3") and not is_fused("HYBRID")


def test_no_recipe_and_another_recipe():
    module, _, name = FUSE[shim.plan()[ID].variant].partition(":")
    ops = [object()]
    with shim.patched(only=[ID], require=[ID]):
        fuse = getattr(import_module(module), name)
        for recipe in (None, DelayedScaling()):
            assert fuse(ops, recipe=recipe, fused_op_cls=Fused) == ops
