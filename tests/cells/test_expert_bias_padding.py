"""expert-bias-padding: padding does not count for the bias of experts."""

import contextlib

import pytest
import torch

import shim
from shim import testing
from shim.patches.megatron_core._proof_features import takes_padding_mask
from shim.patches.megatron_core.expert_bias_padding.proof import MODEL, counted

CELLS = {"0.17.0": "all"}

ID = "expert-bias-padding"
NEEDED = shim.plan()[ID].wanted
needed = pytest.mark.skipif(not NEEDED, reason="this release needs no patch")
takes_mask = pytest.mark.skipif(not takes_padding_mask(), reason="models of this release take no padding mask")
FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}


@pytest.fixture(autouse=True)
def one_rank():
    torch.compiler.reset()  # torch 2.13 fails to compile the counts of the dev branch for sizes that change
    with testing.layout_initialised(testing.Layout()):
        yield


@needed
def test_stock_raises():
    """The mask has one value per token, and the counts one per token and expert."""
    with pytest.raises(RuntimeError, match=r"__and__|must match"):
        counted(tokens=4, padding=2)


@needed
def test_stock_leaves_out_the_wrong_places():
    """With as many tokens as experts the shapes fit, and a padding token takes an expert away instead of itself."""
    assert not torch.equal(counted(tokens=3, padding=1), counted(tokens=3))


def applied_where_needed():
    return shim.patched(only=[ID], require=[ID]) if NEEDED else contextlib.nullcontext()


@takes_mask
@pytest.mark.parametrize("options", [{}, FULL], ids=["plain", "recompute"])
@pytest.mark.parametrize(("tokens", "padding"), [(4, 2), (3, 1), (1, 6)])
def test_a_padded_row_counts_like_the_row_alone(tokens, padding, options):
    """Attention is causal, so that tokens are routed as if no padding came after them."""
    with applied_where_needed():
        found = counted(tokens, padding, **options)
    assert torch.equal(found, counted(tokens))
    assert found.sum() == tokens * MODEL["moe_router_topk"]


@needed
def test_without_padding_it_counts_as_stock_does():
    with shim.patched(only=[ID], require=[ID]):
        found = counted(tokens=6)
    assert torch.equal(found, counted(tokens=6))
