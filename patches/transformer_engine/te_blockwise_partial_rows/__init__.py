"""Blockwise FP8 trains under sequence parallelism with rows that do not fill blocks.

What is wrong (2.5 to 2.13): the rows of a rank may be no multiple of 128, as those of packed rows or of odd lengths.
Then a column-parallel layer under the recipe Float8BlockScaling cannot train, or trains on a wrong gradient:
1. From 2.8 on an assertion refuses such rows before they are gathered: "All-gather requires quantizable tensor".
2. Up to 2.7 backward gathers the scales of blocks of 128 rows, though blocks of all rows begin elsewhere. If ranks have
   more of them than all rows have blocks, as with 64 rows on two ranks, the gather raises. If they have as many, as
   with 120 rows, the gradient of the weight is silently wrong.

The patch: rows whose scales do not fit are dequantized, gathered in bf16 and quantized again, as the same layers do
with gradients. Up to 2.11 backward alone needs that: blocks of the forward pass lie along a row, which no gather cuts,
so stock gathers them in FP8. From 2.12 on it gathers such rows in high precision alone. Rows that fill blocks are
gathered as on stock.

- In backward values are rounded by the blocks of a rank, and once more by those of all rows, as in 2.14.
- Only blockwise FP8. The compiled part refuses to quantize such rows to MXFP8 or NVFP4, also in later releases.

Upstream: fixed in 2.14 by pull request 2637. 2.3 and 2.4 always gather in high precision.

Delete when: Transformer Engine 2.13 is not supported.
"""

from __future__ import annotations

import functools
import math
import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch

from shim.patches._arguments import Function, argument, replacing

PACKAGE = "transformer_engine.pytorch."
GATHER = PACKAGE + "distributed:_all_gather_fp8_blockwise"
START_GATHER = PACKAGE + "distributed:_start_all_gather_fp8_blockwise"  # its name from 2.12
CHECK = PACKAGE + "utils:assert_dim_for_all_gather"  # from 2.8


def _cuts_blocks(rows: Any, quantizer: Any) -> bool:
    """Whether blocks along columns, as backward has them, end before a rank's rows do."""
    return bool(quantizer.columnwise_usage and math.prod(rows.size()[:-1]) % quantizer.block_len)


def _is_not_quantizable(rows: Any, quantizer: Any) -> bool:
    """Whether stock's gather takes rows in high precision alone."""
    return not quantizer.is_quantizable(rows)


def _gather(needs_numbers: Callable[[Any, Any], bool], original: Function) -> Function:
    rows_of, with_rows = argument(original, "inp"), replacing(original, "inp")
    quantizer_of = argument(original, "quantizer")

    @functools.wraps(original)
    def gather(*args: Any, **kwargs: Any) -> Any:
        rows, quantizer = rows_of(args, kwargs), quantizer_of(args, kwargs)
        if quantizer is not None and hasattr(rows, "_columnwise_data") and needs_numbers(rows, quantizer):
            dtype = rows.dtype if isinstance(rows, torch.Tensor) else torch.bfloat16  # others do not know theirs
            args, kwargs = with_rows(args, kwargs, rows.dequantize(dtype=dtype))
        return original(*args, **kwargs)

    return gather


def _check(original: Function) -> Function:
    quantizer_of, with_gather = argument(original, "quantizer"), replacing(original, "with_all_gather")

    @functools.wraps(original)
    def assert_dim_for_all_gather(*args: Any, **kwargs: Any) -> Any:
        blockwise = sys.modules[PACKAGE + "tensor.float8_blockwise_tensor"].Float8BlockQuantizer
        if isinstance(quantizer_of(args, kwargs), blockwise):
            args, kwargs = with_gather(args, kwargs, False)
        return original(*args, **kwargs)

    return assert_dim_for_all_gather


_scales = functools.partial(_gather, _cuts_blocks)
BINDINGS: dict[str, dict[str, Callable[[Function], Function]]] = {
    "v2_5": {GATHER: _scales},
    "v2_8": {GATHER: _scales, CHECK: _check},
    "v2_12": {START_GATHER: functools.partial(_gather, _is_not_quantizable), CHECK: _check},
}


def bindings(variant: str, options: Mapping[str, Any]) -> Mapping[str, Callable[[Function], Function]]:
    """Target -> factory for a variant. A factory takes upstream's object and returns the replacement."""
    return BINDINGS[variant]
