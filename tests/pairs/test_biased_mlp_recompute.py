"""biased-mlp-recompute under Transformer Engine's own checkpoint, which megatron-core takes with FP8 and FP4."""

import inspect

import pytest
import torch
from megatron.core.extensions import transformer_engine as extensions

import shim

CELLS = {"0.13.1+2.5.0": "all"}

ID = "biased-mlp-recompute"
pytestmark = pytest.mark.skipif(
    "*args" not in str(inspect.signature(extensions.te_checkpoint)), reason="te_checkpoint runs no MLP before 0.13"
)


class Biased(torch.nn.Module):
    """Returns its bias, as an MLP does."""

    def __init__(self, trained=True):
        super().__init__()
        self.bias = torch.nn.Parameter(torch.ones(3), requires_grad=trained)
        self.runs = 0

    def forward(self, states):
        self.runs += 1
        return states * 2, self.bias


def outputs_of(module, states):
    """Through te_checkpoint. No random state is kept apart."""
    return extensions.te_checkpoint(module, False, None, None, states)


def test_stock_makes_the_bias_a_result(monkeypatch):
    # Transformer Engine leaves modules that hold none of its own to torch's checkpoint.
    monkeypatch.setattr("transformer_engine.pytorch.distributed.has_te_modules", lambda module: True)
    # What this checkpoint keeps for a recompute that never comes.
    kept = "transformer_engine.pytorch.distributed.activation_recompute_forward._is_first_fp8_module"
    monkeypatch.setattr(kept, [])
    module = Biased()
    _, bias = outputs_of(module, torch.ones(3, requires_grad=True))
    assert bias is module.bias and not bias.is_leaf


@pytest.mark.parametrize("trained", [True, False])
def test_the_bias_stays_a_leaf_and_gets_its_gradient(trained):
    with shim.patched(only=[ID], require=[ID]) as report:
        assert report[ID].state == "applied"
        module, states = Biased(trained), torch.arange(3.0, requires_grad=True)
        output, bias = outputs_of(module, states)
        assert module.bias.is_leaf and bias.data_ptr() == module.bias.data_ptr()
        (output + 3 * bias).sum().backward()
    assert module.runs == 2 and module.bias.requires_grad is trained
    assert torch.equal(states.grad, torch.full((3,), 2.0))
    assert torch.equal(module.bias.grad, torch.full((3,), 3.0)) if trained else module.bias.grad is None


def test_a_function_is_handed_on_as_it_is(monkeypatch):
    given = []
    monkeypatch.setattr("transformer_engine.pytorch.distributed.checkpoint", lambda f, *_, **__: given.append(f))
    with shim.patched(only=[ID], require=[ID]):
        extensions.te_checkpoint(max, False, None, None, torch.zeros(2))
    assert given == [max]
