"""The z-loss of a router with a padding mask, over tensor- and context-parallel ranks.

What is wrong (0.16 to 0.20): the z-loss is a mean over tokens that are no padding. A rank takes the mean over its own,
and the loss is the mean of these means. So a token on a rank with little padding weighs less than one on a rank with
much, and the gradient depends on how rows are cut over ranks. A rank that has only padding takes its share away from
all others. With calculate_per_token_loss the means are multiplied by the tokens of a rank, and the loss is right.

What the patch does: it multiplies the gradient of a rank's mean by the tokens of the rank, divided by those of an
average rank. How many tokens all ranks have is what the auxiliary loss asks for, later in the same forward pass and in
a message that stock sends. So the patch works with aux_loss and seq_aux_loss. It costs a count of the mask and two
operations on one number in a layer with a mask, and nothing without a mask, on one rank, or in evaluation.

Left alone:

- Without aux_loss and seq_aux_loss, as with expert biases alone, no message tells a rank the tokens of all.
- The value that is logged, which stays the mean of means: it is recorded before the message.

Upstream: open. The dev branch has the same mean of means, from 2026-06-16 on without a function of its own.

Delete when: the z-loss of every supported release is a mean over the tokens of all ranks.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from shim.patches._arguments import Function, argument
from shim.patches.megatron_core._z_loss_calls import Call, attached, attaching, begin, counted, pending

APPLY = "megatron.core.transformer.moe.router:TopKRouter.apply_z_loss"
Z_LOSS = "megatron.core.transformer.moe.moe_utils:z_loss_func"
ATTACH = "megatron.core.transformer.moe.moe_utils:MoEAuxLossAutoScaler."
COUNTS = "megatron.core.transformer.moe.moe_utils:get_tokens_per_expert_and_token_count"


class _Weighted(torch.autograd.Function):
    """The loss of a rank, whose gradient is multiplied by the share of the rank, which comes later in the call."""

    @staticmethod
    def forward(ctx: Any, loss: Tensor, call: Call) -> Tensor:
        ctx.call = call
        return loss.view_as(loss)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        share = ctx.call.share
        return gradients[0] if share is None else gradients[0] * share, None


def _apply_z_loss(original: Function) -> Function:
    """Upstream calls it in every call of a router, so that what an earlier one has left goes."""
    mask_of = argument(original, "padding_mask")

    @functools.wraps(original)
    def apply_z_loss(*args: Any, **kwargs: Any) -> Any:
        router = args[0]
        cut = mask_of(args, kwargs) is not None and router.tp_cp_group.size() > 1
        begin(Call(router.topk, router.tp_cp_group) if cut and not router.calculate_per_token_loss else None)
        return original(*args, **kwargs)

    return apply_z_loss


def _z_loss_func(original: Function) -> Function:
    mask_of = argument(original, "padding_mask")

    @functools.wraps(original)
    def z_loss_func(*args: Any, **kwargs: Any) -> Any:
        loss, call, mask = original(*args, **kwargs), pending(), mask_of(args, kwargs)
        if call is None or mask is None:
            return loss
        call.tokens = (~mask).sum()
        return _Weighted.apply(loss, call)

    return z_loss_func


def _counts(original: Function) -> Function:
    group_of, topk_of = argument(original, "reduce_group"), argument(original, "topk")

    @functools.wraps(original)
    def get_tokens_per_expert_and_token_count(*args: Any, **kwargs: Any) -> Any:
        found, call = original(*args, **kwargs), pending()
        if call is not None:
            # Per sequence, if the experts of all sequences were counted as those of one token.
            counted(lambda: found[-1] * (topk_of(args, kwargs) // call.topk), group_of(args, kwargs))
        return found

    return get_tokens_per_expert_and_token_count


def _inline(original: Function) -> Function:
    """The dev branch has no function for the mean. The first loss that is attached in here is the z-loss."""
    apply, mask_of = _apply_z_loss(original), argument(original, "padding_mask")

    @functools.wraps(original)
    def apply_z_loss(*args: Any, **kwargs: Any) -> Any:
        with attaching(mask_of(args, kwargs)):
            return apply(*args, **kwargs)

    return apply_z_loss


def _attach(original: Function) -> Function:
    @functools.wraps(original)
    def forward(ctx: Any, *args: Any, **kwargs: Any) -> Any:
        ctx.z_loss_call = attached()
        return original(ctx, *args, **kwargs)

    return forward


def _attach_backward(original: Function) -> Function:
    @functools.wraps(original)
    def backward(ctx: Any, *args: Any, **kwargs: Any) -> Any:
        of_output, of_loss = original(ctx, *args, **kwargs)
        call = ctx.z_loss_call
        return of_output, of_loss if call is None or call.share is None else of_loss * call.share

    return backward


def bindings(variant: str, options: Mapping[str, Any]) -> Mapping[str, Callable[[Function], Function]]:
    """Target -> factory for a variant. A factory takes upstream's object and returns the replacement."""
    if variant == "v0_19_dev":
        pair = {ATTACH + "forward": _attach, ATTACH + "backward": _attach_backward}
        return {APPLY: _inline, COUNTS: _counts, **pair}
    return {APPLY: _apply_z_loss, Z_LOSS: _z_loss_func, COUNTS: _counts}
