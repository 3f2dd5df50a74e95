"""Defect 5: activation_recompute_forward, the region that a checkpoint opens, does not nest.

Transformer Engine keeps flags of the process: whether a tracked region is open, whether it is a recompute, and a queue
of flags for whether the first module of the region is still to come. Here a region restores the flags that it found,
and the first-module flag is kept with the scales of the checkpoint.
"""

from __future__ import annotations

import functools
from typing import Any

from shim.patches._arguments import Function
from shim.patches._fp8_scales import own_flags, recording, replay

# The flags of a tracked region: up to 2.18, and from 2.19 on.
FLAGS = (
    ("_FP8_ACTIVATION_RECOMPUTE_ENABLED", "_FP8_ACTIVATION_RECOMPUTE_PHASE"),
    ("_IN_ACTIVATION_RECOMPUTE_REGION", "_ACTIVATION_RECOMPUTE_PHASE"),
)


def patch_region_enter(original: Function) -> Function:
    """Each tracked region keeps its own first-module flag. A forward pass in a recompute stays a forward pass."""

    @functools.wraps(original)
    def __enter__(self: Any) -> Any:
        from transformer_engine.pytorch import distributed

        found = {name: vars(distributed)[name] for names in FLAGS for name in names if name in vars(distributed)}
        vars(self).setdefault("flags_found", []).append(found)
        if not self.activation_recompute:
            return original(self)
        if not self.recompute_phase:
            if distributed.in_fp8_activation_recompute_phase():
                return None
            (*_, scales) = recording() or (None,)
            if scales is None or scales.is_first_module is not None:
                return original(self)
            with own_flags([]) as flags:
                original(self)
            (scales.is_first_module,) = flags
            return None
        now = replay()
        if now is None or now.entered:
            return original(self)
        now.entered = True
        with own_flags([now.scales.is_first_module]):
            return original(self)

    return __enter__


def patch_region_exit(original: Function) -> Function:
    """At its end, restores the flags of the outer tracked region."""

    @functools.wraps(original)
    def __exit__(self: Any, *exception: Any) -> Any:
        from transformer_engine.pytorch import distributed

        result = original(self, *exception)
        found = vars(self).get("flags_found")
        if found:  # empty if the region was entered before the patch was applied
            vars(distributed).update(found.pop())
        return result

    return __exit__
