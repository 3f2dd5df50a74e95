"""The global auxiliary loss of a router over microbatches with unequal numbers of tokens.

What is wrong (0.15 to 0.20), silent: the global auxiliary loss (`moe_router_load_balancing_type="global_aux_loss"`)
takes the share that each expert has of all tokens of the step so far: the mean counts of the microbatches, divided by a
number of tokens. It divides by the tokens of the current microbatch, and not by their mean. The shares then do not add
up to one, and the loss is wrong by the mean over the current number: behind a microbatch of 1000 tokens, one of 100
balances experts 5.5 times as hard as it should. Microbatches have unequal numbers of tokens with packed rows and
dynamic batches, with rows of different length, and from 0.16 on with padding masks.

What the patch does: it scales the mean counts to the tokens of the current microbatch. With equal microbatches it
changes nothing. It costs a few operations on a number for each expert in a layer with this loss; no message.

Upstream: not reported.

Delete when: megatron-core divides the counts by the tokens that they are of, and the releases before that are not
supported.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from shim.patches._ambient import Ambient
from shim.patches._arguments import Function, argument, replacing

APPLY = "megatron.core.transformer.moe.router:TopKRouter._apply_global_aux_loss"
LOSS = "megatron.core.transformer.moe.moe_utils:switch_load_balancing_loss_func"
EQUAL = 1e-5  # so far counts are rounded


_INSIDE = Ambient(__name__)  # whether a global auxiliary loss is computed


def _apply_global_aux_loss(original: Function) -> Function:
    @functools.wraps(original)
    def _apply_global_aux_loss(*args: Any, **kwargs: Any) -> Any:
        return _INSIDE.call(True, original, *args, **kwargs)

    return _apply_global_aux_loss


def _loss(original: Function) -> Function:
    counts_of, with_counts = argument(original, "tokens_per_expert"), replacing(original, "tokens_per_expert")
    tokens_of, topk_of = argument(original, "total_num_tokens"), argument(original, "topk")

    @functools.wraps(original)
    def switch_load_balancing_loss_func(*args: Any, **kwargs: Any) -> Any:
        if _INSIDE.value:
            scaled = scaled_to(tokens_of(args, kwargs), topk_of(args, kwargs), counts_of(args, kwargs))
            args, kwargs = with_counts(args, kwargs, scaled)
        return original(*args, **kwargs)

    return switch_load_balancing_loss_func


def scaled_to(tokens: Any, topk: int, counts: Tensor) -> Tensor:
    """The counts of experts, [E], so that they add up to topk times the tokens. Stock's bits if they do."""
    ratio = tokens * topk / counts.sum().clamp(min=1)
    return counts * torch.where((ratio - 1).abs() < EQUAL, 1.0, ratio)


def bindings(variant: str, options: Mapping[str, Any]) -> Mapping[str, Callable[[Function], Function]]:
    """Target -> factory for a variant. A factory takes upstream's object and returns the replacement."""
    return {APPLY: _apply_global_aux_loss, LOSS: _loss}
