"""Capacities of experts (moe_expert_capacity_factor) that are larger than the number of tokens.

What is wrong: an expert never gets more tokens than there are. A factor above num_moe_experts / moe_router_topk gives
it a larger capacity, which means that no token is dropped, but
1. the router asks topk for more tokens than there are (0.12 to 0.15): "selected index k out of range";
2. with `moe_pad_expert_input_to_capacity` it pads to the tokens that there are, and the all-to-all dispatcher counts
   with the larger capacity (0.12 to 0.20): "shape ... is invalid for input of size".
A factor of just that quotient raises as well for some numbers of tokens, because the product is rounded up.

The patch cuts the factor of the config to that quotient when a layer of experts is built, less a billionth, so that
the capacity is the number of tokens for up to a billion of them. No expert gets or drops another token. Smaller
factors do not change.

Upstream: Megatron-LM pull request 2214 fixes the first, in 0.16. The second is open.

Delete when: megatron-core itself cuts the capacity for padded experts, and the releases before that are not supported.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

from shim.patches._arguments import Function, argument

MOE = "megatron.core.transformer.moe.moe_layer:MoELayer.__init__"


def _init(original: Function) -> Function:
    config_of = argument(original, "config")

    @functools.wraps(original)
    def __init__(*args: Any, **kwargs: Any) -> None:
        config = config_of(args, kwargs)
        if config.moe_expert_capacity_factor is not None:
            all_tokens = config.num_moe_experts / config.moe_router_topk * (1 - 1e-9)
            config.moe_expert_capacity_factor = min(config.moe_expert_capacity_factor, all_tokens)
        original(*args, **kwargs)

    return __init__


def bindings(variant: str, options: Mapping[str, Any]) -> Mapping[str, Callable[[Function], Function]]:
    """Target -> factory for a variant. A factory takes upstream's object and returns the replacement."""
    return {MOE: _init}
