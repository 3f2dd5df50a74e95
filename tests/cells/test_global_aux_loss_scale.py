"""global-aux-loss-scale: switched on, replicas balance as hard as one rank, and what is logged stays."""

import contextlib

import pytest
import torch
from megatron.core.transformer.moe import moe_utils
from needed import needed

import shim
from shim import testing
from shim.patches.megatron_core._proof_features import takes_padding_mask
from shim.patches.megatron_core._proof_router_losses import AUX, PER_TOKEN, off_by
from shim.patches.megatron_core.global_aux_loss_scale.proof import OPTIONS, gradient
from shim.testing import Layout

CELLS = {"0.17.0": "all"}

ID = "global-aux-loss-scale"
pytestmark = needed(ID)
REPLICAS = Layout(ep=2)
FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}


def logged():
    """The losses that this rank has logged, by name."""
    if hasattr(moe_utils, "get_moe_metrics_tracker"):
        return {name: entry.values.clone() for name, entry in moe_utils.get_moe_metrics_tracker().metrics.items()}
    tracker = moe_utils.get_moe_layer_wise_logging_tracker()
    return {name: entry["values"].clone() for name, entry in tracker.items()}


def trained(options, padding, how, layout, rows=1):
    """The gradients of routers after a step, and what this rank has logged. how: None for stock, else sum_over_dp."""
    active = {"only": [ID], "require": [ID] if how else [], "options": {ID: {"sum_over_dp": how}}}
    patched = contextlib.nullcontext() if how is None else shim.patched(**active)
    with testing.megatron_on_cpu(), testing.layout_initialised(layout), patched:
        if hasattr(moe_utils, "get_moe_metrics_tracker"):
            moe_utils.get_moe_metrics_tracker().metrics.clear()
        else:
            moe_utils.get_moe_layer_wise_logging_tracker().clear()
        return gradient(options, padding, rows), logged()


CASES = {
    "recompute": ({**OPTIONS, **FULL}, []),
    "per token": ({**OPTIONS, **PER_TOKEN}, []),
    "padding": (OPTIONS, [2, 2]),
}


@pytest.mark.parametrize("case", CASES)
def test_replicas_get_the_gradient_of_one_rank(ranks2, case):
    options, padding = CASES[case]
    if padding and not takes_padding_mask():
        pytest.skip("models of this release take no padding mask")
    truth, _ = trained(options, padding, None, Layout(), 2)
    found = ranks2.run(trained, options, padding, True, REPLICAS)
    stock = ranks2.run(trained, options, padding, None, REPLICAS)
    for (gradients, losses), (others, expected) in zip(found, stock, strict=True):
        assert off_by(gradients, truth) < 1e-5
        assert off_by(2 * others, truth) < 1e-5
        assert losses.keys() == expected.keys() != set()
        assert all(torch.equal(losses[name], expected[name]) for name in expected)


@pytest.mark.parametrize(
    ("options", "how"),
    [(OPTIONS, False), ({**AUX, "moe_token_dispatcher_type": "allgather"}, True)],
    ids=["off", "another loss"],
)
def test_by_default_and_for_other_losses_nothing_changes(ranks2, options, how):
    found = ranks2.run(trained, options, [], how, REPLICAS)
    stock = ranks2.run(trained, options, [], None, REPLICAS)
    assert all(torch.equal(mine[0], expected[0]) for mine, expected in zip(found, stock, strict=True))


def test_one_rank_is_as_on_stock():
    found, stock = (trained(OPTIONS, [], how, Layout())[0] for how in (True, None))
    assert torch.equal(found, stock)


def test_it_is_inactive_until_it_is_switched_on():
    with testing.megatron_on_cpu(), testing.layout_initialised(Layout()):
        model = testing.build_gpt()
        with shim.patched(only=[ID]):
            found = shim.check(model)[ID]
            assert (found.state, found.reason.partition(";")[0]) == ("inactive", "the option sum_over_dp is off")
        with shim.patched(only=[ID], options={ID: {"sum_over_dp": True}}):
            assert shim.check(model)[ID].state == "applied"
