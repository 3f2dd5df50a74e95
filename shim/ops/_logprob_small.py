"""Losses of tokens with few logits, on one rank: a dozen operations for both passes.

For few logits, calls cost more than arithmetic. So this form omits the exchange between ranks and the options of the
general form. As in the general form, the logits are saved by reference and backward computes the softmax again.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from shim.ops import _logprob_chunks as chunks
from shim.ops._logprob_chunks import LOG2E, SUM, TARGET, TOP, TOTAL, RowGradient
from shim.ops._logprob_rows import differentiable_once

__all__ = ["is_small", "small_token_losses"]


def is_small(logits: Tensor, target: Tensor) -> bool:
    """Whether `small_token_losses` takes these arguments. False for arguments that token_logprobs refuses."""
    limit = chunks._SCRATCH_CPU
    if logits.dtype == chunks.accumulates_in(logits.dtype):
        limit //= 2  # beyond this size the general form is faster: it can write the gradient over the logits
    return (
        0 < _bytes(logits) <= limit
        and logits.is_floating_point()
        and logits.dim() > 0
        and logits.shape[:-1] == target.shape
        and target.dtype == torch.int64
        and target.device == logits.device
    )


def small_token_losses(logits: Tensor, target: Tensor, label_smoothing: float = 0.0) -> Tensor:
    """The loss of each token, [...] in fp32 (fp64 for fp64 logits), from logits [..., V] and targets int64 [...].

    Negative targets have a loss of 0 and a gradient of exactly 0, whatever their logits are. Smoothing is that of
    token_logprobs. ValueError for a target beyond the vocabulary; a device-side assertion on CUDA.
    """
    try:
        # One softmax needs the fewest operations, but copies half-precision logits and so overflows the cache sooner.
        direct = logits.dtype == chunks.accumulates_in(logits.dtype)
        function = _SmallTokenLosses if direct or _bytes(logits) <= chunks._SCRATCH_CORE else _ChunkedTokenLosses
        loss: Tensor = function.apply(logits, target, label_smoothing)
    except (IndexError, RuntimeError) as error:  # gather checks its indices anyway
        vocabulary = logits.shape[-1]
        if target.device.type == "cpu" and bool((target >= vocabulary).any()):
            message = f"a target is outside of the vocabulary of {vocabulary}; is tp_group missing?"
            raise ValueError(message) from error
        raise
    return loss


def _bytes(logits: Tensor) -> int:
    return logits.numel() * chunks.accumulates_in(logits.dtype).itemsize


def _weights(smoothing: float, vocabulary: int) -> tuple[float, float]:
    """The weights of the target's log-probability and of each entry's, in the negative loss."""
    a = smoothing * vocabulary / (vocabulary - 1) if smoothing else 0.0
    return 1 - a, a / vocabulary


class _SmallTokenLosses(torch.autograd.Function):
    """apply(logits, target, smoothing) -> the loss of each token."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, target: Tensor, smoothing: float) -> Tensor:
        vocabulary = logits.shape[-1]
        x, place = logits.reshape(-1, vocabulary), target.reshape(-1, 1)
        ignored: Tensor | None = place < 0
        # On CPU the host may look: a call without ignored tokens skips the masks.
        if ignored is not None and ignored.device.type == "cpu" and not ignored.any():
            ignored = None
        if ignored is not None:
            place = place.clamp(min=0)
        log_p = torch.log_softmax(x, -1, dtype=chunks.accumulates_in(x.dtype))
        of_target, of_each = _weights(smoothing, vocabulary)
        loss = log_p.gather(1, place)
        if smoothing:
            loss.mul_(of_target).add_(log_p.sum(-1, keepdim=True), alpha=of_each)
        loss.neg_()
        if ignored is not None:
            loss.masked_fill_(ignored, 0)
        ctx.save_for_backward(logits, place, ignored)
        ctx.smoothing = smoothing
        return loss.view(target.shape)

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, of_loss: Tensor) -> Any:
        logits, place, ignored = ctx.saved_tensors
        vocabulary = logits.shape[-1]
        x = logits.detach().reshape(-1, vocabulary)
        of_target, of_each = _weights(ctx.smoothing, vocabulary)
        # Serves as scratch; in fp32 it becomes the gradient.
        gradient = torch.softmax(x, -1, dtype=chunks.accumulates_in(x.dtype))
        if ctx.smoothing:
            gradient.sub_(of_each)
        # Not scatter_add_, which raises on CUDA if only deterministic algorithms are allowed.
        gradient.scatter_(1, place, gradient.gather(1, place).sub_(of_target))
        gradient.mul_(of_loss.reshape(-1, 1))
        if ignored is not None:
            gradient.masked_fill_(ignored, 0)
        return (gradient.to(logits.dtype).view(logits.shape), None, None), (logits,)


class _ChunkedTokenLosses(torch.autograd.Function):
    """The same in chunks of rows that stay in the cache."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, target: Tensor, smoothing: float) -> Tensor:
        vocabulary = logits.shape[-1]
        x, place = logits.reshape(-1, vocabulary), target.reshape(-1)
        ignored: Tensor | None = place < 0
        # On CPU the host may look: a call without ignored tokens skips the masks.
        if ignored is not None and ignored.device.type == "cpu" and not ignored.any():
            ignored = None
        if ignored is not None:
            place = place.clamp(min=0)
        stats = chunks.statistics(
            x,
            place,
            LOG2E,
            entropy=False,
            total=bool(smoothing),
            ignored=ignored,
            scratch_bytes=None,
            chunk_size=None,
        )
        top, total = stats[TOP], stats[SUM]
        log_total = total.log()
        loss = log_total - (stats[TARGET] - top)
        if smoothing:
            of_target, of_each = _weights(smoothing, vocabulary)
            mean = stats[TOTAL].div_(vocabulary).sub_(top).sub_(log_total)
            loss.mul_(of_target).sub_(mean, alpha=of_each * vocabulary)
        if ignored is not None:
            loss.masked_fill_(ignored, 0)
        ctx.save_for_backward(logits, place, ignored, top, total)
        ctx.smoothing = smoothing
        return loss.view(target.shape)

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, of_loss: Tensor) -> Any:
        logits, place, ignored, top, total = ctx.saved_tensors
        vocabulary = logits.shape[-1]
        x = logits.detach().reshape(-1, vocabulary)
        of_loss = of_loss.reshape(-1)
        if ignored is not None:
            of_loss = of_loss.masked_fill(ignored, 0)
        of_target, of_each = _weights(ctx.smoothing, vocabulary)
        row = RowGradient(
            top,
            of_loss / total,
            None,
            of_loss * -of_each if ctx.smoothing else None,
            of_loss * -of_target,
        )
        gradient = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        chunks.gradient(x, gradient, place, LOG2E, row, ignored=ignored, scratch_bytes=None, chunk_size=None)
        return (gradient.view(logits.shape), None, None), (logits,)
