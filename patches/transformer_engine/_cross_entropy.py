"""Transformer Engine's parallel_cross_entropy through shim.ops, for the patches that replace it."""

from __future__ import annotations

import functools
from typing import Any, Literal

from torch import Tensor

from shim import ops
from shim.patches._arguments import Function

__all__ = ["PARALLEL_CROSS_ENTROPY", "by_name", "cross_entropy"]

PARALLEL_CROSS_ENTROPY = "transformer_engine.pytorch.cross_entropy:parallel_cross_entropy"
NO_TARGET = -100


def cross_entropy(
    logits: Tensor,
    target: Tensor,
    label_smoothing: float = 0.0,
    reduce_loss: bool = False,
    group: Any = None,
    ignore_idx: int = NO_TARGET,
    *,
    mean_shape: tuple[int, ...],
    inplace: bool | Literal["unread"],
) -> Tensor:
    """The loss of each token, [b, s] in fp32, or their mean, from logits [b, s, V / TP] and as many targets.

    mean_shape: of the mean, as the release has it. inplace: as `inplace_backward` of token_logprobs, but leaves are no
    error.
    """
    target = target.reshape(logits.shape[:-1])
    without = (target < 0) | (target == ignore_idx)
    vocabulary = logits.size(-1) * (1 if group is None else group.size())
    found = ops.token_logprobs(
        logits,
        target.masked_fill(without, NO_TARGET),
        tp_group=group,
        label_smoothing=label_smoothing * (vocabulary - 1) / vocabulary,  # shim.ops spares the target
        ignore_index=NO_TARGET,
        inplace_backward=_is_computed(logits) if inplace is True else inplace,
    )
    losses = -found.logprob.float()
    return losses.sum() / (~without).sum().clamp(min=1).reshape(mean_shape) if reduce_loss else losses


def _is_computed(logits: Tensor) -> bool:
    memory = logits._base if logits._is_view() else logits
    return not (memory is not None and memory.is_leaf and memory.requires_grad)


def by_name(original: Function, *, mean_shape: tuple[int, ...], inplace: bool | Literal["unread"]) -> Function:
    """The replacement of a function that takes its arguments by name, as from 2.10 on."""

    @functools.wraps(original)
    def parallel_cross_entropy(
        inp: Tensor,
        target: Tensor,
        label_smoothing: float = 0.0,
        reduce_loss: bool = False,
        dist_process_group: Any = None,
        ignore_idx: int = NO_TARGET,
        is_cg_capturable: bool = False,
        *,
        _input: Tensor | None = None,
    ) -> Tensor:
        logits = inp if _input is None else _input
        given = (target, label_smoothing, reduce_loss, dist_process_group, ignore_idx)
        return cross_entropy(logits, *given, mean_shape=mean_shape, inplace=inplace)

    return parallel_cross_entropy
