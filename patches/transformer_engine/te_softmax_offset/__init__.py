"""Learnable attention sinks begin as zeros.

What is wrong (2.8 to 2.13): DotProductAttention with softmax_type="learnable" makes its parameter softmax_offset of
torch.empty, and no code initialises it. The sinks of a model that is trained from scratch begin as what was in memory:
NaN, huge numbers, or other numbers on each data-parallel rank. A model that loads a checkpoint with sinks is right.

The patch fills the parameter with zeros at the end of the constructor, which has just made it. Later nothing touches
it: loaded values stay, and so do those that a subclass or a trainer sets after the constructor of DotProductAttention.
Random numbers are drawn as on stock. Build the model after shim.apply().

Upstream: pull request 2694 (in 2.14) begins with zeros.

Delete when: Transformer Engine 2.13 is not supported.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch

from shim.patches._arguments import Function

INIT = "transformer_engine.pytorch.attention.dot_product_attention.dot_product_attention:DotProductAttention.__init__"


def _init(original: Function) -> Function:
    @functools.wraps(original)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        sinks = self._parameters.get("softmax_offset")  # those of "off-by-one" are no parameter, and zeros on stock
        if sinks is not None:
            with torch.no_grad():
                sinks.zero_()

    return __init__


def bindings(variant: str, options: Mapping[str, Any]) -> Mapping[str, Callable[[Function], Function]]:
    """Target -> factory for a variant. A factory takes upstream's object and returns the replacement."""
    return {INIT: _init}
