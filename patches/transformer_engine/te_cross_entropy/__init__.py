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
- 2.2 to 2.18: with label_smoothing under tensor parallelism each rank sums the logits of its own columns only, so that
  the losses of ranks differ.

The patch: the function returns what shim.ops computes. One gradient in the dtype of the logits is made in backward,
rounded once. As in releases up to 2.17 it is written over the logits, but in backward: code that needs the logits in
another backward pass gets autograd's error. Leaves, and logits that share memory with another tensor, get a separate
gradient. 2.18 leaves the logits as they are, and so does the patch there, unless nobody can read them any more. Ranks
exchange numbers once, as on stock. is_cg_capturable means nothing, because no pass waits for the GPU.

- A negative target means no target, as ignore_idx does: loss and gradient are zero, as with chunked-logprob. A target
  beyond the vocabulary is an error; stock returned an infinite loss.
- Labels are smoothed as by Transformer Engine: every entry of the vocabulary, also the target, has label_smoothing / V.
  Under tensor parallelism the sum over the vocabulary is that of all ranks, not of each rank's own columns.

Upstream: 2.5 (pull request 1879), 2.8 (2139), 2.11 (2402), 2.12 (2476), 2.14 (2746), 2.18 (3193), 2.19 (3273). What
stays from 2.18 on is a copy of the logits, which te-cross-entropy-copy spares.

Delete when: Transformer Engine 2.18 is not supported.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, Literal

import torch
from torch import Tensor

from shim.patches._arguments import Function
from shim.patches.transformer_engine._cross_entropy import PARALLEL_CROSS_ENTROPY, by_name, cross_entropy


def _applied(original: Function, *, mean_shape: tuple[int, ...], inplace: bool | Literal["unread"]) -> Function:
    """Up to 2.9 the function is the apply of an autograd function, which takes no arguments by name."""

    @functools.wraps(original)
    def parallel_cross_entropy(*args: Any, **kwargs: Any) -> Tensor:
        return cross_entropy(*args[:6], **kwargs, mean_shape=mean_shape, inplace=inplace)

    return parallel_cross_entropy


def _parallel_cross_entropy(
    original: Function, mean_shape: tuple[int, ...], inplace: bool | Literal["unread"]
) -> Function:
    is_apply = issubclass(getattr(original, "__self__", None) or object, torch.autograd.Function)
    return (_applied if is_apply else by_name)(original, mean_shape=mean_shape, inplace=inplace)


def bindings(variant: str, options: Mapping[str, Any]) -> Mapping[str, Callable[[Function], Function]]:
    """Target -> factory for a variant. A factory takes upstream's object and returns the replacement."""
    mean_shape = (1,) if variant in ("v2_12", "v2_18") else ()  # of the loss where it is reduced, as in each release
    inplace: bool | Literal["unread"] = "unread" if variant == "v2_18" else True
    return {PARALLEL_CROSS_ENTROPY: functools.partial(_parallel_cross_entropy, mean_shape=mean_shape, inplace=inplace)}
