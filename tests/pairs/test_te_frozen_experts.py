"""te-frozen-experts: whichever experts are frozen, the others have the gradients that they have if all are trained."""

import contextlib
import itertools
from importlib import import_module
from importlib.metadata import version
from unittest import mock

import pytest
import torch
from packaging.version import Version
from torch.autograd.function import FunctionCtx
from torch.utils.checkpoint import checkpoint

import shim
from shim import testing
from shim.patches.transformer_engine._proof_linear_layers import INPUTS, ROWS, forward_and_backward, kernels, layer_of
from shim.testing.transformer_engine import compiled_ops

CELLS = {"0.13.1+2.5.0": "all"}

ID = "te-frozen-experts"
BIASES = "te-frozen-weight-bias"
RELEASE = Version(version("transformer-engine"))
NAMES = ("weight0", "weight1", "bias0", "bias1")
SETS = [set(names) for count in range(len(NAMES)) for names in itertools.combinations(NAMES, count)]


@pytest.fixture
def te():
    with kernels() as te, shim.patched(only=[ID, BIASES], require=[ID, BIASES]):
        yield te


def gradients(layer, frozen=(), fused=False):
    """Of a step, by name; with fused accumulation the weights' are in main_grad, which frozen ones do not have."""
    for name, parameter in layer.named_parameters():
        parameter.grad = None
        parameter.requires_grad_(name not in frozen)
        vars(parameter).pop("main_grad", None)
        if fused and name not in frozen:
            parameter.main_grad = torch.zeros_like(parameter)
    rows = forward_and_backward(layer)
    found = {"rows": rows.grad}
    for name, parameter in layer.named_parameters():
        is_fused = fused and "weight" in name and name not in frozen
        found[name] = parameter.main_grad if is_fused else parameter.grad
    return {name: gradient for name, gradient in found.items() if gradient is not None}


def same(found, truth):
    return found.keys() == truth.keys() and all(torch.equal(found[name], truth[name]) for name in truth)


def without(gradients, frozen):
    return {name: gradient for name, gradient in gradients.items() if name not in frozen}


@pytest.mark.parametrize("fused", [False, True])
def test_each_set_of_frozen_parameters(te, fused):
    """Weights and biases, of the first expert and of others."""
    layer = layer_of(te, "GroupedLinear", fuse_wgrad_accumulation=fused)
    truth = gradients(layer_of(te, "GroupedLinear"))
    wrong = [frozen for frozen in SETS if not same(gradients(layer, frozen, fused), without(truth, frozen))]
    assert not wrong


def test_stock_loses_them():
    with kernels() as te:
        layer = layer_of(te, "GroupedLinear")
        assert "weight1" not in gradients(layer, {"weight0"}) and "weight0" in gradients(layer, {"weight1"})


@pytest.mark.parametrize("reentrant", [False, True])
def test_under_recompute(te, reentrant):
    layer = layer_of(te, "GroupedLinear")
    truth, forward = gradients(layer), layer.forward
    layer.forward = lambda *args: checkpoint(forward, *args, use_reentrant=reentrant)
    assert same(gradients(layer, {"weight0"}), without(truth, {"weight0"}))


def test_fused_accumulation_adds(te):
    """Two microbatches: the sum in main_grad. A frozen weight gets none, and no memory for one."""
    layer = layer_of(te, "GroupedLinear", fuse_wgrad_accumulation=True)
    once = gradients(layer, {"weight0"}, fused=True)["weight1"].clone()
    forward_and_backward(layer)
    assert torch.equal(layer.weight1.main_grad, 2 * once)
    assert not hasattr(layer.weight0, "main_grad") and layer.weight0.grad is None


def test_no_product_of_frozen_weights_is_computed(te):
    """With fused accumulation: one product of the two experts in the last call of a step."""
    calls = []
    groups = import_module("transformer_engine_torch").te_general_grouped_gemm
    with mock.patch.object(
        import_module("transformer_engine_torch"),
        "te_general_grouped_gemm",
        lambda *args: calls.append(len(args[0])) or groups(*args),
    ):
        layer = layer_of(te, "GroupedLinear", fuse_wgrad_accumulation=True)
        gradients(layer, {"weight0"}, fused=True)
    assert calls == [2, 2, 1]


@pytest.mark.skipif(Version("2.3") > RELEASE, reason="no module delays its weight gradients")
@pytest.mark.parametrize("fused", [False, True])
def test_delayed_gradients(fused):
    ids = [ID, BIASES, "te-delayed-frozen-weight"]
    with kernels() as te, shim.patched(only=ids, require=ids):
        truth = gradients(layer_of(te, "GroupedLinear"))
        layer = layer_of(te, "GroupedLinear", fuse_wgrad_accumulation=fused, delay_wgrad_compute=True)
        for frozen in SETS:
            gradients(layer, frozen, fused)
            layer.backward_dw()
            for name, parameter in layer.named_parameters():
                found = parameter.main_grad if hasattr(parameter, "main_grad") and "weight" in name else parameter.grad
                assert found is None if name in frozen else torch.equal(found, truth[name]), (frozen, name)


@pytest.mark.parametrize("frozen", [set(), {"bias0"}, {"weight0", "weight1", "bias0", "bias1"}])
def test_nothing_is_done_if_experts_are_alike(frozen):
    found = []
    for ids in ([], [ID]):
        with kernels() as te, shim.patched(only=ids, require=ids), testing.Footprint() as footprint:
            layer = layer_of(te, "GroupedLinear")
            found.append(gradients(layer, frozen))
        found.append(footprint.operations)
    assert same(found[0], found[2]) and found[1] == found[3]


def test_without_gradients(te):
    layer = layer_of(te, "GroupedLinear")
    layer.weight0.requires_grad_(False)
    with torch.no_grad():
        assert not layer(torch.ones(sum(ROWS), INPUTS), list(ROWS)).requires_grad


def test_an_error_inside_is_upstream_s(te):
    layer = layer_of(te, "GroupedLinear")
    truth = gradients(layer, {"weight0"})
    with compiled_ops({"te_general_grouped_gemm": mock.Mock(side_effect=ConnectionError("lost"))}):
        with pytest.raises(ConnectionError, match="lost"):
            gradients(layer, {"weight0"})
    assert same(gradients(layer, {"weight0"}), truth)


def test_the_native_path_cannot_leave_frozen_experts_out(te):
    """With fused accumulation, and it says so. Here a flag is set as that path sets it."""
    layer = layer_of(te, "GroupedLinear", fuse_wgrad_accumulation=True)
    flags = ("grouped_tensor_supported", "use_grouped_tensor_path")
    on_native_path = contextlib.ExitStack()
    for flag in flags:
        always = property(lambda ctx: True, lambda ctx, value: None)
        on_native_path.enter_context(mock.patch.object(FunctionCtx, flag, always, create=True))
    with on_native_path, pytest.raises(shim.ShimError, match="use_grouped_tensor=False"):
        gradients(layer, {"weight0"}, fused=True)
