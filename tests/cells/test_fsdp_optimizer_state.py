"""fsdp-optimizer-state: sharding an optimizer changes nothing but that it has a state."""

import copy

import pytest
import torch
from needed import needed

import shim
from shim.patches.megatron_core.fsdp_optimizer_state.proof import SETTINGS, error, sharded, weights

CELLS = {"0.17.1": "all"}

ID = "fsdp-optimizer-state"
pytestmark = needed(ID)
ADAM = torch.optim.AdamW


class GroupCounted(torch.optim.AdamW):
    """Counts its steps in the group, as Transformer Engine's FusedAdam does."""

    def step(self, closure=None):
        super().step(closure)
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1


def applied():
    return shim.patched(only=[ID], require=[ID])


def test_what_stock_does_right_stays():
    """The state is there, for weights that have elements, and no gradient stays."""

    def made():
        model = [*weights(), torch.nn.Parameter(torch.zeros(0))]
        return model, sharded(ADAM(model, lr=0.1, weight_decay=0.0))

    stock_model, stock = made()
    with applied():
        model, optimizer = made()
    assert [list(optimizer.state[weight]) for weight in model] == [list(stock.state[weight]) for weight in stock_model]
    assert [bool(optimizer.state[weight]) for weight in model] == [True, True, False]
    assert all(weight.grad is None for weight in model)
    assert optimizer.param_groups[0].keys() == stock.param_groups[0].keys()


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        (torch.optim.AdamW, {"amsgrad": True}),
        (torch.optim.AdamW, {"lr": torch.tensor(0.1)}),
        (torch.optim.Adam, {}),
        (torch.optim.SGD, {"momentum": 0.9}),
        (torch.optim.RMSprop, {"momentum": 0.9, "centered": True}),
        (torch.optim.RAdam, {}),
        (GroupCounted, {}),
    ],
    ids=lambda value: getattr(value, "__name__", "-".join(value) if isinstance(value, dict) else None),
)
def test_weights_as_the_optimizer_alone_trains_them(kind, settings):
    assert error(kind, **settings) > 1e-3
    with applied():
        assert error(kind, **settings) == 0.0


def test_settings_and_counts_are_as_before():
    model = weights()
    groups = [{"params": model[:1], "lr": 0.3}, {"params": model[1:], "weight_decay": 0.0}]
    before = [weight.detach().clone() for weight in model]
    with applied():
        optimizer = sharded(GroupCounted(groups, **SETTINGS))
    assert [(group["lr"], group["weight_decay"], group["step"]) for group in optimizer.param_groups] == [
        (0.3, 0.1, 0),
        (0.1, 0.0, 0),
    ]
    assert [float(optimizer.state[weight]["step"]) for weight in model] == [0.0, 0.0]
    assert all(map(torch.equal, model, before))


def test_a_state_that_is_there_stays():
    """As of an optimizer that was loaded, or has stepped. The weight without a state gets one."""
    model = weights()
    optimizer = GroupCounted(model, **SETTINGS)
    model[0].grad = torch.ones(8)
    optimizer.step()
    state, before = copy.deepcopy(optimizer.state[model[0]]), model[0].detach().clone()
    with applied():
        optimizer = sharded(optimizer)
    assert torch.equal(model[0], before)
    assert all(torch.equal(optimizer.state[model[0]][key], state[key]) for key in state)
    assert float(optimizer.state[model[1]]["step"]) == 0
    assert optimizer.param_groups[0]["step"] == 1


def test_settings_come_back_also_after_an_exception():
    class Fails(torch.optim.AdamW):
        def step(self, closure=None):
            raise ArithmeticError([(group["lr"], group["weight_decay"]) for group in self.param_groups])

    optimizer = Fails(weights(), **SETTINGS)
    had = optimizer.state
    with applied(), pytest.raises(ArithmeticError, match=r"\[\(0.0, 0.0\)\]"):
        sharded(optimizer)
    assert {key: optimizer.param_groups[0][key] for key in SETTINGS} == SETTINGS
    assert optimizer.state is had
