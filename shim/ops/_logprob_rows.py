"""Shared by both forms of the log-probabilities: options, the one exchange between ranks, and the formulas."""

from __future__ import annotations

import functools
import importlib
import math
import os
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from shim.ops import _logprob_chunks as chunks
from shim.ops._checks import require
from shim.ops._logprob_chunks import BITS, LOG2E, SUM, TARGET, TOP, TOTAL, RowGradient, Scale

__all__ = [
    "Learned",
    "Options",
    "checked_options",
    "differentiable_once",
    "exchanged",
    "ignored_rows",
    "passes_for",
    "places",
    "results",
    "row_gradient",
]

_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


@functools.cache
def _kernels() -> ModuleType | None:
    try:
        return importlib.import_module("shim.ops._logprob_triton")
    except ImportError:
        return None


def passes_for(x: Tensor) -> ModuleType:
    """The module whose `statistics` and `gradient` handle logits like x, in its dtype and on its device."""
    if x.dtype != torch.float64 and (x.is_cuda or os.environ.get("TRITON_INTERPRET") == "1"):
        return _kernels() or chunks
    return chunks


class Options(NamedTuple):
    """The non-tensor arguments of the autograd functions, made by `checked_options`."""

    group: Any
    ranks: int
    rank: int
    temperature: float
    entropy: bool | str
    smoothing: float
    ignore_index: int | None
    scratch_bytes: int | None
    chunk_size: int | None
    inplace: bool | str


def checked_options(
    columns: int,
    values: Tensor,
    target: Tensor,
    group: Any,
    temperature: float | Tensor,
    entropy: bool | str,
    label_smoothing: float,
    ignore_index: int | None,
    scratch_bytes: int | None,
    chunk_size: int | None,
    inplace: bool | str = False,
) -> tuple[Options, Tensor | None]:
    """The options, and the temperature per token (None if it is a number). ValueError for bad arguments.

    columns: this rank's share of the vocabulary. values: the tensor whose leading dimensions are the tokens.
    """
    if values.dtype not in _DTYPES:
        raise ValueError(f"logits are {values.dtype}; they must be one of {', '.join(map(str, _DTYPES))}")
    if target.shape != values.shape[:-1]:
        raise ValueError(f"target has the shape {list(target.shape)}, not {list(values.shape[:-1])}")
    # A comparison with narrower integers would wrap around.
    if target.dtype not in (torch.int64, torch.int32):
        raise ValueError(f"target is {target.dtype}; it must be torch.int64 or torch.int32")
    if target.device != values.device:
        raise ValueError(f"target is on {target.device}, the logits on {values.device}")
    if columns == 0:
        raise ValueError("the vocabulary has no entries")
    if entropy not in (False, True, "no_grad"):
        raise ValueError(f"entropy is {entropy!r}; it must be False, True or 'no_grad'")
    if inplace not in (False, True, "unread"):
        raise ValueError(f"inplace_backward is {inplace!r}; it must be False, True or 'unread'")
    for name, value in (("scratch_bytes", scratch_bytes), ("chunk_size", chunk_size)):
        if value is not None and value < 1:
            raise ValueError(f"{name} is {value}; it must be positive")
    ranks, rank = (1, 0) if group is None else _place_in(group)
    vocabulary = columns * ranks
    if not 0 <= label_smoothing < 1:
        raise ValueError(f"label_smoothing is {label_smoothing}; it must be in [0, 1)")
    if label_smoothing and vocabulary == 1:
        raise ValueError("label_smoothing needs a vocabulary of two")
    per_token = None
    if isinstance(temperature, Tensor):
        if temperature.requires_grad:
            raise ValueError("temperature gets no gradient: detach it")
        dtype = chunks.accumulates_in(values.dtype)
        per_token = temperature.to(values.device, dtype, non_blocking=True).expand(target.shape)
        require(((per_token > 0) & (per_token < math.inf)).all(), "temperature must be positive and finite")
        temperature = 1.0
    elif not 0 < temperature < math.inf:
        raise ValueError(f"temperature is {temperature}; it must be positive and finite")
    inside = target == target.clamp(0, vocabulary - 1)
    if ignore_index is not None:
        inside |= target == ignore_index
    where = f"of {vocabulary} on {ranks} rank{'s' * (ranks > 1)}"
    hint = "" if ranks > 1 else "; is tp_group missing?"
    require(inside.all(), f"a target is outside of the vocabulary {where} (and not {ignore_index}){hint}")
    options = Options(
        group,
        ranks,
        rank,
        float(temperature),
        entropy,
        float(label_smoothing),
        ignore_index,
        scratch_bytes,
        chunk_size,
        inplace,
    )
    return options, per_token


def _place_in(group: Any) -> tuple[int, int]:
    """(ranks, rank) of any object that has size() and rank().

    torch.distributed would need a default group even if no message is sent.
    """
    if not (hasattr(group, "size") and hasattr(group, "rank")):  # such as torch's object for a non-member
        raise ValueError(f"tp_group is {group!r}; it must have rank() and size(), and this process must be a member")
    ranks, rank = group.size(), group.rank()
    if not 0 <= rank < ranks:
        raise ValueError(f"tp_group has no place for this process: it is rank {rank} of {ranks}")
    return ranks, rank


class Learned(NamedTuple):
    """The numbers per row that backward needs, each [T]. entropy: None if it gets no gradient."""

    top: Tensor
    total: Tensor
    entropy: Tensor | None


def exchanged(stats: Tensor, scale: Scale, options: Options) -> Tensor:
    """The statistics [K, T] over all ranks from those of this one. The only exchange between ranks in forward."""
    if options.ranks == 1:
        return stats
    parts = stats.new_empty(options.ranks * stats.size(0), stats.size(1))
    dist.all_gather_into_tensor(parts, stats, group=options.group)
    return chunks.combine(parts.view(options.ranks, *stats.shape), scale, bool(options.entropy))


def results(
    stats: Tensor, ignored: Tensor | None, temperature: float | Tensor, columns: int, options: Options
) -> tuple[tuple[Tensor, Tensor | None, Tensor], Learned]:
    """(logprob, entropy, logsumexp), each [T], from the statistics over all ranks, and the numbers for backward."""
    top, total = stats[TOP], stats[SUM]
    log_total = total.log()
    # Both terms are relative to the largest entry, which keeps the digits of large logits.
    logprob = _over(stats[TARGET] - top, temperature) - log_total
    if options.smoothing:
        vocabulary = columns * options.ranks
        a = options.smoothing * vocabulary / (vocabulary - 1)
        logprob = (1 - a) * logprob + a * (_over(stats[TOTAL] / vocabulary - top, temperature) - log_total)
    entropy = log_total - stats[BITS] / total / LOG2E if options.entropy else None
    logsumexp = _over(top, temperature) + log_total
    if ignored is not None:
        for result in (logprob, entropy, logsumexp):  # all of them new
            if result is not None:
                result.masked_fill_(ignored, 0)
    learned = Learned(top.clone(), total.clone(), entropy if options.entropy is True else None)
    return (logprob, entropy, logsumexp), learned


def _over(value: Tensor, temperature: float | Tensor) -> Tensor:
    """value / temperature, without an operation for a temperature of one."""
    return value if isinstance(temperature, float) and temperature == 1.0 else value / temperature


def row_gradient(
    learned: Learned,
    of_results: Sequence[Tensor | None],
    ignored: Tensor | None,
    temperature: float | Tensor,
    columns: int,
    options: Options,
) -> RowGradient:
    """The parts of each row's gradient, from the gradients of logprob, entropy and logsumexp, [T] each (None: zero)."""
    top, total, entropy = learned
    of_logprob, of_entropy, of_logsumexp = of_results
    slope = everywhere = at_target = by_p = None
    if of_logprob is not None:
        at_target = of_logprob = _over(of_logprob, temperature)
        by_p = -of_logprob
        if options.smoothing:
            vocabulary = columns * options.ranks
            a = options.smoothing * vocabulary / (vocabulary - 1)
            at_target, everywhere = (1 - a) * of_logprob, of_logprob * (a / vocabulary)
    by_p = torch.zeros_like(top) if by_p is None else by_p
    if of_logsumexp is not None:
        by_p = by_p + _over(of_logsumexp, temperature)
    if of_entropy is not None and entropy is not None:
        of_entropy = _over(of_entropy, temperature)
        by_p = by_p - of_entropy * (entropy - total.log())
        slope = -of_entropy / LOG2E / total
    factor = by_p / total
    at_target = torch.zeros_like(top) if at_target is None else at_target
    if ignored is not None:
        factor.masked_fill_(ignored, 0)
        at_target = at_target.masked_fill(ignored, 0)  # may be what autograd gave
        slope = None if slope is None else slope.masked_fill_(ignored, 0)
        everywhere = None if everywhere is None else everywhere.masked_fill_(ignored, 0)
    return RowGradient(top, factor, slope, everywhere, at_target)


def places(target: Tensor, ignored: Tensor | None, start: int, columns: int) -> Tensor:
    """[T]: the target's column among the `columns` from `start` on, -1 for none."""
    place = target.to(torch.int64) - start
    outside = place != place.clamp(0, columns - 1)
    if ignored is not None:
        outside |= ignored
    return place.masked_fill_(outside, -1)


def ignored_rows(target: Tensor, ignore_index: int | None) -> Tensor | None:
    if ignore_index is None:
        return None
    ignored = target == ignore_index
    # On CPU the host may look: a call without ignored tokens skips the masks.
    return ignored if ignored.device.type != "cpu" or bool(ignored.any()) else None


class _Once(torch.autograd.Function):
    """apply(gradient, its inputs ...) -> the gradient. A second derivative through it is an error."""

    @staticmethod
    def forward(ctx: Any, gradient: Tensor, *_: Tensor | None) -> Tensor:
        return gradient.view_as(gradient)

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> Any:
        raise RuntimeError("the log-probabilities of tokens can be differentiated once, not twice")


_Gradients = tuple[Tensor | None, ...]


def differentiable_once(backward: Callable[..., tuple[_Gradients, Sequence[Tensor]]]) -> Callable[..., _Gradients]:
    """Make second derivatives an error. `backward` returns the gradients and the inputs that they depend on.

    torch's once_differentiable treats the gradient as a constant if the incoming gradient does not require one. A
    gradient penalty would then lack a term.
    """

    @functools.wraps(backward)
    def wrapper(ctx: Any, *of_results: Tensor | None) -> _Gradients:
        with torch.no_grad():
            gradients, inputs = backward(ctx, *of_results)
        if not torch.is_grad_enabled():
            return gradients
        return tuple(None if value is None else _Once.apply(value, *inputs, *of_results) for value in gradients)

    return wrapper
