"""moe-tracker-pipeline: a stage without experts makes what a router would, and nothing else changes."""

import contextlib
from unittest import mock

import pytest
import torch
from megatron.core.transformer.moe import moe_utils
from needed import needed

import shim
from shim import testing
from shim.patches.megatron_core.moe_tracker_pipeline.proof import tracker

CELLS = {"0.14.0": "all"}

ID = "moe-tracker-pipeline"
NEEDED = shim.plan()[ID].wanted
pytestmark = needed(ID)
FORCED = {"force_initialize": True, "track_names": ["load_balancing_loss", "z_loss"], "num_layers": 4}


@pytest.fixture(autouse=True)
def one_rank_without_losses():
    with testing.layout_initialised(testing.Layout()):
        if NEEDED:
            tracker().clear()
        yield
        if NEEDED:
            tracker().clear()


def places(patched, **arguments):
    """How many places each loss has after a call on a stage without experts."""
    with shim.patched(only=[ID], require=[ID]) if patched else contextlib.nullcontext():
        moe_utils.track_moe_metrics(1.0, 0, None, total_loss_dict={}, **arguments)
    found = {name: entry["values"].tolist() for name, entry in tracker().items()}
    tracker().clear()
    return found


def test_stock_has_no_place_for_mtp():
    assert places(False, **FORCED, mtp_num_layers=2) == dict.fromkeys(FORCED["track_names"], [0.0] * 4)


def test_each_mtp_layer_has_its_place():
    assert places(True, **FORCED, mtp_num_layers=2) == dict.fromkeys(FORCED["track_names"], [0.0] * 6)


@pytest.mark.parametrize(
    "arguments",
    [FORCED, {**FORCED, "mtp_num_layers": 0}, {**FORCED, "track_names": None}, {"num_layers": 4, "mtp_num_layers": 2}],
    ids=["without MTP", "no MTP layer", "no names", "not forced"],
)
def test_what_stock_does_right_stays(arguments):
    assert places(True, **arguments) == places(False, **arguments)


def test_what_a_router_has_saved_stays():
    """Only what is missing is made."""
    moe_utils.save_to_aux_losses_tracker("z_loss", torch.tensor(3.0), 2, 6)
    entry = tracker()["z_loss"]
    with shim.patched(only=[ID], require=[ID]):
        total = {}
        moe_utils.track_moe_metrics(1.0, 0, mock.Mock(), total_loss_dict=total, **FORCED, mtp_num_layers=2)
    assert tracker()["z_loss"] is entry
    assert total["z_loss"] == 0.5  # of six layers
    assert total["load_balancing_loss"] == 0


def test_a_call_that_names_no_layers_fails_as_on_stock():
    arguments = {"force_initialize": True, "track_names": ["z_loss"], "mtp_num_layers": 1}
    with pytest.raises(TypeError) as stock:
        places(False, **arguments)
    tracker().clear()
    with pytest.raises(TypeError) as patched:
        places(True, **arguments)
    assert str(patched.value) == str(stock.value)
