"""Statistics and gradients of rows of logits, one chunk of rows at a time, with torch's own operations.

All exponents are powers of two: for a row x with largest entry m and temperature t, ``bits = (x - m) * log2(e) / t``
and ``exp((x - m) / t) = exp2(bits)``. Without an entropy, bits are needed for that power only, and exp replaces exp2 if
it is faster: at a temperature of 1 it needs no multiplication.

Statistics are a tensor [K, T] in fp32 (fp64 for fp64 logits), K = 3 to 5, with these rows:

    TOP     the largest entry of the row
    SUM     sum of exp2(bits)
    TARGET  the entry at the target, 0 if the target is not in these columns
    BITS    sum of exp2(bits) * bits, only if an entropy is wanted (`entropy`)
    TOTAL   the last row: sum of the entries, only if labels are smoothed (`total`)

If given, `column` int64 [T] gets the column of TOP, the first of equal ones.

Common arguments: `scale` is log2(e) / temperature, a number or a tensor [T]. `place` int64 [T] is the target's column
among these columns, -1 for none. `ignored` bool [T] or None marks rows without statistics, whose gradient is zero.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

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
    "as_columns",
    "combine",
    "gradient",
    "of_rows",
    "pick",
    "rows_at_once",
    "slices",
    "statistics",
    "tile_gradient",
    "tile_statistics",
]

TOP, SUM, TARGET, BITS, TOTAL = 0, 1, 2, 3, -1
LOG2E = 1 / math.log(2)
Scale = float | Tensor

# Scratch for one chunk: on CPU it fits each core's own cache, on a GPU it fills the device.
_SCRATCH_CPU, _SCRATCH_DEVICE = 4 << 20, 128 << 20
_SCRATCH_CORE = 1 << 20  # per thread; all threads together use at most _SCRATCH_CPU
# exp2 of this is zero, also in fp64, and zero times this is zero. Zero times -inf would be NaN.
_NOTHING = -2000.0
_BLOCK = 64  # columns; see `_write_top`


class RowGradient(NamedTuple):
    """The gradient of a row: ``exp2(bits) * (factor + slope * bits) + everywhere``, plus `at_target` at the target.

    Each is [T] in the dtype of the statistics. top: the largest entry over all columns of all ranks. slope: None
    without an entropy. everywhere: None without label smoothing.
    """

    top: Tensor
    factor: Tensor
    slope: Tensor | None
    everywhere: Tensor | None
    at_target: Tensor


def accumulates_in(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def rows_at_once(device: torch.device, row_bytes: int, scratch_bytes: int | None, chunk_size: int | None) -> int:
    """How many rows fit the scratch, at least one; `chunk_size` if given."""
    if chunk_size is not None:
        return chunk_size
    if scratch_bytes is None:
        scratch_bytes = _SCRATCH_DEVICE
        if device.type == "cpu":
            scratch_bytes = min(_SCRATCH_CPU, _SCRATCH_CORE * torch.get_num_threads())
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
    stats[TARGET] = pick(x, place)
    buffers = 2 if entropy else 1
    rows = rows_at_once(x.device, buffers * columns * dtype.itemsize, scratch_bytes, chunk_size)
    scratch = x.new_empty((buffers, min(rows, tokens), columns), dtype=dtype)
    # Split into all views at once. Single slices would cost as much as the work on a small chunk.
    parts = zip(_split(x, rows), _split(stats, rows, 1), _split(as_columns(scale), rows), _skipped(ignored, rows))
    for there, found, of_chunk, skip in parts:
        if not skip:
            tile_statistics(there, of_chunk, found, _first(scratch, there).unbind(), entropy, total)
    return stats


def tile_statistics(
    x: Tensor,
    scale: Scale,
    stats: Tensor,
    scratch: Sequence[Tensor],
    entropy: bool,
    total: bool,
    column: Tensor | None = None,
) -> None:
    """Write the statistics of x [n, V] into `stats` [K, n], except TARGET, and the column of TOP into `column`.

    scale: a number or a tensor [n, 1].
    scratch: one or, with entropy, two tensors [n, V] in the dtype of the statistics; the first may be x.
    """
    bits = scratch[0]
    if x.dtype != bits.dtype:
        x = bits.copy_(x)
    top = _write_top(x, stats[TOP], column)
    if total:
        torch.sum(x, -1, out=stats[TOTAL])
    # A row that is -inf in all columns of this rank adds nothing to the sum.
    torch.sub(x, _finite(top).unsqueeze(1), out=bits)
    if not entropy:
        torch.sum(_exp(bits, scale), -1, out=stats[SUM])
        return
    bits.mul_(scale)
    powers = torch.exp2(bits.clamp_(min=_NOTHING), out=scratch[1])
    torch.sum(powers, -1, out=stats[SUM])
    torch.sum(powers.mul_(bits), -1, out=stats[BITS])


def _write_top(x: Tensor, top: Tensor, column: Tensor | None) -> Tensor:
    """The largest entry of each row of x [n, V], written into `top`, and its first column into `column`."""
    if column is None:
        return torch.amax(x, -1, out=top)
    if x.size(1) % _BLOCK:
        return torch.max(x, -1, out=(top, column))[0]
    # On CPU an index costs eight times as much as the largest entry alone. So only one block is searched for it.
    blocks = x.unflatten(1, (-1, _BLOCK))
    block = torch.max(blocks.amax(-1), -1, out=(top, column))[1].view(-1, 1, 1)
    within = blocks.gather(1, block.expand(-1, 1, _BLOCK)).squeeze(1).argmax(-1)
    column.mul_(_BLOCK).add_(within)
    return top


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
    if not buffers:  # the chunk itself should stay in the cache, because several passes read it
        rows = min(rows, rows_at_once(x.device, columns * dtype.itemsize, None, None))
    scratch = x.new_empty((buffers, min(rows, tokens), columns), dtype=dtype)
    scale, row = as_columns(scale), RowGradient(*map(as_columns, row))
    column, at_target = _at_target(x, place, scale, row)  # before `out`, which may be x, is written
    of_rows = zip(*(_split(value, rows) for value in row))
    parts = zip(_split(x, rows), _split(out, rows), _split(scale, rows), of_rows, _skipped(ignored, rows))
    for there, result, of_chunk, of_row, skip in parts:
        if skip:
            result.zero_()
        else:
            _everywhere(there, result, of_chunk, RowGradient(*of_row), _first(scratch, there))
    _put_at_target(out, column, at_target)
    if ignored is not None:
        _clear_rows(out, ignored)


def tile_gradient(x: Tensor, out: Tensor, place: Tensor, scale: Scale, row: RowGradient, scratch: Tensor) -> None:
    """Write the gradient of x [n, V] into `out`, which may be x.

    scale: a number or a tensor [n, 1].
    scratch: [b, n, V] in the dtype of the statistics; b is 1 if x has another dtype, plus 1 if an entropy has a
    gradient.
    """
    row = RowGradient(*map(as_columns, row))
    column, at_target = _at_target(x, place, scale, row)
    _everywhere(x, out, scale, row, scratch)
    _put_at_target(out, column, at_target)


def _at_target(x: Tensor, place: Tensor, scale: Scale, row: RowGradient) -> tuple[Tensor, Tensor]:
    """A column of each row of x [n, V], int64 [n, 1], and the gradient there, [n, 1] in the dtype of x.

    The column is the target's if the target is here. The entry is computed separately, because the dtype of `out` may
    be too coarse for the sum of both terms. row: here and in `_everywhere`, each is [n, 1].
    """
    column = place.clamp(min=0).unsqueeze(1)
    entry = x.gather(1, column)
    gradient = torch.empty_like(entry, dtype=row.top.dtype)
    _everywhere(entry.to(gradient.dtype), gradient, scale, row, gradient.new_empty(1, *gradient.shape))
    gradient += torch.where(column == place.unsqueeze(1), row.at_target, 0)
    return column, gradient.to(x.dtype)


def _put_at_target(out: Tensor, column: Tensor, at_target: Tensor) -> None:
    if out.device.type == "cpu" and out.dtype != accumulates_in(out.dtype):
        # There torch's scatter_ copies all of a tensor in half precision to fp32 and back.
        out.index_put_((torch.arange(out.size(0)), column.squeeze(1)), at_target.squeeze(1))
    else:  # not scatter_add_, which raises on CUDA if only deterministic algorithms are allowed
        out.scatter_(1, column, at_target)


def _everywhere(x: Tensor, out: Tensor, scale: Scale, row: RowGradient, scratch: Tensor) -> None:
    """Write the gradient of x [n, V] into `out`, as if there were no targets. scratch: see `tile_gradient`."""
    direct = x.dtype == scratch.dtype
    bits = out if direct else scratch[0]
    torch.sub(x if direct else bits.copy_(x), row.top, out=bits)
    if row.slope is None:
        _exp(bits, scale).mul_(row.factor)
    else:
        bits.mul_(scale)
        powers = torch.exp2(bits.clamp_(min=_NOTHING), out=scratch[-1])
        bits.mul_(row.slope).add_(row.factor).mul_(powers)
    if row.everywhere is not None:
        bits.add_(row.everywhere)
    if not direct:
        out.copy_(bits)


def pick(x: Tensor, place: Tensor) -> Tensor:
    """The entry of each row of x [T, V] at `place`; 0 if the place is -1."""
    return torch.where(place < 0, 0, x.gather(1, place.clamp(min=0).unsqueeze(1)).squeeze(1))


def combine(parts: Tensor, scale: Scale, entropy: bool) -> Tensor:
    """The statistics [K, T] over all columns, from the statistics [n, K, T] of n parts of the columns."""
    top = parts[:, TOP].amax(0)
    stats = rescaled(parts, top, scale, entropy).sum(0)
    stats[TOP] = top
    return stats


def rescaled(parts: Tensor, top: Tensor, scale: Scale, entropy: bool) -> Tensor:
    """The statistics `parts` [..., K, T], rescaled from each part's own largest entry to the overall `top` [T]."""
    # Clamping loses nothing: such powers vanish in the sum anyway, and -inf becomes zero.
    bits = ((parts[..., TOP, :] - _finite(top)) * scale).clamp_(min=_NOTHING)
    weight = torch.exp2(bits)
    result = parts.clone()
    # In place by name: an augmented assignment would copy each part onto itself.
    result[..., SUM, :].mul_(weight)
    if entropy:
        result[..., BITS, :].mul_(weight).add_(result[..., SUM, :] * bits)
    return result


def _finite(top: Tensor) -> Tensor:
    return top.clamp(min=torch.finfo(top.dtype).min)


@functools.cache
def _exp_is_slow(cpus: str = "/proc/cpuinfo") -> bool:
    """Whether exp takes longer on this CPU than a product and exp2.

    torch takes exp from Intel's MKL, if it has that, and exp2 never. On an Intel CPU that exp takes two thirds of the
    time of exp2. On an AMD EPYC, where MKL runs other code, it takes three times as long.
    """
    if not torch.backends.mkl.is_available():
        return False
    try:
        with open(cpus, encoding="utf-8") as lines:  # no further than the first of maybe hundreds of CPUs
            vendor = next((line for line in lines if line.startswith("vendor_id")), "")
    except OSError:  # not Linux
        return False
    return "AuthenticAMD" in vendor


def _exp(distance: Tensor, scale: Scale) -> Tensor:
    """exp2(distance * scale), in place."""
    if distance.device.type == "cpu" and _exp_is_slow():
        return distance.mul_(scale).exp2_()
    nats = scale / LOG2E
    return (distance if isinstance(nats, float) and nats == 1 else distance.mul_(nats)).exp_()


def of_rows(scale: Scale, chunk: slice) -> Scale:
    return scale[chunk] if isinstance(scale, Tensor) else scale


def slices(tokens: int, rows: int, ignored: Tensor | None) -> Iterator[tuple[slice, bool]]:
    """Slices of the rows, and whether a slice is ignored as a whole. Off the CPU always False, to avoid a wait."""
    for start, skip in zip(range(0, tokens, rows), _skipped(ignored, rows)):
        yield slice(start, min(tokens, start + rows)), skip


def _skipped(ignored: Tensor | None, rows: int) -> Iterable[bool]:
    if ignored is None or ignored.device.type != "cpu":
        return itertools.repeat(False)
    return [bool(part.all()) for part in ignored.split(rows)]


def as_columns(of_rows: Any) -> Any:
    """[T] as [T, 1]; numbers and None as they are."""
    return of_rows.unsqueeze(1) if isinstance(of_rows, Tensor) else of_rows


def _split(of_rows: Any, rows: int, dim: int = 0) -> Iterable[Any]:
    """Chunks of a tensor with T entries along `dim`. Numbers and None repeat for every chunk."""
    if not isinstance(of_rows, Tensor):
        return itertools.repeat(of_rows)
    return of_rows.split(rows, dim) if rows < of_rows.shape[dim] else (of_rows,)


def _first(scratch: Tensor, like: Tensor) -> Tensor:
    rows = like.shape[0]
    return scratch if scratch.shape[1] == rows else scratch[:, :rows]


def _clear_rows(out: Tensor, ignored: Tensor) -> None:
    if out.device.type == "cpu":
        out.index_fill_(0, ignored.nonzero().view(-1), 0)  # touches only these rows; 80 times as fast as a mask
    else:
        out.masked_fill_(ignored.unsqueeze(1), 0)
