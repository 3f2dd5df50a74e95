"""recompute-padding-mask: layers beside the recomputed ones train with the padding mask, and nothing else changes."""

import weakref
from types import SimpleNamespace

import pytest
import torch

import shim
from shim import testing
from shim.patches.megatron_core.recompute_padding_mask import CHECKPOINTED_FORWARD, bindings
from shim.patches.megatron_core.recompute_padding_mask.proof import (
    FIRST_LAYER,
    error,
    training,
)
from shim.testing import Layout

CELLS = {"0.16.0": "all"}

ID = "recompute-padding-mask"
NEEDED = shim.plan()[ID].wanted
needed = pytest.mark.skipif(not NEEDED, reason="this release needs no patch")
ROW = torch.arange(8)[None]
MASK = ROW >= 5
pytestmark = pytest.mark.usefixtures("one_rank")


def patched():
    return shim.patched(only=[ID], require=[ID])


def masks_of_layers(mask=MASK, **options):
    """The padding mask of each call of a layer, as (number of the layer, mask), in forward and backward."""
    model, calls = testing.build_gpt(mtp_num_layers=None, **{**FIRST_LAYER, **options}), []

    def remember(layer, args, kwargs):
        calls.append((layer.layer_number, kwargs.get("padding_mask")))

    for layer in model.decoder.layers:
        layer.register_forward_pre_hook(remember, with_kwargs=True)
    model(ROW, ROW, None, labels=ROW, padding_mask=mask).mean().backward()
    return calls


@needed
def test_adapters_are_trained_as_without_recompute():
    """Frozen weights, and adapters in all layers and experts."""
    with patched():
        assert error(adapters=True).value == 0
        assert len(training(adapters=True, **FIRST_LAYER)[0][0]) > 16


@needed
def test_every_layer_gets_the_mask_in_forward_and_recompute():
    with patched():
        calls = masks_of_layers(num_layers=3)
    assert [number for number, _ in calls] == [1, 2, 3, 1]
    assert all(torch.equal(mask, MASK) for _, mask in calls)


@needed
@pytest.mark.parametrize(
    ("mask", "options"),
    [(None, {}), (MASK, {"recompute_num_layers": 2}), (MASK, {"recompute_method": "uniform"})],
    ids=["no mask", "all layers", "uniform"],
)
def test_what_stock_does_right_stays(mask, options):
    """The layers get what they get on stock."""
    expected = masks_of_layers(mask, **options)
    with patched():
        found = masks_of_layers(mask, **options)
    assert [number for number, _ in found] == [number for number, _ in expected]
    assert all((one is None) is (other is None is mask) for (_, one), (_, other) in zip(found, expected))


@pytest.mark.parametrize(
    "mask, method, itself", [(MASK, "block", False), (MASK, "uniform", True), (None, "block", True)]
)
def test_upstream_gets_a_view_of_the_block_only_where_layers_lack_the_mask(mask, method, itself):
    """Where all layers get the mask, or there is none, the method runs on the model's own block."""

    def upstreams(self, hidden_states, padding_mask=None):
        return self

    block = type("Block", (), {})()
    block.config, block._get_layer = SimpleNamespace(recompute_method=method), None
    patched = bindings("v0_16", {})[CHECKPOINTED_FORWARD](upstreams)
    assert (patched(block, None, padding_mask=mask) is block) == itself


@needed
def test_the_block_keeps_nothing():
    """Neither after a step nor after an error in a layer."""
    model = testing.build_gpt(mtp_num_layers=None, **FIRST_LAYER)
    before, mask = set(vars(model.decoder)), MASK.clone()
    with patched():
        model(ROW, ROW, None, labels=ROW, padding_mask=mask).mean().backward()
        model.decoder.layers[1].register_forward_pre_hook(fail)
        with pytest.raises(KeyError, match="in a layer"):
            model(ROW, ROW, None, labels=ROW, padding_mask=mask)
    assert set(vars(model.decoder)) == before
    kept = weakref.ref(mask)
    del mask
    assert kept() is None


def fail(module, args):
    raise KeyError("in a layer")


def right_with_sequence_parallelism():
    """Each rank has half of the row, and of the mask."""
    options = {"sequence_parallel": True, "tensor_model_parallel_size": 2}
    with testing.layout_initialised(Layout(tp=2, sequence_parallel=True)), patched():
        return error(**options).value


@needed
def test_on_two_ranks_with_sequence_parallelism(ranks2):
    assert ranks2.run(right_with_sequence_parallelism) == [0, 0]


@needed
@pytest.mark.parametrize(
    ("options", "state"),
    [(FIRST_LAYER, "unknown"), ({**FIRST_LAYER, "recompute_num_layers": 2}, "applied"), ({}, "applied")],
)
def test_an_override_of_the_block_is_asked_about_where_it_matters(options, state):
    """mcore-bridge has one, and as upstream's it gives no mask to layers beside recomputed ones."""
    with patched():
        model = testing.build_gpt(mtp_num_layers=None, **{"num_moe_experts": 2, **options})
        own = {"_checkpointed_forward": lambda self, *args, **kwargs: None}
        model.decoder.__class__ = type("Own", (type(model.decoder),), own)
        assert shim.check(model)[ID].state == state
