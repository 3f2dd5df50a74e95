"""gated-delta-net-norm: one more all-reduce a step where gradients of output norms are not summed, and no other."""

import contextlib
import importlib

import pytest
import torch
import trainers_in_small as trainers
from all_reduces import sizes_of_all_reduces
from needed import needed
from trainer_cases import both

import shim
from shim import testing
from shim.patches.megatron_core.gated_delta_net_norm.proof import (
    BATCH,
    HEAD,
    HIDDEN,
    TOKENS,
    build,
    trained,
    without_kernels,
)

CELLS = {"0.17.1": "all"}

ID = "gated-delta-net-norm"
pytestmark = needed(ID)


def patched(active=True):
    """active: also "trainer" or "shim", which comes first where slime has a function of its own in that place."""
    if isinstance(active, str):
        return both(trainers.slime_coalesced_gradients, ID, active)
    return shim.patched(only=[ID], require=[ID]) if active else contextlib.nullcontext()


def on_two_ranks(function, *args):
    layout = testing.Layout(tp=2)
    with testing.megatron_on_cpu(), testing.layout_initialised(layout):
        return function(*args)


def sums_of_a_step(layers, active, change, **overrides):
    """How many numbers each sum over ranks has in finalize_model_grads; the gradients before and after it, by name."""
    distributed = importlib.import_module("megatron.core.distributed")
    with without_kernels() as module:
        model = torch.nn.Sequential(*(build(module, **overrides) for _ in range(layers)))
        for layer in model:
            change(layer)
        config = model[0].config
        wrapped = distributed.DistributedDataParallel(config, distributed.DistributedDataParallelConfig(), model)
        hidden = torch.randn(TOKENS, BATCH, HIDDEN, generator=torch.Generator().manual_seed(1))
        for layer in model:
            layer(hidden, None)[0].sum().backward()
        wrapped.finish_grad_sync()
        weights = {name: weight for name, weight in model.named_parameters() if weight.requires_grad}
        before = {name: weight.main_grad.clone() for name, weight in weights.items()}
        with patched(active), sizes_of_all_reduces() as sums:
            finalize = importlib.import_module("megatron.core.distributed.finalize_model_grads")
            finalize._allreduce_non_tensor_model_parallel_grads([wrapped], config, tensor_parallel_group())
        return sums, before, {name: weight.main_grad.clone() for name, weight in weights.items()}


def tensor_parallel_group():
    from megatron.core import parallel_state

    return parallel_state.get_tensor_model_parallel_group()


def nothing(layer): ...


def frozen(layer):
    layer.out_norm.requires_grad_(False)


def only_norms(layer):
    """As where the base is frozen and only norms train."""
    layer.requires_grad_(False)
    layer.out_norm.requires_grad_(True)


def averaged(layer):
    layer.out_norm.weight.average_gradients_across_tp_domain = True


def whole_on_each_rank(layer):
    """All heads on each rank, as far as the patch can see."""
    layer.register_forward_hook(lambda layer, *_: setattr(layer, "tp_size", 1))


def of_another_layer(layer):
    """A norm of that name in a layer of another kind, which has the size of the group, too."""
    frozen(layer)
    layer.other = torch.nn.Module()
    layer.other.tp_size, layer.other.out_norm = 2, torch.nn.LayerNorm(HEAD)


@pytest.mark.parametrize(
    ("active", "change", "expected_sums"),
    [
        (True, nothing, [2 * HEAD]),
        (True, only_norms, [2 * HEAD]),
        ("shim", nothing, [HEAD, HEAD]),
        ("trainer", nothing, [HEAD, HEAD]),
    ],
)
def test_one_all_reduce_sums_the_norms_of_all_layers(ranks2, active, change, expected_sums):
    """A trainer's function that sums each gradient alone does so here, too."""
    first, second = ranks2.run(on_two_ranks, sums_of_a_step, 2, active, change)
    for sums, before, after in (first, second):
        assert sums == expected_sums
        for name, gradient in after.items():
            expected = first[1][name] + second[1][name] if "out_norm" in name else before[name]
            assert torch.equal(gradient, expected), name


@pytest.mark.parametrize("change", [frozen, averaged, whole_on_each_rank, of_another_layer])
def test_what_is_not_to_be_summed_stays_as_on_stock(ranks2, change):
    found = ranks2.run(on_two_ranks, sums_of_a_step, 1, True, change)
    stock = ranks2.run(on_two_ranks, sums_of_a_step, 1, False, change)
    for (sums, _, after), (expected_sums, _, expected) in zip(found, stock, strict=True):
        assert sums == expected_sums == ([HEAD] if change is averaged else [])
        assert all(torch.equal(after[name], expected[name]) for name in expected)


def trained_on_ranks(active, overrides):
    with patched(active):
        return trained(overrides)


def test_sequence_parallelism_trains_as_on_stock(ranks2):
    """Upstream sums there already."""
    found = ranks2.run(on_two_ranks, trained_on_ranks, True, {"sequence_parallel": True})
    stock = ranks2.run(on_two_ranks, trained_on_ranks, False, {"sequence_parallel": True})
    alone = ranks2.run(on_two_ranks, trained_on_ranks, True, {})
    for (_, weight), (_, expected), (_, without) in zip(found, stock, alone, strict=True):
        assert torch.equal(weight, expected)
        assert torch.allclose(weight, without, rtol=1e-5, atol=1e-6)
