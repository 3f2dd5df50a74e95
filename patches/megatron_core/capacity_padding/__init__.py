"""Places of an expert (moe_expert_capacity_factor) that padding takes.

What is wrong (0.16 to 0.20), silent: with a capacity each expert takes a limited number of tokens of a call, and drops
the others. The router is told which tokens are padding, and leaves them out of its losses and counts, but not here:
- Tokens of padding take places that real ones then lack. All of them look alike, so that they crowd the same experts.
- The limit is a share of all tokens of the call, so that it grows with padding: less is dropped than without.
So a row trains otherwise than the same tokens without padding.

What the patch does: padding goes to no expert, and the limit is that of the real tokens. What exceeds it is dropped as
upstream does, by probability or by position, before upstream's function gets the choices. Its own limit is never less,
so that it drops nothing more. The count stays on the device. With moe_pad_expert_input_to_capacity an expert still
computes its full share, and what was dropped has a probability of 0.

Nothing changes without a mask or without a capacity. Rows whose layer is not told of their padding are as on stock.

Upstream: open.

Delete when: megatron-core leaves padding out of the capacity, and the releases before that are not supported.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from shim.patches._ambient import Ambient
from shim.patches._arguments import Function, argument, replacing

ROUTING = "megatron.core.transformer.moe.router:TopKRouter.routing"
DROP = "megatron.core.transformer.moe.moe_utils:apply_router_token_dropping"


_MASK = Ambient(__name__)  # [T], of the router that is called now


def _routing(original: Function) -> Function:
    mask_of = argument(original, "padding_mask")

    @functools.wraps(original)
    def routing(self: Any, *args: Any, **kwargs: Any) -> Any:
        mask = mask_of((self, *args), kwargs)
        if mask is None or self.config.moe_expert_capacity_factor is None:
            return original(self, *args, **kwargs)
        return _MASK.call(mask.reshape(-1).bool(), original, self, *args, **kwargs)

    return routing


def _drop(original: Function) -> Function:
    names = ("routing_probs", "routing_map", "router_topk", "capacity_factor", "drop_policy")
    of = {name: argument(original, name) for name in names}
    with_probs, with_map = replacing(original, "routing_probs"), replacing(original, "routing_map")

    @functools.wraps(original)
    def apply_router_token_dropping(*args: Any, **kwargs: Any) -> Any:
        padding = _MASK.value
        if padding is None:
            return original(*args, **kwargs)
        probs, chosen, *limits = (value(args, kwargs) for value in of.values())
        kept = within(probs.detach(), chosen & ~padding[:, None], (~padding).sum(), *limits)
        args, kwargs = with_probs(args, kwargs, probs * kept)
        args, kwargs = with_map(args, kwargs, kept)
        return original(*args, **kwargs)

    return apply_router_token_dropping


def within(probs: Tensor, chosen: Tensor, tokens: Tensor, topk: int, factor: float, policy: str) -> Tensor:
    """The choices for which their experts have places, [T, E].

    tokens: how many there are without padding. topk, factor, policy: as of upstream's function.
    """
    if policy == "position":
        places = chosen.long().cumsum(0) - 1
    else:
        places = probs.masked_fill(~chosen, -1).argsort(dim=0, descending=True, stable=True).argsort(dim=0)
    return chosen & (places < (tokens.double() * topk / chosen.size(1) * factor).ceil())


def bindings(variant: str, options: Mapping[str, Any]) -> Mapping[str, Callable[[Function], Function]]:
    """Target -> factory for a variant. A factory takes upstream's object and returns the replacement."""
    return {ROUTING: _routing, DROP: _drop}
