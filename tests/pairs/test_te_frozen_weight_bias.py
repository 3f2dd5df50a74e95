"""te-frozen-weight-bias: beside a frozen weight a bias has the gradient that it has beside a trained one."""

from importlib import import_module
from importlib.metadata import version
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from packaging.version import Version
from torch.utils.checkpoint import checkpoint

import shim
from shim import testing
from shim.patches.transformer_engine._proof_linear_layers import INPUTS, kernels, layer_of
from shim.patches.transformer_engine.te_blockwise_partial_rows import proof as blockwise
from shim.patches.transformer_engine.te_frozen_weight_bias.proof import KINDS, gradients
from shim.testing.fp8_layer import OnGpu, fp8_region
from shim.testing.layout import Layout
from shim.testing.proof import CannotRunError, on_device
from shim.testing.transformer_engine import compiled_ops

CELLS = {"0.13.1+2.5.0": "all"}

ID = "te-frozen-weight-bias"
RELEASE = Version(version("transformer-engine"))
TP, SP = Layout(tp=2), Layout(tp=2, sequence_parallel=True)
delays = pytest.mark.skipif(Version("2.3") > RELEASE, reason="no module delays its weight gradients")


@pytest.fixture
def te():
    with kernels() as te, shim.patched(only=[ID], require=[ID]):
        yield te


def same(found, truth):
    """Whether all gradients but those of frozen weights are there, with the same bits."""
    names = [name for name in truth if "weight" not in name or "layer_norm" in name]
    return set(names) <= set(found) and all(torch.equal(found[name], truth[name]) for name in names)


def is_right(layer):
    truth = gradients(layer, frozen=False)  # first: some releases take the main_grad of a weight away that is frozen
    return same(gradients(layer, frozen=True), truth)


@pytest.mark.parametrize("kind", KINDS)
def test_all_gradients_are_those_beside_trained_weights(te, kind):
    """Those of the norm and of the rows as well, which stock has."""
    assert is_right(layer_of(te, kind))


@pytest.mark.parametrize("kind", KINDS)
def test_under_recompute(te, kind):
    layer = layer_of(te, kind)
    truth, forward = gradients(layer, frozen=False), layer.forward
    layer.forward = lambda *args: checkpoint(forward, *args, use_reentrant=False)
    assert same(gradients(layer, frozen=True), truth)


def test_a_layer_that_also_returns_its_norm(te):
    layer = layer_of(te, "LayerNormLinear", return_layernorm_output=True)
    forward = layer.forward
    layer.forward = lambda rows: forward(rows)[0]
    assert is_right(layer)


def test_experts_whose_first_weight_alone_is_frozen(te):
    """It decides for all, and the biases of the others are trained as well."""
    layer = layer_of(te, "GroupedLinear")
    truth = gradients(layer, frozen=False)
    layer.weight1.requires_grad_ = lambda *_: layer.weight1  # stays trained
    found = gradients(layer, frozen=True)
    assert all(torch.equal(found[name], truth[name]) for name in ("bias0", "bias1"))


@pytest.mark.parametrize("kind", KINDS)
def test_fused_accumulation(te, kind):
    """It is of weights; a trained one keeps its main_grad, and the bias beside it its gradient."""
    layer = layer_of(te, kind, fuse_wgrad_accumulation=True)
    for parameter in layer.parameters():
        parameter.main_grad = torch.zeros_like(parameter)
    assert is_right(layer)


@delays
@pytest.mark.parametrize("kind", KINDS)
def test_delayed_gradients_of_weights(te, kind):
    """Beside a frozen weight nothing is delayed. Beside a trained one the bias waits for backward_dw, as on stock."""
    truth = gradients(layer_of(te, kind), frozen=False)
    layer = layer_of(te, kind, delay_wgrad_compute=True)
    assert same(gradients(layer, frozen=True), truth)
    found = gradients(layer, frozen=False)
    layer.backward_dw()
    assert not any(name.startswith("bias") for name in found)
    assert all(torch.equal(parameter.grad, truth[name]) for name, parameter in layer.named_parameters())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("bias", ["trained", "frozen"])
def test_nothing_is_added_where_stock_is_right(kind, bias):
    """Beside a trained weight, and beside a frozen one if the bias is frozen."""
    found = []
    for ids in ([], [ID]):
        with kernels() as te, shim.patched(only=ids, require=ids), testing.Footprint() as footprint:
            layer = layer_of(te, kind)
            for name, parameter in layer.named_parameters():
                if bias == "frozen" and "bias" in name:
                    parameter.requires_grad_ = lambda *_, parameter=parameter: parameter
                    torch.Tensor.requires_grad_(parameter, False)
            gradients(layer, frozen=bias == "frozen")
        found.append(footprint.operations)
    assert found[0] == found[1]


def parallel(layout, kind):
    """On this rank, whether the gradients of a column-parallel layer are right."""
    with on_device("cpu", te=True), testing.layout_initialised(layout), kernels() as te:
        with shim.patched(only=[ID], require=[ID]):
            how = {"tp_group": dist.group.WORLD, "tp_size": 2, "parallel_mode": "column"}
            return is_right(layer_of(te, kind, sequence_parallel=layout.sequence_parallel, **how))


@pytest.fixture(scope="module")
def ranks():
    with testing.Ranks(2) as running:
        yield running


@pytest.mark.parametrize("layout", [TP, SP], ids=str)
@pytest.mark.parametrize("kind", KINDS[:2])
def test_column_parallel_layers(ranks, layout, kind):
    assert ranks.run(parallel, layout, kind) == [True, True]


def fp8_gradients(frozen):
    """The gradients of Linear's bias and rows under blockwise FP8."""
    with blockwise.kernels() as te:
        layer = te.Linear(blockwise.INPUTS, blockwise.OUTPUTS, params_dtype=torch.bfloat16, device="cpu")
        with torch.no_grad():
            layer.weight.copy_((torch.arange(layer.weight.numel()) % 3 - 1).view_as(layer.weight))
        layer.weight.requires_grad_(not frozen)
        rows = blockwise.sample(64).requires_grad_()
        with fp8_region(import_module("transformer_engine.common.recipe").Float8BlockScaling()):
            output = layer(rows.as_subclass(OnGpu)).as_subclass(torch.Tensor)
        output.backward(blockwise.sample(64)[:, :1].expand(output.shape).contiguous())
        return {"bias": layer.bias.grad, "rows": rows.grad}


def test_under_fp8_the_gradient_is_stock_s():
    """Stock computes it where it quantizes the gradient of the output."""
    try:
        truth, stock = fp8_gradients(frozen=False), fp8_gradients(frozen=True)
    except CannotRunError as error:
        pytest.skip(str(error))
    with shim.patched(only=[ID], require=[ID]):
        found = fp8_gradients(frozen=True)
    assert all(torch.equal(found[name], truth[name]) and torch.equal(stock[name], truth[name]) for name in truth)


def test_an_error_inside_is_upstream_s(te):
    layer = layer_of(te, "Linear")
    layer.weight.requires_grad_(False)
    rows = torch.ones(4, INPUTS, requires_grad=True)
    output = layer(rows)
    with compiled_ops({"generic_gemm": mock.Mock(side_effect=ConnectionError("lost"))}):
        with pytest.raises(ConnectionError, match="lost"):
            output.sum().backward()
    assert layer.bias.grad is None
    layer(rows).sum().backward()
    assert torch.equal(layer.bias.grad, torch.full_like(layer.bias, 4.0))
