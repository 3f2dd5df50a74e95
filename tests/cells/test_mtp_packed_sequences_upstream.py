"""mtp-packed-sequences where the source has fixed padding itself: with a loss mask, stock's packed equals alone."""

import dataclasses

import pytest

import shim
from shim import testing
from shim.testing import Layout

CELLS = {"0.17.1": "all"}

ID = "mtp-packed-sequences"
if shim.plan()[ID].action != "upstream":
    pytest.skip("this release needs the patch", allow_module_level=True)

WITHIN_LAYOUT = 1e-6


def off(layout, lengths, align, loss_mask, per_token_loss):
    """The differences in losses and gradients; the logged losses are reduced in another way here."""
    with testing.megatron_on_cpu(), testing.layout_initialised(layout):
        gpt = testing.build_gpt(mtp_num_layers=2)
        row = testing.pack(testing.random_sequences(lengths), align=align)
        options = {"loss_mask": loss_mask, "per_token_loss": per_token_loss}
        packed, alone = testing.run_packed(gpt, row, **options), testing.run_alone(gpt, row, **options)
    return testing.differences(dataclasses.replace(packed, logged=alone.logged), alone)


def worst(*args):
    return testing.worst(off(*args))


@pytest.mark.parametrize("per_token_loss", [False, True])
@pytest.mark.parametrize(("lengths", "align"), [((5, 7, 4), 1), ((5, 7, 4), 4), ((1, 6, 2), 4)])
def test_packed_equals_alone(lengths, align, per_token_loss):
    assert worst(Layout(), lengths, align, True, per_token_loss) <= WITHIN_LAYOUT


@pytest.mark.parametrize("lengths", [(8, 16, 8), (5, 13, 3)])
def test_packed_equals_alone_under_context_parallelism(ranks2, lengths):
    """The loss of each token is. Each rank divides by its own count of targets: see mtp-loss-cp."""
    for found in ranks2.run(off, Layout(cp=2), lengths, 4, True, False):
        assert max(found["main"], found["mtp"]) <= WITHIN_LAYOUT < found["grad"]


def test_without_a_loss_mask_padding_is_trained_on():
    """What the note says. Where this fails, the note is out of date."""
    assert worst(Layout(), (5, 7, 4), 4, False, False) > 1e-2
