"""moe-large-capacity: a capacity above the number of tokens drops nothing, and smaller ones are stock's."""

import pytest
import torch

import shim
from shim import testing
from shim.patches.megatron_core.moe_large_capacity.proof import FACTOR, PADDED, off, trained
from shim.testing import Layout

CELLS = {"0.19.2": "all"}

ID = "moe-large-capacity"
DISPATCHERS = pytest.mark.parametrize("dispatcher", ["alltoall", "allgather"])
FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}


def applied():
    return shim.patched(only=[ID], require=[ID])


@DISPATCHERS
@pytest.mark.parametrize("padded", [False, True], ids=["plain", "padded"])
@pytest.mark.parametrize("policy", ["probs", "position"])
@pytest.mark.parametrize("factor", [2.0, 100.0])
def test_nothing_is_dropped(one_rank, factor, policy, padded, dispatcher):
    options = {"moe_token_drop_policy": policy, "moe_token_dispatcher_type": dispatcher, PADDED: padded}
    with applied():
        assert off(**options, **{FACTOR: factor}) < 1e-6


@pytest.mark.parametrize("tokens", [1, 7, 61])
@pytest.mark.parametrize("experts, topk", [(3, 2), (7, 3)])
def test_nor_at_any_number_of_tokens(one_rank, tokens, experts, topk):
    """Also if the product of tokens and quotient is rounded up."""
    options = {"num_moe_experts": experts, "moe_router_topk": topk}
    with applied():
        found = trained(tokens, **options, **{FACTOR: experts / topk, PADDED: True})
    torch.testing.assert_close(found, trained(tokens, **options), rtol=1e-5, atol=1e-6)


def test_nor_under_recompute(one_rank):
    with applied():
        assert off(**FULL, **{FACTOR: 4.0, PADDED: True}) < 1e-6


@DISPATCHERS
@pytest.mark.parametrize("options", [{}, {FACTOR: 0.5}, {FACTOR: 1.9, PADDED: True}], ids=str)
def test_smaller_capacities_are_stocks_to_the_bit(one_rank, options, dispatcher):
    options = {**options, "moe_token_dispatcher_type": dispatcher}
    with applied():
        found = trained(**options)
    stock = trained(**options)
    assert found.keys() == stock.keys() and all(torch.equal(found[name], stock[name]) for name in found)


def losses(layout, factor):
    """Those of the row on this rank."""
    with testing.megatron_on_cpu(), testing.layout_initialised(layout), applied():
        options = {FACTOR: factor, PADDED: factor is not None, "sequence_parallel": layout.sequence_parallel}
        return trained(**options, expert_model_parallel_size=layout.ep)["losses"]


@pytest.mark.parametrize("layout", [Layout(ep=2), Layout(tp=2, sequence_parallel=True)], ids=str)
def test_over_ranks(ranks2, layout):
    found, right = ranks2.run(losses, layout, 4.0), ranks2.run(losses, Layout(), None)
    torch.testing.assert_close(found, right, rtol=1e-5, atol=1e-6)
