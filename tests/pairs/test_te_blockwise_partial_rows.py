"""te-blockwise-partial-rows: rows that do not fill blocks train, and others take the way that they took."""

from importlib import import_module
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.utils.checkpoint

import shim
from shim import testing
from shim.patches.transformer_engine.te_blockwise_partial_rows import _cuts_blocks, _gather, _is_not_quantizable
from shim.patches.transformer_engine.te_blockwise_partial_rows.proof import (
    BLOCK,
    INPUTS,
    RANKS,
    kernels,
    layer_of,
    off_by,
    quantize,
    sample,
)
from shim.testing.fp8_layer import OnGpu, fp8_region, fresh_fp8_state
from shim.testing.layout import Layout
from shim.testing.proof import on_device
from shim.testing.transformer_engine import compiled_ops

CELLS = {"0.16.1+2.12.0": "all"}

ID = "te-blockwise-partial-rows"
DECISION = shim.plan()[ID]
RECIPES = "transformer_engine.common.recipe"
NEEDED = DECISION.wanted
pytestmark = pytest.mark.skipif(not NEEDED, reason="this release needs no patch")
checked = pytest.mark.skipif(DECISION.variant == "v2_5", reason="it asserts nothing")


@pytest.fixture(scope="module")
def ranks():
    # A rank that frees the FP8 state of an earlier test would free its process group, and wait for threads it lacks.
    with fresh_fp8_state(), testing.Ranks(RANKS) as running:
        yield running


def on_ranks(ranks, function, *args, patch=True):
    layout = Layout(tp=RANKS, sequence_parallel=True)
    return ranks.run(in_layout, layout, patch, function, *args)


def in_layout(layout, patch, function, *args):
    ids = [ID] if patch else []
    with on_device("cpu", te=True), testing.layout_initialised(layout), shim.patched(only=ids, require=ids):
        return function(*args)


def region():
    return fp8_region(import_module(RECIPES).Float8BlockScaling())


def recomputed(layer, rows):
    def in_region(rows):
        with region():
            return layer(rows)

    return torch.utils.checkpoint.checkpoint(in_region, rows, use_reentrant=False)


def norm_of_nothing(rows, *more):
    """In the place of a norm: its quantizer rounds the rows themselves."""
    quantizer = next((each for each in more if hasattr(each, "rowwise_usage")), None)
    return (rows if quantizer is None else quantize(rows, quantizer)), None, rows.new_ones(1)


def gradient_of_nothing(gradient, rows, *more):
    return gradient, torch.zeros(rows.shape[-1]), torch.zeros(rows.shape[-1])


def off_by_behind_a_norm(rows):
    with compiled_ops({"layernorm_fwd": norm_of_nothing, "layernorm_bwd": gradient_of_nothing}):
        return off_by(rows, "LayerNormLinear")


@pytest.mark.parametrize(
    "function, args",
    [
        *((off_by, (rows,)) for rows in (64, 8, 120, 200)),
        (off_by, (64, "Linear", recomputed)),
        (off_by_behind_a_norm, (64,)),
        (off_by_behind_a_norm, (BLOCK,)),
    ],
)
def test_any_number_of_rows_trains(ranks, function, args):
    assert on_ranks(ranks, function, *args) == [0] * RANKS


def counting(function, rows):
    """The result of function(rows), and what was gathered meanwhile: sizes and dtypes."""
    gathered, gather = [], dist.all_gather_into_tensor

    def counted(target, *args, **kwargs):
        gathered.append((tuple(target.shape), str(target.dtype)))
        return gather(target, *args, **kwargs)

    with mock.patch.object(dist, "all_gather_into_tensor", counted):
        return function(rows), gathered


def evaluated(rows):
    """How far the output of an evaluation is from that of all rows in high precision."""
    with kernels() as te, torch.no_grad(), region():
        layer, everything = layer_of(te), sample(rows)
        output = layer(everything.chunk(RANKS)[dist.get_rank()].as_subclass(OnGpu)).as_subclass(torch.Tensor)
        return float((output - everything.float() @ layer.weight.float().t()).abs().max())


def test_rows_that_fill_blocks_send_what_they_sent(ranks):
    stock, here = (on_ranks(ranks, counting, off_by, BLOCK, patch=patch) for patch in (False, True))
    assert stock == here
    assert [found for found, _ in here] == [0] * RANKS
    assert {dtype for _, dtype in here[0][1]} == {"torch.uint8", "torch.float32"}


def test_an_evaluation_sends_fp8_if_stock_can(ranks):
    """The blocks of the forward pass lie along rows, so the gather that stock has up to 2.11 is right for any rows."""
    (off, gathered), *_ = on_ranks(ranks, counting, evaluated, 64)
    in_fp8 = [((128, 1), "torch.float32"), ((128, INPUTS), "torch.uint8")]
    assert off == 0
    assert gathered == ([((128, INPUTS), "torch.bfloat16")] if DECISION.variant == "v2_12" else in_fp8)
    if DECISION.variant == "v2_5":
        assert on_ranks(ranks, counting, evaluated, 64, patch=False)[0] == (0, in_fp8)


@checked
def test_other_recipes_are_still_refused():
    """The compiled part does not quantize their rows."""
    quantizer = mock.Mock(is_quantizable=lambda rows: False)
    with shim.patched(only=[ID], require=[ID]):
        from transformer_engine.pytorch.module import linear

        linear.assert_dim_for_all_gather(torch.empty(64, BLOCK), False, quantizer)
        with pytest.raises(AssertionError, match="All-gather requires quantizable tensor"):
            linear.assert_dim_for_all_gather(torch.empty(64, BLOCK), True, quantizer)


class Rows:
    """Quantized rows that know no dtype."""

    _columnwise_data = None

    def __init__(self, count):
        self.count = count

    def size(self):
        return torch.Size([2, self.count // 2, BLOCK])

    def dequantize(self, dtype):
        return dtype


@pytest.mark.parametrize("rule", [_cuts_blocks, _is_not_quantizable])
def test_only_quantized_rows_that_do_not_fill_blocks_are_dequantized(rule):
    def stock(inp, process_group, *, async_op=False, quantizer=None, out_shape=None):
        return inp

    plain, full, partial = torch.empty(1), Rows(BLOCK), Rows(64)
    quantizer = mock.Mock(is_quantizable=lambda rows: rows is full, columnwise_usage=True, block_len=BLOCK)
    gather = _gather(rule, stock)
    assert gather(plain, None, quantizer=quantizer) is plain
    assert gather(partial, None) is partial
    assert gather(full, None, quantizer=quantizer) is full
    assert gather(inp=partial, process_group=None, quantizer=quantizer) is torch.bfloat16
