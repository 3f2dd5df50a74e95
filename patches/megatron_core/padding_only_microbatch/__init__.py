"""Microbatches of padding alone, as a router with a padding mask and an auxiliary loss gets them.

What is wrong (0.16 to 0.20), silent: with a padding mask the auxiliary losses of a router (aux_loss, seq_aux_loss,
global_aux_loss) are divided by the square of the number of tokens that are no padding. In a microbatch of padding
alone, as a trainer adds one so that all data-parallel ranks have as many, that is 0 / 0. The loss is NaN, and so is the
gradient of the router and of all weights below it after the step.

What the patch does: it counts at least one token. The losses are sums over no tokens, and so zero, as is their
gradient. Any other count stays, as does every call without a mask. The z-loss is divided by at least one token
upstream. It costs one operation on one number in a layer of experts that gets a mask.

Upstream: not reported.

Delete when: megatron-core divides by at least one token, and the releases before that are not supported.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

from shim.patches._arguments import Function, argument

COUNTS = "megatron.core.transformer.moe.moe_utils:get_tokens_per_expert_and_token_count"


def _counts(original: Function) -> Function:
    masked = argument(original, "with_padding_mask")

    @functools.wraps(original)
    def get_tokens_per_expert_and_token_count(*args: Any, **kwargs: Any) -> Any:
        found = original(*args, **kwargs)
        if not masked(args, kwargs):
            return found
        per_expert, local, total = found
        return per_expert, local, total.clamp(min=1)

    return get_tokens_per_expert_and_token_count


def bindings(variant: str, options: Mapping[str, Any]) -> Mapping[str, Callable[[Function], Function]]:
    """Target -> factory for a variant. A factory takes upstream's object and returns the replacement."""
    return {COUNTS: _counts}
