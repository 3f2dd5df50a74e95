"""dsa-indexer-loss-scale: per-token loss, other models, and a scale that goes with the patch."""

from importlib import import_module

import pytest
import torch
from needed import needed

import shim
from shim import testing
from shim.patches.megatron_core.dsa_indexer_loss_scale.proof import gradients

CELLS = {"0.16.1": "all"}

ID = "dsa-indexer-loss-scale"
DSA = "megatron.core.transformer.experimental_attention_variant.dsa"
pytestmark = [needed(ID), pytest.mark.usefixtures("one_rank")]


def with_patch(*args, **overrides):
    with shim.patched(only=[ID], require=[ID]):
        return gradients(*args, **overrides)


def test_per_token_loss_is_not_divided_by_microbatches():
    """The sum over microbatches is divided later, by the number of tokens, as in 0.19."""
    alike = {"calculate_per_token_loss": True}
    assert torch.equal(with_patch(4, **alike)[1], gradients(4, **alike)[1])
    scaled = with_patch(4, lambda loss: loss * 8, **alike)[1]
    assert torch.equal(scaled, 8 * gradients(4, **alike)[1])


def test_one_microbatch_without_a_loss_scaler_stays():
    assert torch.equal(with_patch(1), gradients(1))


def test_other_models_set_no_scale():
    found = with_patch(4, experimental_attention_variant=None)
    assert torch.equal(found, gradients(4, experimental_attention_variant=None))


@pytest.mark.parametrize("before", [None, torch.tensor(1.0), torch.ones(1)])
def test_the_scale_goes_with_the_patch(before):
    """Stock would never set it back. What is there may be what upstream's backward has put there."""
    scaler = import_module(DSA).DSAIndexerLossAutoScaler
    try:
        with shim.patched(only=[ID], require=[ID]):
            schedules = import_module("megatron.core.pipeline_parallel.schedules")
            scaler.main_loss_backward_scale = before
            config = testing.build_gpt(mtp_num_layers=None, num_layers=1).config
            config.experimental_attention_variant = "dsa"
            model, loss = torch.nn.Linear(1, 1), torch.ones(())
            schedules.forward_step_calc_loss(
                model,
                loss,
                lambda output: (output, {}),
                config,
                None,
                False,
                4,
                [],
                cp_group_size=1,
                is_last_stage=True,
            )
            assert scaler.main_loss_backward_scale == 0.25
            assert shim.status()[ID].holds
        assert scaler.main_loss_backward_scale is None
    finally:
        scaler.main_loss_backward_scale = None
