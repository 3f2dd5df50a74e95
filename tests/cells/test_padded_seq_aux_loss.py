"""padded-seq-aux-loss: rows count as alone on each layout and with tokens, and equal rows give stock's bits."""

import pytest
import torch
from all_reduces import sizes_of_all_reduces
from needed import needed

import shim
from shim import testing
from shim.patches.megatron_core._proof_router_losses import PER_TOKEN, TOKENS, off_by
from shim.patches.megatron_core.padded_seq_aux_loss.proof import PADDING, gradient
from shim.testing import Layout

CELLS = {"0.16.1": "all"}

ID = "padded-seq-aux-loss"
pytestmark = needed(ID)

# The weight of the whole loss, by rows and ranks, is theirs, and microbatches without a token.
SCALES = ("seq-aux-loss-scale", "moe-aux-loss-scale", "padding-only-microbatch")
RECOMPUTE = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
ALL = TOKENS


def fixed(*args):
    with shim.patched(only=[ID, *SCALES], require=[ID]):
        return gradient(*args)


def on(layout, function, *args):
    with testing.megatron_on_cpu(), testing.layout_initialised(layout):
        return function(*args)


@pytest.mark.parametrize("options", [{}, PER_TOKEN, RECOMPUTE], ids=["mean", "sum", "recompute"])
@pytest.mark.parametrize("padding", [PADDING, (3, 1), (ALL, 3)], ids=["long and short", "odd", "one of padding"])
def test_rows_are_balanced_as_alone(one_rank, options, padding):
    if padding == (ALL, 3):  # a row without tokens is in no mean, so that the other one is all
        options = {**options, **PER_TOKEN}
    assert off_by(fixed(2, options, padding), fixed(1, options, padding)) < 1e-5


@pytest.mark.parametrize("options", [{}, PER_TOKEN], ids=["mean", "sum"])
@pytest.mark.parametrize("layout", [Layout(cp=2), Layout(tp=2, sequence_parallel=True)], ids=["CP 2", "TP 2"])
def test_ranks_that_share_rows_balance_them_as_one_does(ranks2, layout, options):
    right = on(Layout(), fixed, 1, options)
    for found in ranks2.run(on, layout, fixed, 2, options):
        assert off_by(found, right) < 1e-5


@pytest.mark.parametrize("options", [{}, PER_TOKEN], ids=["mean", "sum"])
@pytest.mark.parametrize("padding", [(), (3, 3)], ids=["no mask", "equal"])
def test_rows_of_equal_length_stay(one_rank, options, padding):
    with shim.patched(only=[ID], require=[ID]):
        found = gradient(2, options, padding)
    assert torch.equal(found, gradient(2, options, padding))


def messages(of):
    with sizes_of_all_reduces() as found:
        on(Layout(cp=2), of, 2, {})
    return found


def with_patch(*args):
    with shim.patched(only=[ID], require=[ID]):
        return gradient(*args)


def test_no_message_is_added(ranks2):
    assert ranks2.run(messages, with_patch) == ranks2.run(messages, gradient)
