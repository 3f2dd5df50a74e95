"""paged-stash in upstream's forward of fused experts. Its operations are stand-ins: the real ones need a GPU."""

from importlib import import_module

import pytest
import torch

import shim

pytest.importorskip("megatron.core.transformer.moe.paged_stash", reason="the paged stash came with 0.18")

import paged_stash_cases as cases
from paged_stash_cases import HIDDEN, equal_bits, fused_gradients

CELLS = {"0.18.2": "all"}
ABOUT = []  # the releases before have no such forward

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


class Fused(cases.fused_experts()):
    """With a weight for what comes in the layout of the wire."""

    def __init__(self, **config):
        super().__init__(**config)
        self.whole = torch.nn.Parameter(torch.randn(HIDDEN))

    def operations(self, x, *others):
        if getattr(self.config, "moe_dispatch_fwd_dtype", "bf16") != "bf16":
            x = Whole.apply(x, self.whole)
        return super().operations(x, *others)


def test_fused_experts_get_the_same_gradients(applied):
    experts = Fused()
    for _ in range(3):
        before = applied().stashed
        assert equal_bits(fused_gradients(experts, (5, 3, 7), True), fused_gradients(experts, (5, 3, 7), False))
    assert applied().stashed - before == 6  # two tensors of each microbatch


def test_an_input_in_the_layout_of_the_wire_is_not_cut_to_its_rows(applied):
    """From 0.20 with moe_dispatch_fwd_dtype: quantized data, with its scales behind all rows."""
    experts = Fused(moe_dispatch_fwd_dtype="mxfp8")
    for _ in range(3):
        assert equal_bits(fused_gradients(experts, (5, 3), True), fused_gradients(experts, (5, 3), False))
