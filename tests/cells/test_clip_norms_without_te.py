"""clip-norms-without-te: towers are built with the block's own norm, and norms that are given stay."""

import pytest
import torch
from megatron.core.transformer import transformer_block
from megatron.core.transformer.torch_norm import WrappedTorchNorm

import shim
from shim.patches.megatron_core.clip_norms_without_te.proof import WIDTH, seen, tower

CELLS = {"0.19.2": "all"}

ID = "clip-norms-without-te"
pytestmark = pytest.mark.usefixtures("one_rank")  # of tests/cells/conftest.py
kinds = pytest.mark.parametrize(("kind", "place"), [("clip", "ln_pre"), ("siglip", "ln_post")])


def applied():
    return shim.patched(only=[ID], require=[ID])


@kinds
def test_a_tower_by_default(kind, place):
    """Without Transformer Engine, as here."""
    with pytest.raises(TypeError, match="unexpected keyword argument 'config'"):
        tower(kind)
    with applied():
        norm = getattr(tower(kind), place)
    assert norm.weight.shape == (WIDTH,)
    assert type(norm) in (torch.nn.LayerNorm, transformer_block.LayerNormImpl)


@kinds
def test_norms_that_are_given_stay(kind, place):
    class Given(torch.nn.LayerNorm):
        def __init__(self, config, hidden_size, eps):
            super().__init__(hidden_size, eps)

    norms = {"ln_pre_impl": Given, "ln_post_impl": Given}
    stock = seen(kind, **norms)
    with applied():
        assert type(getattr(tower(kind, **norms), place)) is Given
        assert torch.equal(seen(kind, **norms), stock)
        assert torch.equal(seen(kind), seen(kind, ln_pre_impl=WrappedTorchNorm, ln_post_impl=WrappedTorchNorm))
