"""te-softmax-offset: new sinks are zeros; loaded ones, those of a subclass and random numbers are left alone."""

from importlib import import_module
from unittest import mock

import pytest
import torch

import shim
from shim.patches.transformer_engine.te_softmax_offset.proof import HEAD, HEADS, attention

CELLS = {"0.15.3+2.9.0": "all"}

ID = "te-softmax-offset"
PLAN = shim.plan()[ID]
pytestmark = pytest.mark.skipif(not PLAN.wanted, reason="this release needs no patch")


def patched():
    return shim.patched(only=[ID], require=[ID])


def test_stock_leaves_memory_as_it_is():
    assert attention().softmax_offset.isnan().all()


def test_new_sinks_are_zeros_that_can_be_trained():
    with patched():
        layer = attention()
    sinks = layer.softmax_offset
    assert sinks.tolist() == [0.0] * HEADS
    assert type(sinks) is torch.nn.Parameter and sinks.requires_grad and sinks.grad_fn is None
    sinks.sum().backward()
    assert sinks.grad.tolist() == [1.0] * HEADS


def test_a_loaded_checkpoint_is_left_alone():
    """Also if a layer was built without shim, and if another is built later."""
    trained = torch.arange(HEADS, dtype=torch.float32)
    stock = attention()
    keys = list(stock.state_dict())
    with patched():
        layer = attention()
        assert list(layer.state_dict()) == keys
        state = {**layer.state_dict(), "softmax_offset": trained}
        layer.load_state_dict(state)
        stock.load_state_dict(state)
        attention()
        assert layer.softmax_offset.equal(trained)
        # FSDP2 registers a parameter again.
        layer.register_parameter("softmax_offset", torch.nn.Parameter(trained + 1))
        assert layer.softmax_offset.equal(trained + 1)
    assert stock.softmax_offset.equal(trained)


def test_what_a_subclass_sets_stays():
    base = import_module("transformer_engine.pytorch").DotProductAttention

    class Mine(base):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            torch.nn.init.constant_(self.softmax_offset, 3.0)

    with patched(), mock.patch.object(torch.cuda, "is_available", lambda: True):
        layer = Mine(HEADS, HEAD, softmax_type="learnable")
    assert layer.softmax_offset.tolist() == [3.0] * HEADS


def test_reset_parameters_draws_as_on_stock():
    def drawn():
        torch.manual_seed(1)
        layer = attention()
        layer.reset_parameters()
        return layer.softmax_offset.tolist(), torch.rand(1).item()

    stock = drawn()
    with patched():
        assert drawn() == stock


@pytest.mark.parametrize("softmax_type", ["vanilla", "off-by-one"])
def test_other_kinds_are_those_of_stock(softmax_type):
    stock = attention(softmax_type)
    with patched():
        layer = attention(softmax_type)
    assert dict(layer.named_parameters()) == dict(stock.named_parameters()) == {}
    if softmax_type == "vanilla":
        assert layer.softmax_offset is stock.softmax_offset is None
    else:
        assert layer.softmax_offset.equal(stock.softmax_offset)


def test_tensor_parallel_ranks_have_their_own_heads():
    with patched():
        assert attention(tp_size=2).softmax_offset.tolist() == [0.0] * (HEADS // 2)
