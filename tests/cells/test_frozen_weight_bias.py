"""frozen-weight-bias: beside a frozen weight a bias has the gradient that it has beside a trained one."""

import contextlib
import itertools
from unittest import mock

import pytest
import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.optimizer import OptimizerConfig, distrib_optimizer
from megatron.core.tensor_parallel import ColumnParallelLinear, checkpoint
from megatron.core.tensor_parallel.layers import LinearWithFrozenWeight

import shim
from shim import testing
from shim.patches.megatron_core.frozen_weight_bias.proof import LAYER, model_of, of_biases, row
from shim.testing import Layout
from shim.testing.cpu import optimizer_on_cpu, type_on_a_gpu

CELLS = {"0.17.1": "all"}

ID = "frozen-weight-bias"
FROZEN = (LAYER + "weight",)
FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
SP = Layout(tp=2, sequence_parallel=True)


@contextlib.contextmanager
def inside(layout, ids=(ID,)):
    with testing.megatron_on_cpu(), testing.layout_initialised(layout), shim.patched(only=ids, require=ids):
        yield


def options_of(layout):
    return {"sequence_parallel": True} if layout.sequence_parallel else {}


def compared(layout, options):
    """Whether the gradients of a step beside frozen weights have the bits of those beside trained ones."""
    with inside(layout):
        made = (testing.run_packed(model_of(frozen, **options, **options_of(layout)), row()) for frozen in ((), FROZEN))
        truth, found = map(of_biases, made)
        assert len(truth) == 2 and found.keys() == truth.keys()
        return [torch.equal(found[name], truth[name]) for name in truth]


@pytest.mark.parametrize("options", [{}, FULL, {"gated_linear_unit": True}], ids=["plain", "recompute", "gated"])
def test_biases_have_the_gradients_that_they_have_beside_trained_weights(options):
    assert all(compared(Layout(), options))


@pytest.mark.parametrize("layout", [Layout(tp=2), SP], ids=str)
@pytest.mark.parametrize("options", [{}, FULL], ids=["plain", "recompute"])
def test_on_tensor_parallel_ranks_each_has_its_part(ranks2, layout, options):
    for found in ranks2.run(compared, layout, options):
        assert all(found)


# ---- a layer


def column_of(bias=True, dtype=torch.float32, **settings):
    """A ColumnParallelLinear, 4 to 6, whose weight is frozen."""
    config = testing.build_gpt(mtp_num_layers=None, num_layers=1).config
    layer = ColumnParallelLinear(
        4, 6, config=config, init_method=torch.nn.init.ones_, bias=bias, gather_output=False, skip_bias_add=False
    ).to(dtype)
    for name, value in settings.items():
        setattr(layer, name, value)
    layer.weight.requires_grad_(False)
    return layer


def given(*shape, dtype=torch.float32):
    return torch.randn(*shape, 4, generator=torch.Generator().manual_seed(0)).to(dtype).requires_grad_()


def grads_of(layer, hidden, of_output):
    """The gradients of the bias and of the hidden states."""
    layer.bias.grad = None
    (of_hidden,) = torch.autograd.grad(layer(hidden)[0], hidden, of_output, retain_graph=True)
    layer(hidden)[0].backward(of_output)
    return layer.bias.grad, of_hidden


SHAPES = [(5,), (5, 2)]


@pytest.mark.parametrize(("shape", "dtype"), itertools.product(SHAPES, [torch.float32, torch.bfloat16]), ids=str)
def test_inputs_of_each_shape_and_dtype(shape, dtype):
    with inside(Layout()):
        layer, hidden = column_of(dtype=dtype), given(*shape, dtype=dtype)
        of_output = torch.randn(*shape, 6).to(dtype)
        found = grads_of(layer, hidden, of_output)
        layer.weight.requires_grad_(True)
        truth = grads_of(layer, hidden, of_output)
    assert found[0].dtype == dtype
    assert all(map(torch.equal, found, truth))


@pytest.mark.parametrize("kind", ["expanded", "transposed"])
def test_a_gradient_that_is_not_contiguous(kind):
    with inside(Layout()):
        layer, hidden = column_of(), given(5, 2)
        of_output = torch.randn(1, 1, 6).expand(5, 2, 6) if kind == "expanded" else torch.randn(2, 5, 6).transpose(0, 1)
        found, _ = grads_of(layer, hidden, of_output)
    assert torch.allclose(found, of_output.sum((0, 1)), rtol=1e-6, atol=1e-6)


def test_fused_accumulation_changes_nothing():
    """It is of weights, and this one is frozen."""
    with inside(Layout()):
        hidden, of_output = given(5, 2), torch.randn(5, 2, 6)
        plain, fused = (
            grads_of(column_of(gradient_accumulation_fusion=on), hidden, of_output)[0] for on in (False, True)
        )
    assert torch.equal(fused, plain)


def test_the_layer_recomputed_and_compiled():
    with inside(Layout()):
        layer, hidden, of_output = column_of(), given(5, 2), torch.randn(5, 2, 6)
        truth, _ = grads_of(layer, hidden, of_output)
        for run in (
            lambda: checkpoint(lambda states: layer(states)[0], False, hidden),
            lambda: torch.compile(LinearWithFrozenWeight.apply, backend="aot_eager", fullgraph=True)(
                hidden, layer.weight, layer.bias, False, *[None] * takes_group()
            ),
        ):
            layer.bias.grad = None
            run().backward(of_output)
            assert torch.equal(layer.bias.grad, truth)


def takes_group():
    """Whether the function takes a group behind its first four arguments: from 0.13 on."""
    return testing.release() >= "0.13"


def operations(layer, hidden):
    """What runs in a step of the layer, by name."""
    with testing.Footprint() as footprint:
        layer(hidden)[0].sum().backward()
    return footprint.operations


@pytest.mark.parametrize("what", ["no bias", "frozen bias", "trained weight"])
def test_nothing_is_added_where_stock_is_right(what):
    found = []
    for ids in ((), (ID,)):
        with inside(Layout(), ids):
            layer = column_of(bias=what != "no bias")
            if what == "frozen bias":
                layer.bias.requires_grad_(False)
            layer.weight.requires_grad_(what == "trained weight")
            found.append(operations(layer, given(5, 2)))
    assert found[0] == found[1]


def test_a_release_that_returns_the_gradient_keeps_its_own():
    """Nothing is added to what upstream's function gives."""
    backward = LinearWithFrozenWeight.backward
    own = torch.full((6,), 7.0)

    def theirs(ctx, grad_output):
        grads = backward(ctx, grad_output)
        return (*grads[:2], own, *grads[3:])

    factory = shim.patches.megatron_core.frozen_weight_bias.bindings("v0_12", {})
    with testing.layout_initialised(Layout()):
        layer = column_of()
        with mock.patch.object(LinearWithFrozenWeight, "backward", staticmethod(next(iter(factory.values()))(theirs))):
            found, _ = grads_of(layer, given(5, 2), torch.randn(5, 2, 6))
    assert torch.equal(found, own)


def test_an_error_inside_is_upstream_s():
    with inside(Layout()):
        layer, hidden = column_of(allreduce_dgrad=True), given(5, 2)
        output, _ = layer(hidden)
        with mock.patch.object(torch.distributed, "all_reduce", side_effect=ConnectionError("lost")):
            with pytest.raises(ConnectionError, match="lost"):
                output.sum().backward()
        assert layer.bias.grad is None
        layer(hidden)[0].sum().backward()
        assert torch.equal(layer.bias.grad, torch.full((6,), 10.0))


# ---- what trains: main_grad, and the optimizers


def steps_of(layout, frozen, distributed, overlap, ids=(ID,), steps=2):
    """The biases' main_grad of each step, and the biases after the last one."""
    with (
        inside(layout, ids),
        mock.patch.object(torch.Tensor, "type", type_on_a_gpu),
        pytest.MonkeyPatch.context() as monkeypatch,
    ):
        model = model_of(frozen, **options_of(layout))
        config = DistributedDataParallelConfig(use_distributed_optimizer=distributed, overlap_grad_reduce=overlap)
        wrapped = DistributedDataParallel(model.config, config, model)
        settings = {"lr": 1e-2, "clip_grad": 0.0, "weight_decay": 0.0, "use_distributed_optimizer": distributed}
        optimizer = optimizer_on_cpu(OptimizerConfig(optimizer="adam", **settings), [wrapped])
        biases = [weight for name, weight in model.named_parameters() if name.endswith(LAYER + "bias")]
        gradients = []
        # 0.12 asks for Transformer Engine in each step, also without FP8.
        monkeypatch.setattr(distrib_optimizer, "quantize_param_shard", lambda *args, **kwargs: None, raising=False)
        for _ in range(steps):
            wrapped.zero_grad_buffer()
            for shift in (0, 1):  # microbatches
                with wrapped.no_sync() if overlap and not shift else contextlib.nullcontext():
                    ids = torch.arange(shift, shift + 8)[None]
                    wrapped(ids, ids, None, labels=ids).mean().backward()
            finalize_model_grads([wrapped])
            gradients += [bias.main_grad.clone() for bias in biases]
            # The biases alone move, in both runs.
            for name, weight in model.named_parameters():
                if not name.endswith(LAYER + "bias") and weight.requires_grad:
                    weight.main_grad.zero_()
            optimizer.step()
        return gradients, [bias.detach().clone() for bias in biases]


@pytest.mark.parametrize(("distributed", "overlap"), [(False, False), (True, False), (True, True)])
@pytest.mark.parametrize("layout", [Layout(), SP], ids=str)
def test_main_gradients_and_steps_are_those_beside_trained_weights(ranks2, layout, distributed, overlap):
    """One layout is of data parallelism alone, over two ranks."""
    runs = [ranks2.run(steps_of, layout, frozen, distributed, overlap) for frozen in ((), FROZEN)]
    for (truth, moved), (found, also) in zip(*runs, strict=True):
        assert all(grad.abs().max() > 0 for grad in truth)
        assert all(map(torch.equal, found, truth)) and all(map(torch.equal, also, moved))


def test_stock_leaves_main_gradients_empty(ranks2):
    for found, _ in ranks2.run(steps_of, SP, FROZEN, False, False, ()):
        assert not any(grad.any() for grad in found)


def test_stock_refuses_if_reductions_overlap(ranks2):
    with pytest.raises(testing.RankError, match=r"param\.grad being None is not safe"):
        ranks2.run(steps_of, Layout(), FROZEN, True, True, ())
