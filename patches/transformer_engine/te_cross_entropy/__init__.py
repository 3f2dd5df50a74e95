"""Transformer Engine's fused cross entropy through shim.ops.token_logprobs.

What is wrong, if parallel_cross_entropy is called, or cross_entropy_fusion_impl="te" of megatron-core is set:
- 2.2 to 2.17: gradients of bf16 logits are rounded to bf16 before they are multiplied with the gradient of the loss,
  and the one of the target is a difference of two rounded numbers. If the model is sure of the target, it is zero
  or several times too large.
- 2.2 to 2.7: every token gets the gradient of the first token's loss. If the first token is masked, nothing is trained.
- 2.2 to 2.4: gradients of losses per token are divided by the number of tokens.
- 2.4 to 2.11: with reduce_loss=True the mean counts tokens without a target. 2.2 and 2.3 do not know such tokens; their
  loss is infinite.
- 2.8 to 2.10: the gradient of the losses has to be contiguous; that of losses.sum() is not, and is read out of bounds.
- 2.2 to 2.13: logits that are transposed are read out of bounds.
- 2.2 to 2.17: forward writes the gradient over the logits. Other readers of the logits get the gradient.

The patch: the function returns what shim.ops computes. One gradient in the dtype of the logits is made in backward,
rounded once. As in these releases it is written over the logits, but in backward: code that needs the logits in
another backward pass gets autograd's error. Leaves, and logits that share memory with another tensor, get a separate
gradient. Ranks exchange numbers once, as on stock. is_cg_capturable means nothing, because no pass waits for the GPU.

- A negative target means no target, as ignore_idx does: loss and gradient are zero, as with chunked-logprob. A target
  beyond the vocabulary is an error; stock returned an infinite loss.
- Labels are smoothed as by Transformer Engine: every entry of the vocabulary, also the target, has label_smoothing / V.
  Under tensor parallelism the sum over the vocabulary is that of all ranks, not of each rank's own columns.

Upstream: 2.5 (pull request 1879), 2.8 (2139), 2.11 (2402), 2.12 (2476), 2.14 (2746), 2.18 (3193).

Delete when: Transformer Engine 2.17 is not supported.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from shim.ops.logprob import token_logprobs
from shim.patches._arguments import Function

PARALLEL_CROSS_ENTROPY = "transformer_engine.pytorch.cross_entropy:parallel_cross_entropy"
NO_TARGET = -100


def _cross_entropy(
    logits: Tensor,
    target: Tensor,
    label_smoothing: float = 0.0,
    reduce_loss: bool = False,
    group: Any = None,
    ignore_idx: int = NO_TARGET,
    *,
    mean_shape: tuple[int, ...],
) -> Tensor:
    """The loss of each token, [b, s] in fp32, or their mean, from logits [b, s, V / TP] and as many targets."""
    target = target.reshape(logits.shape[:-1])
    without = (target < 0) | (target == ignore_idx)
    vocabulary = logits.size(-1) * (1 if group is None else group.size())
    found = token_logprobs(
        logits,
        target.masked_fill(without, NO_TARGET),
        tp_group=group,
        label_smoothing=label_smoothing * (vocabulary - 1) / vocabulary,  # shim.ops spares the target
        ignore_index=NO_TARGET,
        inplace_backward=_is_computed(logits),
    )
    losses = -found.logprob.float()
    return losses.sum() / (~without).sum().clamp(min=1).reshape(mean_shape) if reduce_loss else losses


def _is_computed(logits: Tensor) -> bool:
    memory = logits._base if logits._is_view() else logits
    return not (memory is not None and memory.is_leaf and memory.requires_grad)


def _applied(original: Function, mean_shape: tuple[int, ...]) -> Function:
    """Up to 2.9 the function is the apply of an autograd function, which takes no arguments by name."""

    @functools.wraps(original)
    def parallel_cross_entropy(*args: Any, **kwargs: Any) -> Tensor:
        return _cross_entropy(*args[:6], **kwargs, mean_shape=mean_shape)

    return parallel_cross_entropy


def _called(original: Function, mean_shape: tuple[int, ...]) -> Function:
    @functools.wraps(original)
    def parallel_cross_entropy(
        inp: Tensor,
        target: Tensor,
        label_smoothing: float = 0.0,
        reduce_loss: bool = False,
        dist_process_group: Any = None,
        ignore_idx: int = -100,
        is_cg_capturable: bool = False,
        *,
        _input: Tensor | None = None,
    ) -> Tensor:
        logits = inp if _input is None else _input
        given = (target, label_smoothing, reduce_loss, dist_process_group, ignore_idx)
        return _cross_entropy(logits, *given, mean_shape=mean_shape)

    return parallel_cross_entropy


def _parallel_cross_entropy(original: Function, mean_shape: tuple[int, ...]) -> Function:
    is_apply = issubclass(getattr(original, "__self__", None) or object, torch.autograd.Function)
    return (_applied if is_apply else _called)(original, mean_shape)


def bindings(variant: str, options: Mapping[str, Any]) -> Mapping[str, Callable[[Function], Function]]:
    """Target -> factory for a variant. A factory takes upstream's object and returns the replacement."""
    mean_shape = (1,) if variant == "v2_12" else ()  # of the loss where it is reduced, as in each release
    return {PARALLEL_CROSS_ENTROPY: functools.partial(_parallel_cross_entropy, mean_shape=mean_shape)}
