"""overlap-norms: a step of the overlapped schedule is that of the model's forward, whichever layer is the last."""

import pytest
import torch
import whole_steps
from needed import needed

import shim
from shim import testing
from shim.patches.megatron_core.overlap_norms.proof import node_of, pieces_of, schedules_on_cpu
from shim.testing.attention import CPUCoreAttention

CELLS = {"0.16.1": "all", "0.17.1": "all"}

ID = "overlap-norms"
pytestmark = [needed(ID), pytest.mark.usefixtures("one_rank")]  # of tests/cells/conftest.py

EXPERTS = {"num_moe_experts": 4, "moe_router_topk": 2, "moe_ffn_hidden_size": 32, "mtp_num_layers": None}
EXPERTS |= {"moe_router_load_balancing_type": "none", "moe_token_dispatcher_type": "alltoall"}


def gradients(overlapped, frequency):
    with whole_steps._mixed_layers(CPUCoreAttention):
        model = testing.build_gpt(**EXPERTS, moe_layer_freq=frequency)
    row = torch.arange(12)[None]
    given = {"labels": row.roll(-1, 1), "loss_mask": torch.ones(1, 12)}
    with schedules_on_cpu():
        if overlapped:
            plan = model.build_schedule_plan(row, row, None, **given)
            losses = plan.run(plan, None)
            plan.run(None, plan, b_grad=torch.ones_like(losses))
        else:
            model(row, row, None, **given).sum().backward()
    return {name: weight.grad for name, weight in model.named_parameters()}


@pytest.mark.parametrize("frequency", [2, [0, 1]], ids=["dense last", "experts last"])
def test_a_step_is_that_of_the_model(frequency):
    with shim.patched(only=[ID, "moe-without-te"], require=[ID]):
        found, right = gradients(True, frequency), gradients(False, frequency)
    torch.testing.assert_close(found, right)


def states(is_last):
    model = testing.build_gpt(num_layers=1, mtp_num_layers=None)
    attention, _, mlp, *_ = pieces_of(model.decoder.layers[0])
    node = node_of(model, is_last)
    return mlp(node, attention(node, torch.ones(8, 1, 32)))


def test_a_layer_that_is_not_the_last_stays():
    with shim.patched(only=[ID], require=[ID]):
        found = states(is_last=False)
    assert torch.equal(found, states(is_last=False))
