"""MoELayer.route: the mask of an overlapped schedule, and the rank's share of a whole one (2, 3)."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Iterator
from typing import Any

from torch import Tensor

from shim.patches._arguments import Function, argument, replacing
from shim.patches._named import Named


class _Thread(Named, threading.local):
    mask: Tensor | None = None  # [s, b], of routers that are called without one


_NOW = _Thread()


@contextlib.contextmanager
def routing(mask: Tensor) -> Iterator[None]:
    """Inside, a router that is called without a mask gets this one, [b, s]."""
    before, _NOW.mask = _NOW.mask, mask.transpose(0, 1).bool()
    try:
        yield
    finally:
        _NOW.mask = before


def patch_route(original: Function) -> Function:
    """Gives a router the mask of its tokens: [s, b], of as many tokens as its states [s, b, h] have."""
    states_of = argument(original, "hidden_states")
    mask_of, with_mask = argument(original, "padding_mask"), replacing(original, "padding_mask")

    @functools.wraps(original)
    def route(*args: Any, **kwargs: Any) -> Any:
        mask = mask_of(args, kwargs)
        mask = _NOW.mask if mask is None else mask
        if mask is None:
            return original(*args, **kwargs)
        tokens, group = states_of(args, kwargs).size(0), args[0].tp_group
        if mask.size(0) != tokens and mask.size(0) == tokens * group.size():
            mask = mask.narrow(0, group.rank() * tokens, tokens)
        args, kwargs = with_mask(args, kwargs, mask)
        return original(*args, **kwargs)

    return route
