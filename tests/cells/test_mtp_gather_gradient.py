"""mtp-gather-gradient: gradients of multi-token prediction are those of one rank, with adapters and recompute too."""

import contextlib
import importlib
from unittest import mock

import pytest
import torch
from needed import needed

import shim
from shim import testing
from shim.patches.megatron_core._proof_trained_weights import distance, step, trained_weights
from shim.patches.megatron_core.mtp_gather_gradient.proof import build

CELLS = {"0.12.0": "all"}

ID = "mtp-gather-gradient"
NAME = "all_gather_last_dim_from_tensor_parallel_region"
pytestmark = needed(ID)
FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}


def patched(active=True):
    return shim.patched(only=[ID], require=[ID]) if active else contextlib.nullcontext()


def in_layout(tp, function, *args):
    with testing.megatron_on_cpu(), testing.layout_initialised(testing.Layout(tp=tp)):
        return function(*args)


def adapters(active, options):
    """The adapters on a frozen base, after some steps."""
    with patched(active):
        model = build(**options)
        testing.add_lora(model)
        weights = trained_weights(model)
    return {name: found for name, found in weights.items() if ".lora." in name}


def whole(active, options):
    with patched(active):
        return trained_weights(build(**options))


def messages_of_a_step():
    """How often a step reduce-scatters over ranks, on stock and with the patch."""
    mappings, found = importlib.import_module("megatron.core.tensor_parallel.mappings"), []
    for active in (False, True):
        with (
            patched(active),
            mock.patch.object(
                mappings, "dist_reduce_scatter_func", wraps=mappings.dist_reduce_scatter_func
            ) as scattered,
        ):
            step(build(), seed=0)
        found.append(scattered.call_count)
    return found


@pytest.mark.parametrize("options", [{}, {"sequence_parallel": True}], ids=["plain", "sequence"])
def test_adapters_train_as_on_one_rank(ranks2, options):
    """With a frozen base the gradient passes eh_proj on its way to the adapters of the main model."""
    expected = in_layout(1, adapters, True, {})
    assert distance(ranks2.run(in_layout, 2, adapters, True, options), expected) < 1e-5
    assert distance(ranks2.run(in_layout, 2, adapters, False, options), expected) > 1e-4


@pytest.mark.parametrize("options", [FULL, {**FULL, "sequence_parallel": True}], ids=["plain", "sequence"])
def test_under_full_recompute(ranks2, options):
    assert distance(ranks2.run(in_layout, 2, whole, True, options), in_layout(1, whole, False, {})) < 1e-5


def test_one_rank_trains_as_on_stock():
    found, expected = in_layout(1, whole, True, {}), in_layout(1, whole, False, {})
    for name, (weight, _) in expected.items():
        assert torch.equal(found[name][0], weight), name


def test_backward_sends_one_message_less(ranks2):
    for stock, fixed in ranks2.run(in_layout, 2, messages_of_a_step):
        assert stock - fixed == 1


def test_other_users_of_the_gather_keep_it():
    mtp = importlib.import_module("megatron.core.transformer.multi_token_prediction")
    others = [importlib.import_module("megatron.core.tensor_parallel" + name) for name in ("", ".mappings")]
    stock = getattr(mtp, NAME)
    with patched():
        assert getattr(mtp, NAME) is not stock
        assert all(getattr(module, NAME) is stock for module in others)
    assert getattr(mtp, NAME) is stock
