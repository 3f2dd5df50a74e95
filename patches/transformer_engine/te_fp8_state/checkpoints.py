"""Defects 1 and 4, in checkpoints: a checkpoint restores its FP8 region, and has the scales of its own forward pass.

Each checkpoint gets a `ForwardScales` (shim.patches._fp8_scales). The forward pass records into it, and every recompute
replays from it. Which scales go in and out is the matter of `scales`.
"""

from __future__ import annotations

import functools
from contextlib import nullcontext
from typing import Any

from shim.patches._arguments import Function
from shim.patches._autocast import remembering
from shim.patches._fp8_scales import ForwardScales, Within


def patch_checkpoint_forward(original: Function) -> Function:
    @functools.wraps(original)
    def forward(ctx: Any, *args: Any, **kwargs: Any) -> Any:
        ctx.forward_scales = ForwardScales(numbered=True)
        with ctx.forward_scales.recording():
            return original(ctx, *args, **kwargs)

    return forward


def patch_checkpoint_forward_in_its_region(original: Function) -> Function:
    """2.1: the recomputed function also holds the region of the forward pass."""
    return patch_checkpoint_forward(_in_its_region(original))


def _in_its_region(original: Function) -> Function:
    @functools.wraps(original)
    def forward(ctx: Any, run_function: Function, *args: Any, **kwargs: Any) -> Any:
        # `checkpoint` itself tracks the phase.
        return original(ctx, remembering(run_function, track=False), *args, **kwargs)

    return forward


def patch_checkpoint_backward(original: Function) -> Function:
    @functools.wraps(original)
    def backward(ctx: Any, *args: Any, **kwargs: Any) -> Any:
        scales = getattr(ctx, "forward_scales", None)  # None if the forward pass ran before the patch was applied
        with scales.replaying() if scales is not None else nullcontext():
            result = original(ctx, *args, **kwargs)
        if scales is not None:
            scales.release()
        return result

    return backward


def patch_recompute_contexts(original: Function) -> Function:
    """The contexts of a non-reentrant checkpoint: for its forward pass and for its recomputes."""

    @functools.wraps(original)
    def get_activation_recompute_contexts(*args: Any, **kwargs: Any) -> Any:
        forward, recompute = original(*args, **kwargs)
        scales = ForwardScales(numbered=True)
        return Within(scales.recording, forward), Within(scales.replaying, recompute)

    return get_activation_recompute_contexts
