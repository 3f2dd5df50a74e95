"""Defects 2 and 5, and 4 on the main branch: a state that is loaded for one weight.

DistributedOptimizer._set_main_param_and_optimizer_states gets the main weight, the moments and maybe the step of one
parameter. It writes them to the optimizer's state, and leaves the copy out that HybridDeviceOptimizer steps on.
"""

from __future__ import annotations

import functools
from typing import Any

from shim.patches._arguments import Function, argument, replacing
from shim.patches.megatron_core.cpu_offloaded_optimizer.copies import hybrid_of, precision_aware, refresh


def patch_set_states(original: Function) -> Function:
    param_of = argument(original, "model_param")
    tensors_of, with_tensors = argument(original, "tensors"), replacing(original, "tensors")

    @functools.wraps(original)
    def _set_main_param_and_optimizer_states(*args: Any, **kwargs: Any) -> Any:
        optimizer, tensors = args[0], tensors_of(args, kwargs)
        hybrid = hybrid_of(optimizer)
        place = getattr(optimizer, "model_param_group_index_map", {}).get(param_of(args, kwargs))
        if place is None:  # Megatron-FSDP
            return original(*args, **kwargs)
        group, order = place
        param = optimizer.optimizer.param_groups[group]["params"][order]
        state = optimizer.optimizer.state[param]
        if hybrid is None and not _is_tensor(state.get("step")):
            return original(*args, **kwargs)

        loaded = {name: value for name, value in tensors.items() if name != "step"}
        if _is_tensor(state.get("step")):
            # Defect 5: upstream has put the step of the parameter groups here, maybe one tensor for all.
            state["step"] = loaded["step"] = state["step"].clone()
        if hybrid is None or not precision_aware(optimizer):
            held = {name: value for name, value in state.items() if _is_tensor(value)}
            args, kwargs = with_tensors(args, kwargs, {**held, **loaded})
            result = original(*args, **kwargs)
            if hybrid is not None:
                refresh(hybrid, [param])
                state["master_param"] = hybrid.param_to_inner_param[param]
            return result

        # Upstream would put these tensors in the place of its own, whatever device they are on.
        state["master_param"] = hybrid.param_to_inner_param[param]
        for name, value in loaded.items():
            own = state.get("master_param" if name == "param" else name)
            if _is_tensor(own) and _is_tensor(value):
                own.data.copy_(value)
                loaded[name] = own
        args, kwargs = with_tensors(args, kwargs, loaded)
        return original(*args, **kwargs)

    return _set_main_param_and_optimizer_states


def _is_tensor(value: Any) -> bool:
    return hasattr(value, "copy_")
