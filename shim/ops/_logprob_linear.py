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
from shim.ops._logprob_chunks import LOG2E, TARGET, RowGradient, Scale
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

    def logits(self, hidden: Tensor, weight: Tensor, columns: slice) -> Tensor:
        """[n, columns], valid until the next call."""
        out = self._product[: hidden.size(0) * weight.size(0)].view(hidden.size(0), weight.size(0))
        if self._bias is None:
            return torch.mm(hidden, weight.t(), out=out)
        return torch.addmm(self._bias[columns].to(out.dtype), hidden, weight.t(), out=out)

    def statistics(self, x: Tensor, place: Tensor, scale: Scale, of_tile: Tensor, entropy: bool, total: bool) -> None:
        """Write the statistics of logits x [n, columns] into `of_tile` [K, n], maybe over x. scale: a number or [n]."""
        if self.passes is not chunks:
            of_tile.copy_(self.passes.statistics(x, place, scale, entropy=entropy, total=total, ignored=None))
            return
        of_tile[TARGET] = chunks.pick(x, place).to(self.dtype)
        scratch = (*([x] if x.dtype == self.dtype else ()), *self._buffers_like(x))
        chunks.tile_statistics(x, chunks.as_columns(scale), of_tile, scratch, entropy, total)

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


class LinearTokenLogprobs(torch.autograd.Function):
    """apply(hidden, weight, bias or None, target, temperature [...] or None, sum_hidden_grad, options).

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
        for tokens, skip in chunks.slices(h.size(0), tiles.rows, ignored):
            if skip:
                continue
            of_tile = _rows_of(h, tokens, ignored, tiles.multiplies_in)
            scale_here = chunks.of_rows(scale, tokens)
            parts = stats.new_empty(len(over_columns), stats.size(0), of_tile.size(0))
            for part, columns in zip(parts, over_columns):
                x = tiles.logits(of_tile, tiles.weight(columns), columns)
                place = places(aim[tokens], None, own + columns.start, x.size(1))
                tiles.statistics(x, place, scale_here, part, entropy, total)
            stats[:, tokens] = chunks.combine(parts, scale_here, entropy)
        stats = exchanged(stats, scale, options)
        (logprob, of_entropy, logsumexp), learned = results(stats, ignored, temperature, weight.size(0), options)
        ctx.options, ctx.sum_hidden_grad = options, sum_hidden_grad
        ctx.save_for_backward(hidden, weight, bias, target, per_token, *learned)
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
        hidden, weight, bias, target, per_token, *learned = ctx.saved_tensors
        h, aim = hidden.detach().reshape(-1, hidden.size(-1)), target.reshape(-1)
        ignored = ignored_rows(aim, options.ignore_index)
        temperature = options.temperature if per_token is None else per_token.reshape(-1)
        scale = LOG2E / temperature
        grads = [None if value is None else value.reshape(-1) for value in of_results]
        row = row_gradient(Learned(*learned), grads, ignored, temperature, weight.size(0), options)
        tiles = _Tiles(h, weight, bias, row.slope is not None, options)
        own = options.rank * weight.size(0)
        wants_hidden, wants_weight, wants_bias = ctx.needs_input_grad[:3]
        of_hidden = torch.zeros_like(h, dtype=tiles.dtype) if wants_hidden else None
        of_weight = torch.empty_like(weight) if wants_weight else None
        of_bias = torch.zeros_like(weight[:, 0], dtype=tiles.dtype) if wants_bias else None
        # Products in the dtype of the weight can be written where they belong, if one tile has all tokens.
        direct = h.dtype == tiles.dtype or (tiles.rows == h.size(0) and tiles.multiplies_in == h.dtype)
        sums = None if direct else weight.new_empty((tiles.columns, weight.size(1)), dtype=tiles.dtype)
        for columns in tiles.over_columns():
            weight_here = tiles.weight(columns)
            part = None if of_weight is None else of_weight[columns]
            if part is not None and sums is not None:
                part = sums[: part.size(0)]
            begun = False
            for tokens, skip in chunks.slices(h.size(0), tiles.rows, ignored):
                if skip:
                    continue
                of_tile = _rows_of(h, tokens, ignored, tiles.multiplies_in)
                x = tiles.logits(of_tile, weight_here, columns)
                here = RowGradient(*(None if value is None else value[tokens] for value in row))  # type: ignore[arg-type]
                place = places(aim[tokens], None, own + columns.start, x.size(1))
                tiles.gradient(x, place, chunks.of_rows(scale, tokens), here)
                if part is not None:
                    _add_product(part, x.t(), of_tile, begun)
                    begun = True
                if of_hidden is not None:
                    _add_product(of_hidden[tokens], x, weight_here, True)
                if of_bias is not None:
                    of_bias[columns] += x.sum(0, dtype=tiles.dtype)
            if part is not None and not begun:
                part.zero_()
            if of_weight is not None and part is not None and sums is not None:
                of_weight[columns] = part
        if of_hidden is not None:
            if options.ranks > 1 and ctx.sum_hidden_grad:
                dist.all_reduce(of_hidden, group=options.group)
            of_hidden = of_hidden.to(hidden.dtype).view(hidden.shape)
        of_bias = None if of_bias is None else of_bias.to(weight.dtype)
        return (of_hidden, of_weight, of_bias, None, None, None, None), (hidden, weight, bias)


def _add_product(to: Tensor, left: Tensor, right: Tensor, begun: bool) -> None:
    """to += left @ right, or to = left @ right before the first sum. `to` may have a higher precision."""
    if to.dtype != left.dtype:
        product = left @ right
        to.add_(product) if begun else to.copy_(product)
    elif begun:
        to.addmm_(left, right)
    else:
        torch.mm(left, right, out=to)
