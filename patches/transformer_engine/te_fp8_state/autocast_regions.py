"""Defects 3 and 7: leaving an autocast region in a recompute reduces amax again; entering one may fail half-way."""

from __future__ import annotations

import functools
from typing import Any

import torch

from shim.patches._arguments import Function
from shim.patches._fp8_scales import replay


def patch_autocast_exit(original: Function) -> Function:
    """Defect 3, from 2.2: the end of a region inside a recompute reduces no amax."""

    @functools.wraps(original)
    def autocast_exit(cls: Any, *args: Any, **kwargs: Any) -> None:
        from transformer_engine.pytorch.distributed import in_fp8_activation_recompute_phase

        # CheckpointWithoutOutput of megatron-core leaves its region after the recompute phase, hence replay().
        if not in_fp8_activation_recompute_phase() and replay() is None:
            return original(cls, *args, **kwargs)
        with torch.no_grad():  # upstream reduces amax only with gradients enabled
            return original(cls, *args, **kwargs)

    return autocast_exit


def patch_autocast_enter(original: Function) -> Function:
    """Defect 7: restores the state if a region cannot be entered."""

    @functools.wraps(original)
    def autocast_enter(cls: Any, *args: Any, **kwargs: Any) -> None:
        prefix = "fp8_" if hasattr(cls, "get_fp8_autocast_state") else ""  # until 2.8
        depths = getattr(cls, "quantization_state", cls)  # an object of its own from 2.15
        depth = next(n for n in ("autocast_depth", "AUTOCAST_DEPTH", "FP8_AUTOCAST_DEPTH") if hasattr(depths, n))
        state, before = getattr(cls, f"get_{prefix}autocast_state")(), getattr(depths, depth)
        try:
            original(cls, *args, **kwargs)
        except BaseException:
            getattr(cls, f"set_{prefix}autocast_state")(state)
            setattr(depths, depth, before)
            raise

    return autocast_enter
