"""mla-fused-down-projection: one rank runs upstream's function, and frozen weights pass gradients on."""

import pytest
import torch

import shim
from shim import testing
from shim.patches.megatron_core.mla_fused_down_projection.proof import BATCH, HIDDEN, TOKENS, build, trained

CELLS = {"0.17.0": "all"}

IDS = ["mla-fused-down-projection", "mla-rope-key-gradient"]
NEEDED = shim.plan()[IDS[0]].wanted
pytestmark = pytest.mark.skipif(not NEEDED, reason="this release needs no patch")


def frozen(sequence_parallel):
    """The gradient of the hidden states of a rank, where the layer is frozen."""
    layer = build(sequence_parallel).requires_grad_(False)
    hidden = torch.randn(TOKENS, BATCH, HIDDEN, generator=torch.Generator().manual_seed(1))
    if sequence_parallel:
        hidden = hidden.chunk(2)[torch.distributed.get_rank()]
    hidden = hidden.clone().requires_grad_()
    layer(hidden, None)[0].square().sum().backward()
    return hidden.grad


def of_two_ranks(sequence_parallel):
    with testing.megatron_on_cpu(), testing.layout_initialised(testing.Layout(tp=2)):
        with shim.patched(only=IDS, require=IDS):
            return frozen(sequence_parallel)


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_a_frozen_layer_passes_the_gradient_of_one_rank_on(ranks2, sequence_parallel):
    with testing.layout_initialised(testing.Layout()):
        expected = frozen(False)
    found = ranks2.run(of_two_ranks, sequence_parallel)
    for rank, mine in enumerate(found):
        whole = expected.chunk(2)[rank] if sequence_parallel else expected
        assert torch.allclose(mine, whole, rtol=1e-4, atol=1e-6)


def test_one_rank_is_as_on_stock():
    with testing.layout_initialised(testing.Layout()):
        stock = trained()
        with shim.patched(only=IDS[:1], require=IDS[:1]):
            found = trained()
    assert all(torch.equal(found[name], stock[name]) for name in stock)
