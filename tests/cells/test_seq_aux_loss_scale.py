"""seq-aux-loss-scale: the gradient is that of one row in a microbatch, on ranks, with padding and in a recompute."""

import contextlib

import pytest
import torch
from needed import needed

import shim
from shim import testing
from shim.patches.megatron_core._proof_router_losses import PER_TOKEN, off_by
from shim.patches.megatron_core.seq_aux_loss_scale.proof import gradient

CELLS = {"0.16.0": "all"}

ID, RANKS = "seq-aux-loss-scale", "moe-aux-loss-scale"
pytestmark = needed(ID)
FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}


def gradients(layout, ids, *ways):
    """The gradient of routers for each way, with these patches."""
    active = shim.patched(only=ids, require=ids) if ids else contextlib.nullcontext()
    with testing.megatron_on_cpu(), testing.layout_initialised(layout), active:
        return [gradient(*way) for way in ways]


@pytest.mark.parametrize(("options", "padding"), [(FULL, []), ({}, [2, 2])], ids=["recompute", "padding"])
def test_two_rows_in_a_microbatch_have_the_gradient_of_one(options, padding):
    """Rows with different numbers of tokens would have other weights: a microbatch counts by its tokens."""
    options = {**PER_TOKEN, **options}
    one, two = gradients(testing.Layout(), [ID], (1, options, padding), (2, options, padding))
    assert off_by(two, one) < 1e-5


def test_on_two_ranks_it_is_that_of_one_rank_with_the_other_patch(ranks2):
    (truth,) = gradients(testing.Layout(), [], (1, PER_TOKEN))
    for (found,) in ranks2.run(gradients, testing.Layout(cp=2), [ID, RANKS], (2, PER_TOKEN)):
        assert off_by(found, truth) < 1e-5


def test_what_stock_does_right_stays():
    """One row in a microbatch, and a mean over tokens."""
    ways = [(1, PER_TOKEN), (2, {"calculate_per_token_loss": False})]
    for found, expected in zip(*(gradients(testing.Layout(), ids, *ways) for ids in ([ID], [])), strict=True):
        assert torch.equal(found, expected)
