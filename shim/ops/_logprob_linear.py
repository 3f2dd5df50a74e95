"""The linear form: logits as tiles (tokens times vocabulary columns), computed in both passes and never kept.

Tiles also split the vocabulary, because the gradient of the weight is as large as the weight. With the columns in the
outer loop, each part of that gradient is finished before the next part begins.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from shim.ops import _logprob_chunks as chunks
from shim.ops._logprob_chunks import LOG2E, TARGET, TOP, RowGradient, Scale
from shim.ops._logprob_products import Largest, LowRank, WeightGradient, add_product
from shim.ops._logprob_rows import (
    Learned,
    Options,
    differentiable_once,
    exchanged,
    ignored_rows,
    passes_for,
    places,
    results,
    row_gradient,
)

__all__ = ["LinearTokenLogprobs"]

_COLUMNS = 4096
_SCRATCH_CPU, _SCRATCH_DEVICE = 16 << 20, 256 << 20


@functools.cache
def _multiplies(dtype: torch.dtype) -> bool:
    """Whether this CPU multiplies matrices of a dtype by more than a plain loop, which is 4 to 60 times as slow."""
    if dtype not in (torch.bfloat16, torch.float16):
        return True
    supported = getattr(torch.ops.mkldnn, f"_is_mkldnn_{'bf16' if dtype == torch.bfloat16 else 'fp16'}_supported", None)
    return supported is not None and bool(supported())


class _Tiles:
    """The tiles of ``hidden @ weight.T + bias`` for hidden [T, H], and the scratch they are computed in.

    `multiplies_in` is the dtype of the products, and so of the logits. `dtype` is that of statistics and sums.
    """

    def __init__(self, hidden: Tensor, weight: Tensor, bias: Tensor | None, entropy: bool, options: Options) -> None:
        self._weight, self._bias = weight, bias
        self.dtype = chunks.accumulates_in(hidden.dtype)
        slow = hidden.device.type == "cpu" and not _multiplies(hidden.dtype)
        self.multiplies_in = self.dtype if slow else hidden.dtype
        self.passes = passes_for(hidden)
        # Kernels need no scratch. Full-precision logits serve as their own scratch.
        self._buffers = 0 if self.passes is not chunks else entropy + (self.multiplies_in != self.dtype)
        self.columns = min(_COLUMNS, weight.size(0))
        scratch_bytes = options.scratch_bytes
        if scratch_bytes is None:
            scratch_bytes = _SCRATCH_CPU if hidden.device.type == "cpu" else _SCRATCH_DEVICE
        row_bytes = self.columns * (self._buffers * self.dtype.itemsize + self.multiplies_in.itemsize)
        rows = chunks.rows_at_once(hidden.device, row_bytes, scratch_bytes, options.chunk_size)
        self.rows = max(1, min(rows, hidden.size(0)))
        self._product = hidden.new_empty(self.rows * self.columns, dtype=self.multiplies_in)
        self._scratch = hidden.new_empty(self._buffers * self.rows * self.columns, dtype=self.dtype)
        self._widened = hidden.new_empty((self.columns, hidden.size(1)), dtype=self.dtype) if slow else None

    def over_columns(self) -> Iterator[slice]:
        for start in range(0, self._weight.size(0), self.columns):
            yield slice(start, min(self._weight.size(0), start + self.columns))

    def weight(self, columns: slice) -> Tensor:
        """[columns, H] for products, valid until the next call."""
        weight = self._weight[columns]
        return weight if self._widened is None else self._widened[: weight.size(0)].copy_(weight)

    def logits(self, hidden: Tensor, weight: Tensor, columns: slice, low_rank: LowRank | None = None) -> Tensor:
        """[n, columns], valid until the next call. low_rank: of the same tokens and columns."""
        out = self._product[: hidden.size(0) * weight.size(0)].view(hidden.size(0), weight.size(0))
        if self._bias is None:
            torch.mm(hidden, weight.t(), out=out)
        else:
            torch.addmm(self._bias[columns].to(out.dtype), hidden, weight.t(), out=out)
        return out if low_rank is None else out.addmm_(low_rank.hidden, low_rank.weight.t())

    def part_of(
        self, low_rank: LowRank | None, tokens: slice, columns: slice, ignored: Tensor | None
    ) -> LowRank | None:
        """Some rows [n, r] and some columns [c, r] of a second product."""
        if low_rank is None:
            return None
        hidden = _rows_of(low_rank.hidden, tokens, ignored, self.multiplies_in)
        return LowRank(hidden, low_rank.weight[columns].to(self.multiplies_in))

    def statistics(
        self,
        x: Tensor,
        place: Tensor,
        scale: Scale,
        of_tile: Tensor,
        entropy: bool,
        total: bool,
        column: Tensor | None = None,
    ) -> None:
        """Write the statistics of logits x [n, columns] into `of_tile` [K, n], maybe over x. scale: a number or [n]."""
        if self.passes is not chunks:
            how = {"entropy": entropy, "total": total, "ignored": None, "column": column}
            of_tile.copy_(self.passes.statistics(x, place, scale, **how))
            return
        of_tile[TARGET] = chunks.pick(x, place).to(self.dtype)
        scratch = (*([x] if x.dtype == self.dtype else ()), *self._buffers_like(x))
        chunks.tile_statistics(x, chunks.as_columns(scale), of_tile, scratch, entropy, total, column)

    def gradient(self, x: Tensor, place: Tensor, scale: Scale, row: RowGradient) -> None:
        """Write the gradient of logits x [n, columns] over them. scale: a number or [n]."""
        if self.passes is not chunks:
            self.passes.gradient(x, x, place, scale, row, ignored=None)
        else:
            chunks.tile_gradient(x, x, place, chunks.as_columns(scale), row, self._buffers_like(x))

    def _buffers_like(self, x: Tensor) -> Tensor:
        return self._scratch[: self._buffers * x.numel()].view(self._buffers, *x.shape)


def _rows_of(hidden: Tensor, tokens: slice, ignored: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Rows of `hidden`, with zeros in ignored ones, because zero times NaN would reach the gradient of the weight."""
    rows = hidden[tokens].to(dtype)
    return rows if ignored is None else rows.masked_fill(ignored[tokens].unsqueeze(1), 0)


def _without(ignored: Tensor | None, of_rows: Tensor) -> Tensor:
    """[T], with zeros in ignored rows."""
    return of_rows if ignored is None else of_rows.masked_fill(ignored, 0)


def _low_rank_of(hidden: Tensor | None, weight: Tensor | None) -> LowRank | None:
    """With hidden as [T, r]."""
    if hidden is None or weight is None:
        return None
    return LowRank(hidden.detach().reshape(-1, hidden.size(-1)), weight)


class LinearTokenLogprobs(torch.autograd.Function):
    """apply(hidden, weight, bias or None, target, temperature [...] or None, sum_hidden_grad, options, weight_grad or
    None, the fields of a LowRank, and a Largest or None).

    Returns logprob, entropy or None, logsumexp.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        target: Tensor,
        per_token: Tensor | None,
        sum_hidden_grad: bool,
        options: Options,
        weight_grad: Tensor | None = None,
        other_hidden: Tensor | None = None,
        other_weight: Tensor | None = None,
        other_grad: Tensor | None = None,
        sum_other_grad: bool = False,
        largest: Largest | None = None,
    ) -> tuple[Tensor, Tensor | None, Tensor]:
        h, aim = hidden.reshape(-1, hidden.size(-1)), target.reshape(-1)
        ignored = ignored_rows(aim, options.ignore_index)
        temperature = options.temperature if per_token is None else per_token.reshape(-1)
        scale = LOG2E / temperature
        entropy, total = bool(options.entropy), options.smoothing > 0
        tiles = _Tiles(h, weight, bias, entropy, options)
        stats = h.new_zeros((3 + entropy + total, h.size(0)), dtype=tiles.dtype)
        own = options.rank * weight.size(0)
        over_columns = list(tiles.over_columns())
        low_rank = _low_rank_of(other_hidden, other_weight)
        top_column = None if largest is None else torch.zeros_like(aim, dtype=torch.int64)
        for tokens, skip in chunks.slices(h.size(0), tiles.rows, ignored):
            if skip:
                continue
            of_tile = _rows_of(h, tokens, ignored, tiles.multiplies_in)
            scale_here = chunks.of_rows(scale, tokens)
            parts = stats.new_empty(len(over_columns), stats.size(0), of_tile.size(0))
            top_columns = None if top_column is None else top_column.new_empty(len(over_columns), of_tile.size(0))
            for tile, columns in enumerate(over_columns):
                other = tiles.part_of(low_rank, tokens, columns, ignored)
                x = tiles.logits(of_tile, tiles.weight(columns), columns, other)
                place = places(aim[tokens], None, own + columns.start, x.size(1))
                column = None if top_columns is None else top_columns[tile]
                tiles.statistics(x, place, scale_here, parts[tile], entropy, total, column)
            stats[:, tokens] = chunks.combine(parts, scale_here, entropy)
            if top_column is not None and top_columns is not None:
                tile_of_top = parts[:, TOP].argmax(0, keepdim=True)
                top_column[tokens] = top_columns.gather(0, tile_of_top).add_(tile_of_top, alpha=tiles.columns)[0]
        if largest is not None and top_column is not None:
            largest.value.copy_(_without(ignored, stats[TOP]).view(target.shape))
            largest.column.copy_(_without(ignored, top_column).view(target.shape))
        stats = exchanged(stats, scale, options)
        (logprob, of_entropy, logsumexp), learned = results(stats, ignored, temperature, weight.size(0), options)
        ctx.options, ctx.sum_hidden_grad, ctx.sum_other_grad = options, sum_hidden_grad, sum_other_grad
        ctx.save_for_backward(hidden, weight, bias, target, per_token, other_hidden, other_weight, *learned)
        ctx.weight_grad, ctx.other_grad = weight_grad, other_grad  # not saved, because several calls add to them
        ctx.set_materialize_grads(False)
        if of_entropy is not None:
            of_entropy = of_entropy.view(target.shape)
            if options.entropy == "no_grad":
                ctx.mark_non_differentiable(of_entropy)
        return logprob.view(target.shape), of_entropy, logsumexp.view(target.shape)

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, *of_results: Tensor | None) -> Any:
        options: Options = ctx.options
        hidden, weight, bias, target, per_token, other_hidden, other_weight, *learned = ctx.saved_tensors
        h, aim = hidden.detach().reshape(-1, hidden.size(-1)), target.reshape(-1)
        ignored = ignored_rows(aim, options.ignore_index)
        temperature = options.temperature if per_token is None else per_token.reshape(-1)
        scale = LOG2E / temperature
        grads = [None if value is None else value.reshape(-1) for value in of_results]
        row = row_gradient(Learned(*learned), grads, ignored, temperature, weight.size(0), options)
        tiles = _Tiles(h, weight, bias, row.slope is not None, options)
        own = options.rank * weight.size(0)
        low_rank = _low_rank_of(other_hidden, other_weight)
        wants_hidden, wants_weight, wants_bias = ctx.needs_input_grad[:3]
        wants_other_hidden, wants_other_weight = ctx.needs_input_grad[8:10]
        # Products in the dtype of the weight can be written to their place, if one tile has all tokens.
        direct = h.dtype == tiles.dtype or (tiles.rows == h.size(0) and tiles.multiplies_in == h.dtype)
        how = tiles.columns, tiles.dtype, direct
        of_hidden = torch.zeros_like(h, dtype=tiles.dtype) if wants_hidden else None
        of_weight = WeightGradient(weight, ctx.weight_grad, *how) if wants_weight else None
        of_bias = torch.zeros_like(weight[:, 0], dtype=tiles.dtype) if wants_bias else None
        of_other_hidden = of_other_weight = None
        if low_rank is not None and wants_other_hidden:
            of_other_hidden = torch.zeros_like(low_rank.hidden, dtype=tiles.dtype)
        if low_rank is not None and wants_other_weight:
            of_other_weight = WeightGradient(low_rank.weight, ctx.other_grad, *how)
        of_weights = [each for each in (of_weight, of_other_weight) if each is not None]
        for columns in tiles.over_columns():
            weight_here = tiles.weight(columns)
            for each in of_weights:
                each.begin(columns)
            for tokens, skip in chunks.slices(h.size(0), tiles.rows, ignored):
                if skip:
                    continue
                of_tile = _rows_of(h, tokens, ignored, tiles.multiplies_in)
                other = tiles.part_of(low_rank, tokens, columns, ignored)
                x = tiles.logits(of_tile, weight_here, columns, other)
                here = RowGradient(*(None if value is None else value[tokens] for value in row))  # type: ignore[arg-type]
                place = places(aim[tokens], None, own + columns.start, x.size(1))
                tiles.gradient(x, place, chunks.of_rows(scale, tokens), here)
                if of_weight is not None:
                    of_weight.add(x, of_tile)
                if of_hidden is not None:
                    add_product(of_hidden[tokens], x, weight_here, True)
                if of_bias is not None:
                    of_bias[columns] += x.sum(0, dtype=tiles.dtype)
                if other is not None and of_other_weight is not None:
                    of_other_weight.add(x, other.hidden)
                if other is not None and of_other_hidden is not None:
                    add_product(of_other_hidden[tokens], x, other.weight, True)
            for each in of_weights:
                each.end()
        if of_hidden is not None:
            if options.ranks > 1 and ctx.sum_hidden_grad:
                dist.all_reduce(of_hidden, group=options.group)
            of_hidden = of_hidden.to(hidden.dtype).view(hidden.shape)
        if of_other_hidden is not None:
            if options.ranks > 1 and ctx.sum_other_grad:
                dist.all_reduce(of_other_hidden, group=options.group)
            of_other_hidden = of_other_hidden.to(other_hidden.dtype).view(other_hidden.shape)
        of_bias = None if of_bias is None else of_bias.to(weight.dtype)
        of_both = [None if each is None else each.result for each in (of_weight, of_other_weight)]
        of_inputs = (
            of_hidden,
            of_both[0],
            of_bias,
            None,
            None,
            None,
            None,
            None,
            of_other_hidden,
            of_both[1],
            None,
            None,
            None,
        )
        return of_inputs, (hidden, weight, bias, other_hidden, other_weight)
