"""Models, steps and measures of the tests of fused-linear-logprob."""

import contextlib
import functools
import importlib.util

import pytest
import torch

import shim
from shim import testing

ID = "fused-linear-logprob"
VERSION = tuple(int(part) for part in testing.release().split(".")[:2])
DEV = importlib.util.find_spec("megatron.core.transformer.linear_cross_entropy") is not None
TP, SP, PP = testing.Layout(tp=2), testing.Layout(tp=2, sequence_parallel=True), testing.Layout(pp=2)
on_one_rank = pytest.mark.usefixtures("one_rank")
SIZES = {"num_layers": 1, "hidden_size": 16, "ffn_hidden_size": 32}


def patched(*ids, skip_masked=False, **options):
    mine = {"fuse": True, "skip_masked": skip_masked}
    return shim.patched(only=[ID, *ids], require=[ID, *ids], options={ID: mine, **options})


def build(depths=None, tied=False, **options):
    return testing.build_gpt(mtp_num_layers=depths, share_embeddings_and_output_weights=tied, **SIZES | options)


def rows_of(tokens=8):
    rows = torch.stack([torch.arange(tokens), torch.arange(tokens) * 5 % 64])
    return rows, rows.roll(-1, 1)


def gradients(model):
    return {name: weight.grad for name, weight in model.named_parameters() if weight.grad is not None}


def step(model, **given):
    """Losses of each token and all gradients of a step on two rows."""
    rows, labels = rows_of()
    losses = model(rows, rows, None, labels=labels, **given)
    losses.mean().backward()
    return losses.detach(), gradients(model)


def summed(model, rows, labels):
    """The same of the sum of the losses, for labels of one's own."""
    losses = model(rows, rows, None, labels=labels)
    losses.sum().backward()
    return losses.detach(), gradients(model)


@contextlib.contextmanager
def logits_counted():
    """How often a layer computes logits: an output layer, or the second one of its adapter."""
    from megatron.core.tensor_parallel import ColumnParallelLinear

    calls, stock = [], ColumnParallelLinear.forward

    @functools.wraps(stock)
    def forward(self, *args, **kwargs):
        logits, bias = stock(self, *args, **kwargs)
        if self.output_size == 64:
            calls.append(logits.shape)
        return logits, bias

    ColumnParallelLinear.forward = forward
    try:
        yield calls
    finally:
        ColumnParallelLinear.forward = stock


def off_by(found, right):
    """The largest error relative to the norm of what is right, of losses and of each gradient."""
    (losses, grads), (of_stock, of_grads) = found, right
    assert grads.keys() == of_grads.keys() and losses.dtype == of_stock.dtype and losses.shape == of_stock.shape
    pairs = [(losses, of_stock), *((grads[name], of_grads[name]) for name in grads)]
    assert all(one.dtype == other.dtype for one, other in pairs)
    return max(float((one.double() - other.double()).norm() / (other.double().norm() + 1e-12)) for one, other in pairs)


def microbatches(model, fused):
    """The main gradients, in fp32, after two microbatches in DistributedDataParallel.

    fused: whether the layers that make logits add to them by themselves.
    """
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig

    settings = DistributedDataParallelConfig(grad_reduce_in_fp32=True)
    wrapped = DistributedDataParallel(model.config, settings, model)
    heads = [layer for layer in model.modules() if getattr(layer, "output_size", None) == 64]
    for layer in heads:
        layer.gradient_accumulation_fusion = fused
    rows, labels = rows_of()
    wrapped.zero_grad_buffer()
    for _ in range(2):
        wrapped(rows, rows, None, labels=labels).mean().backward()
    assert all(weight.grad is None for weight in model.parameters())
    for layer in heads:
        weight = layer.weight
        assert weight is None or not weight.requires_grad or weight.grad_added_to_main_grad is fused
    return {name: weight.main_grad.clone() for name, weight in model.named_parameters() if weight.requires_grad}
