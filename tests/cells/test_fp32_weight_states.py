"""fp32-weight-states: every weight has its own states, and groups of one kind of weights are numbered as on stock."""

import pytest
import torch

import shim
from shim.patches.megatron_core._proof_optimizer_resume import Training, fused_adam
from shim.patches.megatron_core.fp32_weight_states.proof import MIXED, of_another_weight

CELLS = {"0.15.3": "all"}

ID = "fp32-weight-states"
pytestmark = pytest.mark.usefixtures("one_rank")


def applied():
    return shim.patched(only=[ID], require=[ID])


def built(**options):
    with fused_adam():
        return Training(None, **{**MIXED, **options})


def inner(training):
    return [each.optimizer for each in getattr(training.optimizer, "chained_optimizers", [training.optimizer])]


def numbers(training):
    optimizers = getattr(training.optimizer, "chained_optimizers", [training.optimizer])
    names = {weight: name for name, weight in training.model.named_parameters()}
    return [{names[weight]: place for weight, place in each.model_param_group_index_map.items()} for each in optimizers]


def test_each_weight_has_its_own_states():
    assert of_another_weight()
    with applied():
        assert not of_another_weight()


@pytest.mark.parametrize("options", [{"mixed": False}, {"mixed": False, "bf16": False}], ids=["bf16", "fp32"])
def test_weights_of_one_kind_are_numbered_as_on_stock(options):
    stock = numbers(built(**options))
    with applied():
        assert numbers(built(**options)) == stock


def test_the_groups_of_the_optimizer_are_stocks():
    """Their order and contents, which other checkpoints and the step go by."""
    stock = inner(built())
    with applied():
        found = inner(built())
    for one, other in zip(found, stock, strict=True):
        for group, expected in zip(one.param_groups, other.param_groups, strict=True):
            assert all(map(torch.equal, group["params"], expected["params"]))
            assert len(group["params"]) == len(expected["params"])
