"""vit-local-attention: vision towers of the local spec see the whole image, also under recompute."""

import pytest

import shim

CELLS = {"0.17.1": "all"}

ID = "vit-local-attention"
NEEDED = shim.plan()[ID].wanted
pytestmark = pytest.mark.usefixtures("one_rank")
specs = pytest.importorskip("megatron.core.models.vision.vit_layer_specs", exc_type=ImportError)


@pytest.mark.skipif(not NEEDED, reason="this release needs no patch")
def test_the_spec_has_the_mask_of_the_other_one_and_nothing_else_changes():
    stock = specs.get_vit_layer_with_local_spec()
    with shim.patched(only=[ID], require=[ID]):
        found = specs.get_vit_layer_with_local_spec()
    other = specs.get_vit_layer_with_transformer_engine_spec()
    assert found.submodules.self_attention.params == other.submodules.self_attention.params
    assert found != stock
    found.submodules.self_attention.params = stock.submodules.self_attention.params
    assert found == stock
