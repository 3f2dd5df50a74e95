"""MoELayer.route: the mask of an overlapped schedule, and the rank's share of a whole one (2, 3)."""

from __future__ import annotations

import functools
from typing import Any

from shim.patches._ambient import Ambient
from shim.patches._arguments import Function, argument, replacing

MASK = Ambient(__name__)  # [s, b], bool, of routers that are called without one


def patch_route(original: Function) -> Function:
    """Gives a router the mask of its tokens: [s, b], of as many tokens as its states [s, b, h] have."""
    states_of = argument(original, "hidden_states")
    mask_of, with_mask = argument(original, "padding_mask"), replacing(original, "padding_mask")

    @functools.wraps(original)
    def route(*args: Any, **kwargs: Any) -> Any:
        mask = mask_of(args, kwargs)
        mask = MASK.value if mask is None else mask
        if mask is None:
            return original(*args, **kwargs)
        tokens, group = states_of(args, kwargs).size(0), args[0].tp_group
        if mask.size(0) != tokens and mask.size(0) == tokens * group.size():
            mask = mask.narrow(0, group.rank() * tokens, tokens)
        args, kwargs = with_mask(args, kwargs, mask)
        return original(*args, **kwargs)

    return route
