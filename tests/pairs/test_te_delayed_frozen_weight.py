"""te-delayed-frozen-weight: backward_dw() gives trained parameters their gradients, and frozen ones none."""

import itertools
from unittest import mock

import pytest
import torch
from needed import needed

import shim
from shim import testing
from shim.patches.transformer_engine._proof_linear_layers import forward_and_backward, kernels, layer_of
from shim.testing.transformer_engine import compiled_ops

CELLS = {"0.13.1+2.5.0": "all"}

ID = "te-delayed-frozen-weight"
OTHERS = ["te-frozen-weight-bias", "te-frozen-experts", "te-delayed-wgrad"]
pytestmark = needed(ID)
KINDS = ("Linear", "LayerNormLinear", "LayerNormMLP", "GroupedLinear")


@pytest.fixture
def te():
    with kernels() as te, shim.patched(only=[ID, *OTHERS], require=[ID, *OTHERS]):
        yield te


def gradients(layer, frozen=()):
    for name, parameter in layer.named_parameters():
        parameter.grad = None
        parameter.requires_grad_(name not in frozen)
    forward_and_backward(layer)
    if layer.wgrad_store.delay_wgrad_compute():
        layer.backward_dw()
    return {name: parameter.grad for name, parameter in layer.named_parameters() if parameter.grad is not None}


def same(found, truth):
    return found.keys() == truth.keys() and all(torch.equal(found[name], truth[name]) for name in truth)


@pytest.mark.parametrize("kind", KINDS)
def test_each_set_of_frozen_parameters(te, kind):
    """Also one after the other: nothing is left in the queue."""
    layer, truth = layer_of(te, kind, delay_wgrad_compute=True), gradients(layer_of(te, kind))
    names = [name for name in truth if "layer_norm" not in name]
    for count in range(len(names)):
        for frozen in itertools.combinations(names, count):
            right = {name: gradient for name, gradient in truth.items() if name not in frozen}
            assert same(gradients(layer, frozen), right), frozen
            assert layer.wgrad_store.context.empty()


@pytest.mark.parametrize("kind", KINDS)
def test_this_patch_alone(kind):
    """The weights that stock leaves in the queue; biases beside frozen weights are te-frozen-weight-bias's."""
    with kernels() as te, shim.patched(only=[ID], require=[ID]):
        layer, truth = layer_of(te, kind, delay_wgrad_compute=True), gradients(layer_of(te, kind))
        last = [name for name in truth if "weight" in name and "layer_norm" not in name][-1]
        found = gradients(layer, (last,))
    assert last not in found and same(found, {name: truth[name] for name in found})


@pytest.mark.parametrize("kind", KINDS)
def test_hooks_run_for_trained_biases(te, kind):
    """megatron-core's reduce the gradients of all that the layer delays."""
    layer = layer_of(te, kind, delay_wgrad_compute=True)
    if not hasattr(layer, "register_wgrad_accumulation_and_reduce_hooks"):
        pytest.skip("2.3 to 2.6 have no hooks")
    hook = mock.Mock()
    layer.register_wgrad_accumulation_and_reduce_hooks(hook)
    gradients(layer, [name for name, _ in layer.named_parameters() if "weight" in name])
    hook.assert_called_once_with()


@pytest.mark.parametrize("kind", KINDS)
def test_two_microbatches_in_the_queue(te, kind):
    """A schedule may run two backward passes before it runs two backward_dw."""
    layer, truth = layer_of(te, kind, delay_wgrad_compute=True), gradients(layer_of(te, kind))
    frozen = next(name for name in truth if name.startswith(("weight", "fc2_weight")))
    gradients(layer, (frozen,))
    layer.zero_grad()
    forward_and_backward(layer)
    forward_and_backward(layer)
    layer.backward_dw()
    layer.backward_dw()
    found = {name: p.grad for name, p in layer.named_parameters() if "weight" in name and p.grad is not None}
    right = {name: 2 * gradient for name, gradient in truth.items() if "weight" in name and name != frozen}
    assert found.keys() == right.keys()
    assert all(torch.allclose(found[name], right[name], rtol=1e-6, atol=1e-6) for name in right)
    assert layer.wgrad_store.context.empty()


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_is_done_if_all_are_trained(kind):
    found = []
    for ids in ([], [ID]):
        with kernels() as te, shim.patched(only=ids, require=ids), testing.Footprint() as footprint:
            found.append(gradients(layer_of(te, kind, delay_wgrad_compute=True)))
        found.append(footprint.operations)
    assert same(found[0], found[2]) and found[1] == found[3]


def test_an_error_inside_is_upstream_s(te):
    layer = layer_of(te, "LayerNormMLP", delay_wgrad_compute=True)
    for parameter in layer.parameters():
        parameter.requires_grad_(parameter is not layer.fc2_weight)
    forward_and_backward(layer)
    with compiled_ops({"generic_gemm": mock.Mock(side_effect=ConnectionError("lost"))}):
        with pytest.raises(ConnectionError, match="lost"):
            layer.backward_dw()
    assert layer.fc2_weight.grad is None
