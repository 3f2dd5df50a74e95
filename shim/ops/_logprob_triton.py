"""The passes of _logprob_chunks as one Triton kernel each, without scratch.

Forward reads the logits once. Backward reads them once and writes their gradient once. Arguments and results of
`statistics` and `gradient` are those of _logprob_chunks, except that the kernels take no fp64 logits. The module is
imported only for a kernel, because Triton imports slowly and is not always installed. TRITON_INTERPRET=1, set before
the import, interprets the kernels on CPU.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from shim.ops._logprob_chunks import RowGradient, Scale

__all__ = ["gradient", "statistics"]

_COLUMNS = 4096


@triton.jit
def _statistics_kernel(
    x,
    stats,
    place,
    scales,
    ignored,
    top_columns,
    scale,
    row_stride,
    column_stride,
    tokens,
    columns,
    PER_TOKEN: tl.constexpr,
    SKIPS: tl.constexpr,
    ENTROPY: tl.constexpr,
    TOTAL: tl.constexpr,
    TOP_COLUMN: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Each program handles one row of x."""
    row = tl.program_id(0).to(tl.int64)
    if PER_TOKEN:
        scale = tl.load(scales + row)
    readable = columns
    if SKIPS:  # an ignored row is not read
        readable = tl.where(tl.load(ignored + row) == 0, columns, 0)
    start = x + row * row_stride
    top = float("-inf")
    top_column = tl.zeros([], tl.int32)
    # One sum per lane; the lanes are summed after the loop.
    powers = tl.zeros([BLOCK], tl.float32)
    weighted = tl.zeros([BLOCK], tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    for first in range(0, columns, BLOCK):
        column = first + tl.arange(0, BLOCK)
        inside = column < readable
        value = tl.load(start + column.to(tl.int64) * column_stride, mask=inside, other=float("-inf")).to(tl.float32)
        largest = tl.max(value, 0)
        if TOP_COLUMN:  # of equal entries the first
            found = tl.min(tl.where(value == largest, column, columns), 0)
            top_column = tl.where(largest > top, found, top_column)
        higher = tl.maximum(top, largest)
        base = tl.where(higher == float("-inf"), 0.0, higher)
        # `top` is -inf before the first finite entry. The sums scaled by it are zero and stay zero.
        raised = tl.maximum((top - base) * scale, -2000.0)
        bits = tl.maximum((value - base) * scale, -2000.0, propagate_nan=tl.PropagateNan.ALL)
        power = tl.where(inside, tl.exp2(bits), 0.0)
        shrink = tl.exp2(raised)
        if ENTROPY:
            weighted = shrink * (weighted + raised * powers) + power * bits
        powers = shrink * powers + power
        if TOTAL:
            total += tl.where(inside, value, 0.0)
        top = higher
    at = stats + row
    tl.store(at, top)
    if TOP_COLUMN:
        tl.store(top_columns + row, top_column)
    tl.store(at + tokens, tl.sum(powers, 0))
    target = tl.load(place + row)
    value = tl.load(start + target * column_stride, mask=target >= 0, other=0.0).to(tl.float32)
    tl.store(at + 2 * tokens, value)
    if ENTROPY:
        tl.store(at + 3 * tokens, tl.sum(weighted, 0))
    if TOTAL:
        tl.store(at + (4 if ENTROPY else 3) * tokens, tl.sum(total, 0))


@triton.jit
def _gradient_kernel(
    x,
    out,
    place,
    scales,
    ignored,
    tops,
    factors,
    slopes,
    everywhere,
    at_target,
    scale,
    row_stride,
    column_stride,
    out_row_stride,
    out_column_stride,
    columns,
    PER_TOKEN: tl.constexpr,
    SKIPS: tl.constexpr,
    SLOPE: tl.constexpr,
    EVERYWHERE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Each program handles one block of one row of x."""
    row = tl.program_id(0).to(tl.int64)
    if PER_TOKEN:
        scale = tl.load(scales + row)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    readable = columns
    if SKIPS:  # an ignored row is not read
        readable = tl.where(tl.load(ignored + row) == 0, columns, 0)
    wanted = column < readable
    wide = column.to(tl.int64)
    value = tl.load(x + row * row_stride + wide * column_stride, mask=wanted, other=0.0).to(tl.float32)
    bits = (value - tl.load(tops + row)) * scale
    by_power = tl.load(factors + row)
    if SLOPE:
        bits = tl.maximum(bits, -2000.0, propagate_nan=tl.PropagateNan.ALL)
        by_power += tl.load(slopes + row) * bits
    result = tl.exp2(bits) * by_power
    if EVERYWHERE:
        result += tl.load(everywhere + row)
    result += tl.where(column == tl.load(place + row), tl.load(at_target + row), 0.0)
    result = tl.where(wanted, result, 0.0)
    tl.store(
        out + row * out_row_stride + wide * out_column_stride, result.to(out.dtype.element_ty), mask=column < columns
    )


def statistics(
    x: Tensor,
    place: Tensor,
    scale: Scale,
    *,
    entropy: bool,
    total: bool,
    ignored: Tensor | None,
    column: Tensor | None = None,
    **_: Any,
) -> Tensor:
    tokens, columns = x.shape
    stats = torch.empty((3 + entropy + total, tokens), dtype=torch.float32, device=x.device)
    if tokens:
        block, warps = _block(columns)
        with torch.cuda.device_of(x):
            _statistics_kernel[(tokens,)](
                x,
                stats,
                place,
                *_rows(x, scale, ignored),
                x if column is None else column,
                _number(scale),
                *x.stride(),
                tokens,
                columns,
                PER_TOKEN=isinstance(scale, Tensor),
                SKIPS=ignored is not None,
                ENTROPY=entropy,
                TOTAL=total,
                TOP_COLUMN=column is not None,
                BLOCK=block,
                num_warps=warps,
            )
    return stats


def gradient(
    x: Tensor, out: Tensor, place: Tensor, scale: Scale, row: RowGradient, *, ignored: Tensor | None, **_: Any
) -> None:
    tokens, columns = x.shape
    if not tokens:
        return
    block, warps = _block(columns)
    top, factor, slope, everywhere, at_target = (x if value is None else value.contiguous() for value in row)
    with torch.cuda.device_of(x):
        _gradient_kernel[(tokens, triton.cdiv(columns, block))](
            x,
            out,
            place,
            *_rows(x, scale, ignored),
            top,
            factor,
            slope,
            everywhere,
            at_target,
            _number(scale),
            *x.stride(),
            *out.stride(),
            columns,
            PER_TOKEN=isinstance(scale, Tensor),
            SKIPS=ignored is not None,
            SLOPE=row.slope is not None,
            EVERYWHERE=row.everywhere is not None,
            BLOCK=block,
            num_warps=warps,
        )


def _block(columns: int) -> tuple[int, int]:
    """(columns, warps) per program."""
    block = min(_COLUMNS, triton.next_power_of_2(columns))
    return block, 8 if block >= 2048 else 4


def _rows(unused: Tensor, scale: Scale, ignored: Tensor | None) -> tuple[Tensor, Tensor]:
    """Pointers to the scales and the ignored rows; `unused` replaces a tensor that the kernel does not read."""
    scales = scale if isinstance(scale, Tensor) else unused
    return scales, unused if ignored is None else ignored.view(torch.int8)


def _number(scale: Scale) -> float:
    return 1.0 if isinstance(scale, Tensor) else scale
