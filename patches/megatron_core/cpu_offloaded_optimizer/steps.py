"""Defects 6 and 7: Adam's step. The parameter groups have the number; a load writes it to the state of each weight."""

from __future__ import annotations

import functools
from typing import Any

from shim.patches._arguments import Function


def patch_state_of_buckets(original: Function) -> Function:
    """Defect 6, in 0.15: dp_reshardable can be saved."""

    @functools.wraps(original)
    def get_parameter_state_dp_reshardable(*args: Any, **kwargs: Any) -> Any:
        whole = original(*args, **kwargs)
        for buffer in range(len(args[0].gbuf_ranges)):
            for buckets in whole[buffer].values():
                for tensors in (tensors for bucket in buckets for tensors in bucket):
                    tensors.pop("step", None)  # one number, not one of each element: the parameter groups have it
        return whole

    return get_parameter_state_dp_reshardable


def patch_sync_param_groups(original: Function) -> Function:
    """Defect 7: what HybridDeviceOptimizer copies to the groups of its optimizers leaves their own count alone."""

    @functools.wraps(original)
    def _sync_hdo_param_groups_to_sub_optimizers(*args: Any, **kwargs: Any) -> Any:
        optimizers = args[0].sub_optimizers
        counts = [[group.get("step") for group in optimizer.param_groups] for optimizer in optimizers]
        result = original(*args, **kwargs)
        for optimizer, steps in zip(optimizers, counts, strict=True):
            for group, step in zip(optimizer.param_groups, steps, strict=True):
                if step is not None:
                    group["step"] = step
        return result

    return _sync_hdo_param_groups_to_sub_optimizers
