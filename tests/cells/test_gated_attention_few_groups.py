"""gated-attention-few-groups: a rank gates its own heads, and a gate that fits stays as it is."""

import contextlib

import pytest
import torch
from needed import needed

import shim
from shim import testing
from shim.patches.megatron_core.gated_attention_few_groups.proof import HEADS, build, trained

CELLS = {"0.16.1": "all"}

ID = "gated-attention-few-groups"
pytestmark = needed(ID)


def of_two_ranks(active, groups):
    patch = shim.patched(only=[ID], require=[ID]) if active else contextlib.nullcontext()
    with testing.megatron_on_cpu(), testing.layout_initialised(testing.Layout(tp=2)), patch:
        return trained(groups)


@pytest.mark.parametrize("groups", [2, HEADS])
def test_groups_that_ranks_do_not_share_are_as_on_stock(ranks2, groups):
    found, stock = (ranks2.run(of_two_ranks, active, groups) for active in (True, False))
    for mine, expected in zip(found, stock, strict=True):
        assert all(torch.equal(mine[name], expected[name]) for name in expected)


def test_attention_without_a_gate_is_as_on_stock():
    with testing.layout_initialised(testing.Layout()):
        layer = build(attention_output_gate=False)
        hidden = torch.randn(4, 1, 16, generator=torch.Generator().manual_seed(0))
        stock = layer(hidden, None)[0]
        with shim.patched(only=[ID], require=[ID]):
            assert torch.equal(layer(hidden, None)[0], stock)
