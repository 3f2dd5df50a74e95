"""The linear form: logits as tiles (tokens times vocabulary columns), computed in both passes and never kept.

Tiles also split the vocabulary, because the gradient of the weight is as large as the weight. With the columns in the
outer loop, each part of that gradient is finished before the next part begins.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from shim.ops import _logprob_chunks as chunks
from shim.ops._logprob_chunks import LOG2E, TARGET, RowGradient
from shim.ops._logprob_rows import (
    Learned,
    Options,
    differentiable_once,
    exchanged,
    ignored_rows,
    places,
    results,
    row_gradient,
)

__all__ = ["LinearTokenLogprobs"]

_COLUMNS = 4096
_SCRATCH_CPU, _SCRATCH_DEVICE = 16 << 20, 256 << 20


class _Tiles:
    """The tiles of ``hidden @ weight.T + bias`` for hidden [T, H], and the scratch they are computed in."""

    def __init__(self, hidden: Tensor, weight: Tensor, bias: Tensor | None, buffers: int, options: Options) -> None:
        self.hidden, self.weight, self.bias = hidden, weight, bias
        self.dtype = chunks.accumulates_in(hidden.dtype)
        self.columns = min(_COLUMNS, weight.size(0))
        scratch_bytes = options.scratch_bytes
        if scratch_bytes is None:
            scratch_bytes = _SCRATCH_CPU if hidden.device.type == "cpu" else _SCRATCH_DEVICE
        low = hidden.dtype != self.dtype
        row_bytes = self.columns * ((buffers + low) * self.dtype.itemsize + low * hidden.dtype.itemsize)
        self.rows = chunks.rows_at_once(hidden.device, row_bytes, scratch_bytes, options.chunk_size)
        self.rows = min(self.rows, hidden.size(0))
        self._product = hidden.new_empty(self.rows * self.columns)
        self._scratch = hidden.new_empty((buffers + low) * self.rows * self.columns, dtype=self.dtype)
        self._buffers = buffers + low

    def over_columns(self) -> Iterator[slice]:
        for start in range(0, self.weight.size(0), self.columns):
            yield slice(start, min(self.weight.size(0), start + self.columns))

    def logits(self, hidden: Tensor, columns: slice) -> Tensor:
        """[n, columns], valid until the next call."""
        weight = self.weight[columns].t()
        out = self._product[: hidden.size(0) * weight.size(1)].view(hidden.size(0), weight.size(1))
        if self.bias is None:
            return torch.mm(hidden, weight, out=out)
        return torch.addmm(self.bias[columns], hidden, weight, out=out)

    def scratch(self, like: Tensor) -> Tensor:
        """[buffers, n, columns], with one more buffer for low-precision logits."""
        return self._scratch[: self._buffers * like.numel()].view(self._buffers, *like.shape)


def _without(hidden: Tensor, ignored: Tensor | None) -> Tensor:
    """`hidden` with zeros in ignored rows, because zero times NaN would reach the gradient of the weight."""
    return hidden if ignored is None else hidden.masked_fill(ignored.unsqueeze(1), 0)


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
        # Without an entropy, full-precision logits serve as their own scratch.
        tiles = _Tiles(h, weight, bias, int(entropy), options)
        stats = h.new_zeros((3 + entropy + total, h.size(0)), dtype=tiles.dtype)
        own = options.rank * weight.size(0)
        over_columns = list(tiles.over_columns())
        for tokens, skip in chunks.slices(h.size(0), max(tiles.rows, 1), ignored):
            if skip:
                continue
            of_tile = _without(h[tokens], None if ignored is None else ignored[tokens])
            parts = stats.new_empty(len(over_columns), stats.size(0), of_tile.size(0))
            for part, columns in zip(parts, over_columns):
                x = tiles.logits(of_tile, columns)
                place = places(aim[tokens], None, own + columns.start, x.size(1))
                part[TARGET] = chunks.pick(x, place).to(tiles.dtype)
                scratch = (*([x] if x.dtype == tiles.dtype else ()), *tiles.scratch(x))
                chunks.tile_statistics(x, chunks.of_rows(scale, tokens), part, scratch, entropy, total)
            stats[:, tokens] = chunks.combine(parts, scale if isinstance(scale, float) else scale[tokens], entropy)
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
        tiles = _Tiles(h, weight, bias, int(row.slope is not None), options)
        own = options.rank * weight.size(0)
        low = h.dtype != tiles.dtype
        wants_hidden, wants_weight, wants_bias = ctx.needs_input_grad[:3]
        of_hidden = torch.zeros_like(h, dtype=tiles.dtype) if wants_hidden else None
        of_weight = torch.empty_like(weight) if wants_weight else None
        of_bias = torch.zeros_like(weight[:, 0], dtype=tiles.dtype) if wants_bias else None
        several = tiles.rows < h.size(0)
        sums = weight.new_empty((tiles.columns, weight.size(1)), dtype=tiles.dtype) if low and several else None
        for columns in tiles.over_columns():
            part = None if of_weight is None else of_weight[columns]
            if part is not None and sums is not None:
                part = sums[: part.size(0)]
            begun = False
            for tokens, skip in chunks.slices(h.size(0), max(tiles.rows, 1), ignored):
                if skip:
                    continue
                of_tile = _without(h[tokens], None if ignored is None else ignored[tokens])
                x = tiles.logits(of_tile, columns)
                here = RowGradient(*(None if value is None else value[tokens] for value in row))  # type: ignore[arg-type]
                place = places(aim[tokens], None, own + columns.start, x.size(1))
                chunks.tile_gradient(x, x, place, chunks.of_rows(scale, tokens), here, tiles.scratch(x))
                if part is not None:
                    _add_product(part, x.t(), of_tile, begun)
                    begun = True
                if of_hidden is not None:
                    _add_product(of_hidden[tokens], x, weight[columns], True)
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
