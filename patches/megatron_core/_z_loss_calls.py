"""The z-loss of a router's call, until a later count of the call says how many tokens all ranks have."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor

from shim.patches._named import Named


class Call:
    """One call of a router, from its z-loss to the count of its auxiliary loss.

    topk: experts of a token. group: the tensor- and context-parallel ranks. tokens: of this rank, without padding, as a
    tensor; None before the z-loss. share: of this rank in the gradient, as a tensor, where an average rank has 1; None
    until the tokens of all ranks are known.
    """

    def __init__(self, topk: int, group: Any) -> None:
        self.topk = topk
        self.group = group
        self.tokens: Tensor | None = None
        self.share: Tensor | None = None


class _Thread(Named, threading.local):
    call: Call | None = None
    mask: Tensor | None = None


_NOW = _Thread()


def begin(call: Call | None) -> None:
    """A call of a router on this thread, or None if its z-loss needs no share. What an earlier one has left goes."""
    _NOW.call = call


def pending() -> Call | None:
    """The call whose tokens of all ranks are not known yet."""
    return _NOW.call


@contextlib.contextmanager
def attaching(mask: Tensor | None) -> Iterator[None]:
    """The first loss that a router attaches within is its z-loss. mask: its padding."""
    _NOW.mask = mask
    try:
        yield
    finally:
        _NOW.mask = None


def attached() -> Call | None:
    """The call whose z-loss is attached now, if it needs a share."""
    call, mask = _NOW.call, _NOW.mask
    _NOW.mask = None
    if call is None or mask is None:
        return None
    call.tokens = (~mask).sum()
    return call


def counted(total: Callable[[], Tensor], group: Any) -> None:
    """total: the tokens of all ranks of the group, without padding. Other groups than the call's are left alone.

    The global auxiliary loss counts over data-parallel ranks as well.
    """
    call = _NOW.call
    if call is not None and call.tokens is not None and group is call.group:
        call.share = call.tokens * call.group.size() / total().clamp(min=1)
        _NOW.call = None
