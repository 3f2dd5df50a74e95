"""The sequence auxiliary loss of a router (moe_router_load_balancing_type="seq_aux_loss") of rows of unequal length.

What is wrong (0.16 to 0.20), silent: the loss is the mean over the rows of a microbatch, each balanced alone. With a
padding mask each row has its own number of tokens n, and its loss is a sum divided by n * n. The router divides by the
mean length m of the rows instead. A row counts (n / m) squared times: in a microbatch of two rows with 8 tokens and 2
the long one is balanced 2.6 times as hard as alone, and the short one 0.16 times. Rows of padding alone count in the
mean.

What the patch does: upstream's function puts the rows beside the experts, [s, b * E], and asks for the counts of all
columns over ranks. The patch multiplies the counts of a row by the square of m / n, and leaves rows without tokens out
of the mean. With calculate_per_token_loss a row counts with its tokens, as it does if it is a microbatch of its own.
No message is added. One row in a microbatch, rows of equal length, and calls without a mask give stock's numbers.

Packed rows are packed-seq-aux-loss's; the weight of the loss as a whole seq-aux-loss-scale's and moe-aux-loss-scale's.

Upstream: not reported.

Delete when: megatron-core divides the loss of a row by the tokens of the row, and the releases before that are not
supported.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from torch import Tensor

from shim.patches._ambient import Ambient
from shim.patches._arguments import Function, argument

APPLY = "megatron.core.transformer.moe.router:TopKRouter._apply_seq_aux_loss"
COUNTS = "megatron.core.transformer.moe.moe_utils:get_tokens_per_expert_and_token_count"


class _Rows(NamedTuple):
    """The rows of a router's call: how many, and whether each counts with its tokens."""

    number: int
    by_tokens: bool


_ROWS = Ambient(__name__)


def _apply_seq_aux_loss(original: Function) -> Function:
    number_of, masked = argument(original, "bsz"), argument(original, "with_padding_mask")

    @functools.wraps(original)
    def _apply_seq_aux_loss(self: Any, *args: Any, **kwargs: Any) -> Any:
        number = number_of((self, *args), kwargs)
        if number == 1 or not masked((self, *args), kwargs):
            return original(self, *args, **kwargs)
        return _ROWS.call(_Rows(number, self.calculate_per_token_loss), original, self, *args, **kwargs)

    return _apply_seq_aux_loss


def _counts(original: Function) -> Function:
    topk_of = argument(original, "topk")

    @functools.wraps(original)
    def get_tokens_per_expert_and_token_count(*args: Any, **kwargs: Any) -> Any:
        found = original(*args, **kwargs)
        if _ROWS.value is None:
            return found
        of_experts, *tokens = found
        return weighted(of_experts, topk_of(args, kwargs), _ROWS.value), *tokens

    return get_tokens_per_expert_and_token_count


def weighted(of_experts: Tensor, topk: int, rows: _Rows) -> Tensor:
    """The choices of each expert in each row, [b * E], so that stock's loss is that of each row by itself.

    topk: experts of a token, times the rows. Stock's loss is a mean over rows that divides each by the square of the
    mean length.
    """
    choices = of_experts.view(rows.number, -1)
    lengths = choices.sum(1, keepdim=True) * rows.number / topk
    ratios = lengths.mean() / lengths.clamp(min=1)
    if not rows.by_tokens:
        ratios = ratios**2 * (rows.number / (lengths > 0).sum().clamp(min=1))
    return (choices * ratios).view(-1)


def bindings(variant: str, options: Mapping[str, Any]) -> Mapping[str, Callable[[Function], Function]]:
    """Target -> factory for a variant. A factory takes upstream's object and returns the replacement."""
    return {APPLY: _apply_seq_aux_loss, COUNTS: _counts}
