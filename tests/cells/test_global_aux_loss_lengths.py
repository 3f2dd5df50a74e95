"""global-aux-loss-lengths: shares of experts add up to one after any microbatches, and equal ones give stock's bits."""

import pytest
import torch
from needed import needed

import shim
from shim.patches.megatron_core._proof_features import takes_padding_mask
from shim.patches.megatron_core._proof_router_losses import GLOBAL, TOKENS, gradient
from shim.patches.megatron_core.global_aux_loss_lengths.proof import gradients

CELLS = {"0.19.2": "all"}

ID = "global-aux-loss-lengths"
pytestmark = [needed(ID), pytest.mark.usefixtures("one_rank")]  # of tests/cells/conftest.py


def applied():
    return shim.patched(only=[ID], require=[ID])


@pytest.mark.parametrize("options", [{}, {"calculate_per_token_loss": True}], ids=["mean", "sum"])
def test_a_microbatch_counts_by_its_own_tokens(options):
    with applied():
        first, *others = gradients((2, 1, 5, 2), **options)
    for times, found in zip((1, 5, 2), others, strict=True):
        weight = times / 2 if options else 1  # of a sum over tokens
        assert torch.allclose(found, weight * first, rtol=1e-4, atol=1e-7)


def test_equal_microbatches_stay():
    with applied():
        found = gradients((2, 2, 2))
    assert all(torch.equal(mine, stock) for mine, stock in zip(found, gradients((2, 2, 2)), strict=True))


@pytest.mark.skipif(not takes_padding_mask(), reason="models of this release take no padding mask")
def test_padding_is_not_counted():
    """Of two microbatches the second has more padding; where they have as much, stock is right."""
    unequal, equal = (0, TOKENS // 2), (2, 2)
    with applied():
        found = {padding: gradient(GLOBAL, padding) for padding in (unequal, equal)}
    assert not torch.allclose(found[unequal], gradient(GLOBAL, unequal), rtol=1e-3)
    assert torch.equal(found[equal], gradient(GLOBAL, equal))
