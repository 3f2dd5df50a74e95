"""Sliding windows of megatron-core's own attention beside its fused softmax.

What is wrong (0.15 to 0.20): with `window_size`, DotProductAttention lets a token see so many tokens before it.
FusedScaleMaskSoftmax builds that mask in its torch path alone. With `masked_softmax_fusion`, in 16 bits and for rows of
20 to 4096 tokens, it takes a fused kernel instead, which is causal and knows no window: each token sees all tokens
before it, in silence. Which path runs depends on the length of a row, so a training and an evaluation may differ.

The patch says that no kernel is available for a layer that has a window. Layers without one keep it, as do the layers
that `window_attn_skip_freq` leaves out. Attention of Transformer Engine is another class.

Upstream: open.

Delete when: megatron-core itself takes no kernel without a window for a layer that has one, and the releases before
that are not supported.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

from shim.patches._arguments import Function

AVAILABLE = "megatron.core.fusions.fused_softmax:FusedScaleMaskSoftmax.is_kernel_available"


def _is_kernel_available(original: Function) -> Function:
    @functools.wraps(original)
    def is_kernel_available(self: Any, *args: Any, **kwargs: Any) -> Any:
        return self.window_size is None and original(self, *args, **kwargs)

    return is_kernel_available


def bindings(variant: str, options: Mapping[str, Any]) -> Mapping[str, Callable[[Function], Function]]:
    """Target -> factory for a variant. A factory takes upstream's object and returns the replacement."""
    return {AVAILABLE: _is_kernel_available}
