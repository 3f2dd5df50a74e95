"""Patch fp8-fp4-recompute without te-fp8-state: scales of delayed scaling stay with their checkpoint all the same."""

import pytest
import torch
from megatron.core import tensor_parallel
from scaled_module import Scaled, clean_state, delayed, manager, queued, region
from transformer_engine.pytorch import distributed

import shim
from shim import testing
from shim.testing import Layout

CELLS = {"0.12.0+2.2.0": "all"}

ABOUT = ["te-fp8-state"]  # the patches, see chosen.py

ID = "fp8-fp4-recompute"


@pytest.fixture(autouse=True)
def alone():
    with testing.layout_initialised(Layout()), clean_state():
        with shim.patched(only=[ID], require=[ID]):
            yield


def forward(function, recipe, size, recompute=True):
    given = torch.full((2, 2), float(size), requires_grad=True)
    with region(recipe):
        return given, tensor_parallel.checkpoint(function, False, given) if recompute else function(given)


def trained(recompute, backward, training=(True,)):
    """Gradients of three forward passes, each with a larger scale, and the state of every module."""
    manager.reset()
    recipe, modules = delayed(), [Scaled().train(mode) for mode in training]
    given, outputs = zip(*(forward(torch.nn.Sequential(*modules), recipe, size, recompute) for size in (2, 4, 8)))
    backward(outputs)
    return [values.grad.tolist() for values in given] + [part.tolist() for module in modules for part in module.state]


def in_order(outputs):
    for output in outputs:
        output.sum().backward()


def reversed_order(outputs):
    in_order(outputs[::-1])


def twice(outputs):
    for output in outputs:
        output.sum().backward(retain_graph=True)
        output.sum().backward()


@pytest.mark.parametrize("backward", [in_order, reversed_order, twice])
@pytest.mark.parametrize("training", [(True,), (False,), (True, False), (False, True)], ids=str)
def test_recompute_equals_no_recompute(backward, training):
    """Up to 2.19 Transformer Engine keeps no scales of a module in evaluation mode."""
    assert trained(True, backward, training) == trained(False, backward, training)
    assert queued() == 0


def test_what_never_runs_backward_leaves_nothing():
    recipe, module = delayed(), Scaled()

    def failing(values):
        module(values)
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        forward(failing, recipe, 2)
    forward(module, recipe, 4)
    given, output = forward(module, recipe, 8)
    output.sum().backward()
    assert given.grad[0, 0].item() == 4 and queued() == 0


def test_a_saved_state_is_that_of_stock():
    """Stock keeps no scales for this checkpoint, and so gives no module a number."""
    recipe, module = delayed(), Scaled()
    _, output = forward(module, recipe, 2)
    assert "global_fp8_buffer_pos_fwd_recompute" not in module.fp8_meta
    output.sum().backward()
    assert "global_fp8_buffer_pos_fwd_recompute" not in module.fp8_meta
    assert not getattr(manager, "quantization_state", manager).fp8_tensors_recompute_buffer


@pytest.mark.parametrize("mixed", [False, True])
def test_the_queues_of_transformer_engines_own_checkpoint_are_left_alone(mixed):
    """It is inside of one of megatron-core's, or beside it."""
    recipe, module = delayed(), Scaled()

    def inner(values):
        return distributed.checkpoint(lambda x: module(x), values)

    first = torch.full((2, 2), 2.0, requires_grad=True)
    with region(recipe):
        output = inner(first)
    given, other = forward(inner if mixed else module, recipe, 4)
    other.sum().backward()
    output.sum().backward()
    # Inside of another checkpoint what it kept when nothing required a gradient stays, as in stock.
    assert first.grad is not None and given.grad is not None
    assert mixed or (queued() == 0 and [first.grad[0, 0].item(), given.grad[0, 0].item()] == [1, 2])
