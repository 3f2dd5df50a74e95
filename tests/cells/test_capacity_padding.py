"""capacity-padding: rows drop what they drop without padding, by either policy, and calls without a mask stay."""

import pytest
import torch
from needed import needed

import shim
from shim.patches.megatron_core.capacity_padding.proof import gradients, off_by

CELLS = {"0.19.2": "all"}

ID = "capacity-padding"
pytestmark = [needed(ID), pytest.mark.usefixtures("one_rank")]  # of tests/cells/conftest.py

RECOMPUTE = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
WAYS = {
    "position": {"moe_token_drop_policy": "position"},
    "full share": {"moe_pad_expert_input_to_capacity": True},
    "sigmoid": {"moe_router_score_function": "sigmoid", "moe_expert_capacity_factor": 0.5},
    "recompute": RECOMPUTE,
    "room for all": {"moe_expert_capacity_factor": 4.0},
}


@pytest.mark.parametrize("way", WAYS)
def test_a_row_trains_as_without_padding(way):
    with shim.patched(only=[ID], require=[ID]):
        assert off_by(**WAYS[way]) < 1e-5


@pytest.mark.parametrize("options", [{}, {"moe_expert_capacity_factor": None}], ids=["no padding", "no capacity"])
def test_what_stock_does_right_stays(options):
    padding = 16 if options else 0
    with shim.patched(only=[ID], require=[ID]):
        found = gradients(padding, **options)
    right = gradients(padding, **options)
    assert all(torch.equal(found[name], right[name]) for name in right)
