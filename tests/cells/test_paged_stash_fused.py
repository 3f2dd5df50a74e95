"""paged-stash in upstream's forward of fused experts. Its operations are stand-ins: the real ones need a GPU."""

from importlib import import_module
from types import SimpleNamespace

import pytest
import torch

import shim

pytest.importorskip("megatron.core.transformer.moe.paged_stash", reason="the paged stash came with 0.18")

import paged_stash_cases as cases
from megatron.core.transformer.moe.experts import TEGroupedMLP
from paged_stash_cases import CAPACITY_FACTOR, HIDDEN, ROWS, Part, equal_bits

ID = "paged-stash"


@pytest.fixture(autouse=True)
def unwritten_memory_is_nan():
    with cases.unwritten_memory_is_nan():
        yield


@pytest.fixture
def applied():
    with shim.patched(only=[ID], require=[ID]):
        yield import_module("shim.patches.megatron_core.paged_stash").statistics


class Whole(torch.autograd.Function):
    """x * w over the whole memory of x, also behind the valid rows, as of data in the layout of the wire."""

    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        return x.nan_to_num() * w

    @staticmethod
    def backward(ctx, grad):
        x, w = ctx.saved_tensors
        return grad * w, x.nan_to_num().sum(0)


class Fused(TEGroupedMLP):
    """Upstream's experts with two of their attributes, which need a GPU, replaced: operations and linear layers."""

    def __init__(self, **config):
        torch.nn.Module.__init__(self)
        torch.manual_seed(0)
        shapes = {"first": (HIDDEN, ROWS), "second": (ROWS, HIDDEN), "whole": (HIDDEN,)}
        self.weights = torch.nn.ParameterDict({name: torch.randn(shape) for name, shape in shapes.items()})
        self.config = SimpleNamespace(
            **{**vars(cases.settings()), **config},
            moe_router_padding_for_quantization=True,
            moe_expert_rank_capacity_factor=CAPACITY_FACTOR,
            delay_offload_until_cuda_graph=False,
        )
        self._fused_ops, self._with_fused_impl, self._use_grouped_tensor = (self.operations,), True, True
        self.linear_fc2 = Part(use_bias=False)

    def operations(self, x, tokens_per_expert, probs, *others):
        count, weights = int(tokens_per_expert.sum()), self.weights
        if getattr(self.config, "moe_dispatch_fwd_dtype", "bf16") != "bf16":
            x = Whole.apply(x, weights["whole"])
        return cases.GroupedMLP.apply(x, count, weights["first"], weights["second"], True)


def gradients(experts, counts, stash):
    """Of one step over microbatches of `counts` tokens, all forward before all backward."""
    experts.config.moe_paged_stash = stash
    if stash:
        cases.paged_stash.paged_stash_reset(enabled=True, config=experts.config)
    experts.zero_grad()
    losses = []
    for number, count in enumerate(counts):
        x = torch.randn(ROWS, HIDDEN, generator=torch.Generator().manual_seed(number)).requires_grad_()
        # Into memory of its own, as dispatchers hand it over.
        output, _ = experts(x * 1, torch.tensor([count - 1, 1]), torch.ones(ROWS))
        losses.append(output[:count].square().sum())
    for loss in losses:
        loss.backward()
    return {name: weight.grad.clone() for name, weight in experts.named_parameters() if weight.grad is not None}


def test_fused_experts_get_the_same_gradients(applied):
    experts = Fused()
    for _ in range(3):
        before = applied().stashed
        assert equal_bits(gradients(experts, (5, 3, 7), True), gradients(experts, (5, 3, 7), False))
    assert applied().stashed - before == 6  # two tensors of each microbatch


def test_an_input_in_the_layout_of_the_wire_is_not_cut_to_its_rows(applied):
    """From 0.20 with moe_dispatch_fwd_dtype: quantized data, with its scales behind all rows."""
    experts = Fused(moe_dispatch_fwd_dtype="mxfp8")
    for _ in range(3):
        assert equal_bits(gradients(experts, (5, 3), True), gradients(experts, (5, 3), False))
