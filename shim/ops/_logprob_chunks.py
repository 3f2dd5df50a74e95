"""Statistics and gradients of rows of logits, a chunk of rows at a time, with torch's own operations.

Everything is in powers of two: for a row x with largest entry m and temperature t, ``bits = (x - m) * log2(e) / t`` and
``exp((x - m) / t) = exp2(bits)``. On CPU exp2 takes a third of the time of exp, and the temperature costs nothing.

Statistics are a tensor [K, T] in fp32 (fp64 for fp64 logits), K = 3 to 5, with these rows:

    TOP     the largest entry of the row
    SUM     sum of exp2(bits)
    TARGET  the entry at the target, 0 where the target is not in these columns
    BITS    sum of exp2(bits) * bits, only where an entropy is wanted (`entropy`)
    TOTAL   the last row: sum of the entries, only where labels are smoothed (`total`)

`scale` is log2(e) / temperature throughout, a number or a tensor [T]; `place` int64 [T] says which column of these
is the target, -1 for none; `ignored` bool [T] or None marks rows that need no statistics and get a gradient of zero.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

__all__ = [
    "BITS",
    "LOG2E",
    "SUM",
    "TARGET",
    "TOP",
    "TOTAL",
    "RowGradient",
    "Scale",
    "accumulates_in",
    "combine",
    "gradient",
    "of_rows",
    "pick",
    "rescaled",
    "rows_at_once",
    "slices",
    "statistics",
    "tile_gradient",
    "tile_statistics",
]

TOP, SUM, TARGET, BITS, TOTAL = 0, 1, 2, 3, -1
LOG2E = 1 / math.log(2)
Scale = float | Tensor

# What a chunk may use: on CPU it stays in the cache, on a GPU it fills the device.
_SCRATCH_CPU, _SCRATCH_DEVICE = 4 << 20, 128 << 20
# exp2 of this is zero in fp64 too, and zero times this is zero: what zero times -inf would have to be.
_NOTHING = -2000.0


class RowGradient(NamedTuple):
    """The gradient of a row: ``exp2(bits) * (factor + slope * bits) + everywhere``, and at the target `at_target` more.

    Each is [T] in the dtype of the statistics. top: the largest entry over all columns of all ranks. slope, everywhere:
    None where no entropy or no smoothed label asks for them.
    """

    top: Tensor
    factor: Tensor
    slope: Tensor | None
    everywhere: Tensor | None
    at_target: Tensor


def accumulates_in(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def rows_at_once(device: torch.device, row_bytes: int, scratch_bytes: int | None, chunk_size: int | None) -> int:
    """How many rows fit the scratch, at least one. `chunk_size`, where given, is the answer."""
    if chunk_size is not None:
        return chunk_size
    if scratch_bytes is None:
        scratch_bytes = _SCRATCH_CPU if device.type == "cpu" else _SCRATCH_DEVICE
    return max(1, scratch_bytes // max(row_bytes, 1))


def statistics(
    x: Tensor,
    place: Tensor,
    scale: Scale,
    *,
    entropy: bool,
    total: bool,
    ignored: Tensor | None,
    scratch_bytes: int | None,
    chunk_size: int | None,
) -> Tensor:
    """The statistics of all rows of x [T, V], of any floating dtype and strides."""
    tokens, columns = x.shape
    dtype = accumulates_in(x.dtype)
    stats = x.new_zeros((3 + entropy + total, tokens), dtype=dtype)
    stats[TARGET] = pick(x, place).to(dtype)
    buffers = 2 if entropy else 1
    rows = rows_at_once(x.device, buffers * columns * dtype.itemsize, scratch_bytes, chunk_size)
    scratch = x.new_empty((buffers, min(rows, tokens), columns), dtype=dtype)
    for chunk, skip in slices(tokens, rows, ignored):
        if not skip:
            there = x[chunk]
            tile_statistics(there, of_rows(scale, chunk), stats[:, chunk], [*scratch[:, : len(there)]], entropy, total)
    return stats


def tile_statistics(
    x: Tensor, scale: Scale, stats: Tensor, scratch: Sequence[Tensor], entropy: bool, total: bool
) -> None:
    """Write the statistics of x [n, V] into `stats` [K, n], all but TARGET.

    scratch: one or, with entropy, two tensors [n, V] in the dtype of the statistics; the first may be x.
    """
    bits = scratch[0]
    if x.dtype != bits.dtype:
        x = bits.copy_(x)
    top = torch.amax(x, -1)
    stats[TOP] = top
    if total:
        torch.sum(x, -1, out=stats[TOTAL])
    # A row that is -inf in all columns of this rank adds nothing to the sum.
    torch.sub(x, _finite(top).unsqueeze(1), out=bits).mul_(scale)
    if not entropy:
        torch.sum(bits.exp2_(), -1, out=stats[SUM])
        return
    powers = torch.exp2(bits.clamp_(min=_NOTHING), out=scratch[1])
    torch.sum(powers, -1, out=stats[SUM])
    torch.sum(powers.mul_(bits), -1, out=stats[BITS])


def gradient(
    x: Tensor,
    out: Tensor,
    place: Tensor,
    scale: Scale,
    row: RowGradient,
    *,
    ignored: Tensor | None,
    scratch_bytes: int | None,
    chunk_size: int | None,
) -> None:
    """Write the gradient of x [T, V] into `out`, of the same dtype; `out` may be x."""
    tokens, columns = x.shape
    dtype = row.top.dtype
    buffers = (x.dtype != dtype) + (row.slope is not None)
    rows = rows_at_once(x.device, buffers * columns * dtype.itemsize, scratch_bytes, chunk_size)
    if not buffers:  # a chunk in the cache even so, as it is passed over more than once
        rows = min(rows, rows_at_once(x.device, columns * dtype.itemsize, None, None))
    scratch = x.new_empty((buffers, min(rows, tokens), columns), dtype=dtype)
    for chunk, skip in slices(tokens, rows, ignored):
        there = x[chunk]
        if skip:
            out[chunk].zero_()
            continue
        part = RowGradient(*(None if value is None else value[chunk] for value in row))  # type: ignore[arg-type]
        tile_gradient(there, out[chunk], place[chunk], of_rows(scale, chunk), part, scratch[:, : len(there)])
        if ignored is not None:
            _clear_rows(out[chunk], ignored[chunk])


def tile_gradient(x: Tensor, out: Tensor, place: Tensor, scale: Scale, row: RowGradient, scratch: Tensor) -> None:
    """Write the gradient of x [n, V] into `out`, which may be x.

    scratch: [b, n, V] in the dtype of the statistics, where b counts what is true of: x is of another dtype, an entropy
    has a gradient.
    """
    direct = x.dtype == scratch.dtype
    bits = out if direct else scratch[0]
    if not direct:
        x = bits.copy_(x)
    torch.sub(x, row.top.unsqueeze(1), out=bits).mul_(scale)
    if row.slope is None:
        bits.exp2_().mul_(row.factor.unsqueeze(1))
    else:
        powers = torch.exp2(bits.clamp_(min=_NOTHING), out=scratch[-1])
        bits.mul_(row.slope.unsqueeze(1)).add_(row.factor.unsqueeze(1)).mul_(powers)
    if row.everywhere is not None:
        bits.add_(row.everywhere.unsqueeze(1))
    # Not scatter_add_, which is an error on CUDA where only deterministic algorithms are allowed.
    column = place.clamp(min=0).unsqueeze(1)
    bits.scatter_(1, column, bits.gather(1, column) + torch.where(place < 0, 0, row.at_target).unsqueeze(1))
    if not direct:
        out.copy_(bits)


def pick(x: Tensor, place: Tensor) -> Tensor:
    """The entry of each row of x [T, V] at `place`, 0 for -1."""
    return torch.where(place < 0, 0, x.gather(1, place.clamp(min=0).unsqueeze(1)).squeeze(1))


def combine(parts: Tensor, scale: Scale, entropy: bool) -> Tensor:
    """The statistics [K, T] over all columns from those of parts of the columns, [n, K, T]."""
    top = parts[:, TOP].amax(0)
    stats = rescaled(parts, top, scale, entropy).sum(0)
    stats[TOP] = top
    return stats


def rescaled(parts: Tensor, top: Tensor, scale: Scale, entropy: bool) -> Tensor:
    """The statistics `parts` [..., K, T] relative to the largest entry `top` [T] of all, instead of each to its own."""
    # No power of two underflows here that would not in the sum: -inf becomes zero.
    bits = ((parts[..., TOP, :] - _finite(top)) * scale).clamp_(min=_NOTHING)
    weight = torch.exp2(bits)
    result = parts.clone()
    result[..., SUM, :] *= weight
    if entropy:
        result[..., BITS, :] *= weight
        result[..., BITS, :] += result[..., SUM, :] * bits
    return result


def _finite(top: Tensor) -> Tensor:
    return torch.where(top == -math.inf, 0, top)


def of_rows(scale: Scale, chunk: slice) -> Scale:
    return scale[chunk].unsqueeze(1) if isinstance(scale, Tensor) else scale


def slices(tokens: int, rows: int, ignored: Tensor | None) -> Iterator[tuple[slice, bool]]:
    """Slices of the rows, and whether all of them are ignored, which only the CPU can tell without waiting."""
    reads = ignored is not None and ignored.device.type == "cpu"
    for start in range(0, tokens, rows):
        chunk = slice(start, min(tokens, start + rows))
        yield chunk, reads and bool(ignored[chunk].all())  # type: ignore[index]


def _clear_rows(out: Tensor, ignored: Tensor) -> None:
    if out.device.type == "cpu":
        out[ignored] = 0  # touches these rows alone
    else:
        out.masked_fill_(ignored.unsqueeze(1), 0)
