"""padding-only-microbatch: such a microbatch adds nothing, also on ranks that share it, and other counts stay."""

import pytest
import torch
from needed import needed

import shim
from shim import testing
from shim.patches.megatron_core._proof_router_losses import AUX, GLOBAL, PER_TOKEN, TOKENS, gradient, off_by
from shim.patches.megatron_core.padding_only_microbatch.proof import PADDING, SEQUENCES
from shim.testing import Layout

CELLS = {"0.16.1": "all"}

ID = "padding-only-microbatch"
pytestmark = needed(ID)

Z_LOSS = {"moe_router_load_balancing_type": "none", "moe_z_loss_coeff": 0.1}
LOSSES = {"aux": AUX, "sequences": SEQUENCES, "global": GLOBAL, "z": Z_LOSS}


def fixed(*args):
    with shim.patched(only=[ID, "moe-aux-loss-scale"], require=[ID]):
        return gradient(*args)


def on(layout, *args):
    with testing.megatron_on_cpu(), testing.layout_initialised(layout):
        return fixed(*args)


@pytest.mark.parametrize("loss", LOSSES)
def test_it_adds_nothing(one_rank, loss):
    """The other microbatch has a gradient, and two of padding alone have none."""
    found = fixed(LOSSES[loss] | PER_TOKEN, PADDING)
    assert found.isfinite().all()
    assert found.abs().sum() > 0
    assert not fixed(LOSSES[loss] | PER_TOKEN, (TOKENS, TOKENS)).any()


@pytest.mark.parametrize("loss", ["aux", "sequences"])
@pytest.mark.parametrize("options", [{}, PER_TOKEN], ids=["mean", "sum"])
@pytest.mark.parametrize("layout", [Layout(cp=2), Layout(tp=2, sequence_parallel=True)], ids=["CP 2", "TP 2"])
def test_ranks_that_share_it_have_the_gradient_of_one(ranks2, layout, options, loss):
    right = on(Layout(), LOSSES[loss] | options, PADDING)
    for found in ranks2.run(on, layout, LOSSES[loss] | options, PADDING):
        assert off_by(found, right) < 1e-5


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("padding", [(), (3, 0)], ids=["no mask", "a mask"])
def test_other_microbatches_stay(one_rank, loss, padding):
    with shim.patched(only=[ID], require=[ID]):
        found = gradient(LOSSES[loss], padding)
    assert torch.equal(found, gradient(LOSSES[loss], padding))
