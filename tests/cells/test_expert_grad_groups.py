"""expert-grad-groups: copies of an expert get one gradient in every layout; where stock is right, no bit changes."""

import contextlib
from unittest import mock

import pytest
import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from uncompiled import inside

import shim
from shim import testing
from shim.patches.megatron_core.expert_grad_groups.proof import (
    MODEL,
    mine,
    step,
    training,
    weights_of_experts,
    wrapped_model,
)
from shim.testing import Layout
from shim.testing.cpu import type_on_a_gpu

CELLS = {"0.12.0": "all", "0.19.2": ["test_with_the_distributed_optimizer"]}

ID = "expert-grad-groups"
NEEDED = shim.plan()[ID].wanted
needed = pytest.mark.skipif(not NEEDED, reason="this release needs no patch")
BELOW, ABOVE = Layout(tp=2, sequence_parallel=True, etp=1), Layout(etp=2)
ALLGATHER = {"moe_token_dispatcher_type": "allgather"}
FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}


def applied():
    return shim.patched(only=[ID], require=[ID]) if NEEDED else contextlib.nullcontext()


def off_by(found, rank, truth, before):
    """How far weights are from the truth, over the way there."""
    off = [(weight - mine(truth[name], weight.shape, rank)).flatten() for name, weight in found.items()]
    way = [(truth[name] - before[name]).flatten() for name in found]
    return float(torch.cat(off).norm() / torch.cat(way).norm())


def trained(layout, options):
    with inside(layout), applied():
        return training(**options)


def on_stock_and_patched(layout):
    """Whether the weights of experts, and what they say about `allreduce`, are the same on stock and with the patch."""

    def one():
        _, after, _ = training(**ALLGATHER)  # all-to-all over expert-parallel ranks needs a GPU
        return after, [weight.allreduce for name, weight in wrapped_model().named_parameters() if ".experts." in name]

    with inside(layout):
        stock, says = one()
        with applied():
            found, says_now = one()
    return all(torch.equal(stock[name], found[name]) for name in stock), says == says_now


def built_before(layout):
    """A model that was built on stock is wrapped with the patch; only the first layers of its experts are trained.

    The gradients, and whether a weight that says nothing about `allreduce` says nothing still.
    """
    with inside(layout):
        model = testing.build_gpt(**{**MODEL, "sequence_parallel": layout.tp > 1})
        for name, weight in model.named_parameters():
            weight.requires_grad_("experts" in name and "linear_fc1" in name)
        experts = model.decoder.layers[0].mlp.experts
        experts.adapter = torch.nn.Parameter(torch.ones(1))
        model.embedding.word_embeddings.weight.requires_grad_(True)  # a dense weight, too
        with applied():
            wrapped = DistributedDataParallel(model.config, DistributedDataParallelConfig(), model)
            step(wrapped)
        gradients = {
            name: weight.main_grad.clone()
            for name, weight in wrapped.named_parameters()
            if weight.requires_grad and "linear_fc1" in name
        }
        return gradients, not hasattr(experts.adapter, "allreduce")


def wrapped_before(layout):
    """What check() says of a model that was wrapped on stock."""
    with inside(layout):
        wrapped = wrapped_model()
        with shim.patched(only=[ID]):
            shim.check(wrapped)
            found = shim.status()[ID]
            return found.state, found.reason


def distributed(layout):
    """Weights of the experts before and after a step of the distributed optimizer."""
    with inside(layout), mock.patch.object(torch.Tensor, "type", type_on_a_gpu), applied():
        wrapped = wrapped_model(distributed=True)
        before = weights_of_experts(wrapped)
        # It has Adam only. With such an epsilon a step is about as long as the gradient.
        adam = {"optimizer": "adam", "adam_eps": 1.0, "weight_decay": 0.0, "clip_grad": 0.0}
        optimizer = get_megatron_optimizer(OptimizerConfig(lr=0.5, use_distributed_optimizer=True, **adam), [wrapped])
        step(wrapped)
        optimizer.step()
        return before, weights_of_experts(wrapped)


@needed
@pytest.mark.parametrize("layout", [Layout(tp=2, sequence_parallel=True), Layout(ep=2)], ids=str)
def test_what_stock_does_right_stays(ranks2, layout):
    """Expert TP as TP, and expert parallelism of the local layers."""
    assert ranks2.run(on_stock_and_patched, layout) == [(True, True)] * 2


@pytest.mark.parametrize(
    ("layout", "options"),
    [(BELOW, ALLGATHER), (BELOW, FULL), (ABOVE, ALLGATHER)],
    ids=["below-allgather", "below-recompute", "above-allgather"],
)
def test_experts_get_where_one_rank_gets(ranks2, layout, options):
    before, truth, _ = trained(Layout(), options)
    for _, found, rank in ranks2.run(trained, layout, options):
        assert off_by(found, rank, truth, before) <= 1e-5


def test_on_data_parallel_ranks_too(ranks4):
    before, truth, _ = trained(Layout(), {})
    for _, found, rank in ranks4.run(trained, BELOW, {}):
        assert off_by(found, rank, truth, before) <= 1e-5


@pytest.mark.parametrize("layout", [BELOW, ABOVE], ids=str)
def test_models_that_were_there_already_and_frozen_weights(ranks2, layout):
    truth, _ = built_before(Layout())
    for rank, (found, says_nothing) in enumerate(ranks2.run(built_before, layout)):
        assert says_nothing
        assert off_by(found, rank, truth, {name: 0 * value for name, value in truth.items()}) <= 1e-5


@needed
def test_check_says_that_gradients_were_sorted_before(ranks2):
    for state, reason in ranks2.run(wrapped_before, BELOW):
        assert state == "inactive"
        assert "DistributedDataParallel before shim.apply()" in reason


@pytest.mark.skipif(testing.release() < "0.13", reason="its step needs Transformer Engine")
@pytest.mark.parametrize("layout", [BELOW, ABOVE], ids=str)
def test_with_the_distributed_optimizer(ranks2, layout):
    before, truth = distributed(Layout())
    for rank, (_, found) in enumerate(ranks2.run(distributed, layout)):
        assert off_by(found, rank, truth, before) <= 1e-5
