"""Defects 1, 3 and 4: the copies of the weights, on which HybridDeviceOptimizer steps, follow the weights.

hybrid.param_to_inner_param maps each parameter that the distributed optimizer gives to the HybridDeviceOptimizer to the
tensor that an optimizer inside steps on: the parameter itself, a copy on the CPU, or a copy in fp32.
"""

from __future__ import annotations

import functools
from typing import Any

from shim.patches._arguments import Function
from shim.patches._views import view_with


def hybrid_of(optimizer: Any) -> Any:
    """The HybridDeviceOptimizer inside a DistributedOptimizer, or None."""
    inner = optimizer.optimizer
    return inner if hasattr(inner, "param_to_inner_param") else None


def precision_aware(optimizer: Any) -> bool:
    """Whether the optimizer inside steps on shards of the model's weights, and not on main params in fp32."""
    config = optimizer.config
    return getattr(config, "use_precision_aware_optimizer_no_fp8_or_ds_fp8", config.use_precision_aware_optimizer)


def refresh(hybrid: Any, params: Any) -> None:
    """Give the copies of these weights, on which the optimizers inside step, the values of the weights."""
    for param in params:
        inner = hybrid.param_to_inner_param[param]
        if inner is not param:
            inner.data.copy_(param.data)


def patch_copy_model_params(original: Function) -> Function:
    """Defect 1: weights that were loaded reach the main params and the copies."""

    @functools.wraps(original)
    def _copy_model_params_to_main_params(*args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        optimizer = args[0]
        hybrid = hybrid_of(optimizer)
        if hybrid is None or not hasattr(optimizer, "model_param_group_index_map"):
            return result
        if not precision_aware(optimizer):
            # Upstream returns before it copies to the main params. If it sees no such optimizer it copies.
            original(view_with(optimizer, optimizer=None), *args[1:], **kwargs)
        fresh = hybrid.param_to_fp32_param if hasattr(hybrid, "update_fp32_param_by_new_param") else {}
        refresh(hybrid, [param for param in hybrid.param_to_inner_param if param not in fresh])
        return result

    return _copy_model_params_to_main_params


def patch_dummy_step(original: Function) -> Function:
    """Defect 3: the step that fills an empty state starts from the loaded weights, and moves none of them."""

    @functools.wraps(original)
    def dummy_step(*args: Any, **kwargs: Any) -> Any:
        hybrid = args[0]
        refresh(hybrid, hybrid.param_to_inner_param)
        held = [(group, key, group[key]) for group in hybrid.param_groups for key in ("lr", "weight_decay")]
        for group, key, _ in held:
            group[key] = 0.0
        try:
            return original(*args, **kwargs)
        finally:
            for group, key, value in held:
                group[key] = value
            hybrid._sync_hdo_param_groups_to_sub_optimizers()

    return dummy_step


def patch_update_fp32_params(original: Function) -> Function:
    """Defect 4: upstream looks up an fp32 copy for each weight, also for those that are in fp32."""

    @functools.wraps(original)
    def _update_fp32_params_by_new_state(*args: Any, **kwargs: Any) -> Any:
        hybrid = args[0]
        whole = hybrid.state
        # What is in fp32 has no fp32 copy. Its copy on the CPU has just been made.
        hybrid.state = {param: state for param, state in whole.items() if param in hybrid.param_to_fp32_param}
        try:
            return original(*args, **kwargs)
        finally:
            hybrid.state = whole

    return _update_fp32_params_by_new_state
