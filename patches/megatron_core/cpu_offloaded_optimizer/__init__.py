"""The optimizer whose states are on the CPU (`optimizer_cpu_offload`), after weights or a state were loaded.

What is wrong (all releases). HybridDeviceOptimizer steps on copies of the weights, on the CPU or in fp32, and then
copies them over the weights. Nobody refreshes the copies.
- `reload_model_params()` after weights were loaded leaves them as they were: always without the precision-aware
  optimizer, and with it in 0.12. The first step puts the random initialisation back, in silence.
- A state that is loaded in the format dp_zero_gather_scatter, or from files of its own (`load_parameter_state`), does
  not reach them either. The first step puts back what was there before.
- A first load fills the empty state by a step with random gradients (`dummy_step`), which moves the weights. Those
  that were loaded before it become the random initialisation.
- Without the precision-aware optimizer every load raises a KeyError. Main raises another one.
Besides, Adam's `step`:
- A load of dp_reshardable takes the step that the optimizer had before (0.16 to main), in silence. In 0.15 saving in
  that format raises an AssertionError. Torch's Adam without offloading has both, too. There all weights even share one
  tensor, so that nine weights count nine steps at a time, and other formats raise KeyError: 'step'.
- With a part of the weights on the GPU, FusedAdam counts its steps in its parameter groups, where every step writes the
  loaded number anew. It stands still after a resume.

What the patch does: the copies follow whatever is loaded, dummy_step leaves weights alone, every weight keeps the step
that came with the parameter groups, in a tensor of its own, and FusedAdam's count is its own. 0.15 can save
dp_reshardable, without the step, which no release reads from there. All else that is written is what stock writes.

A file that was written after a damaged resume has a wrong step, and nothing in the optimizer's part of the file tells
it: the step is loaded as it is. Compare `step` of `state["optimizer"]["param_groups"]` with the iteration, and set it
there before `load_state_dict(state)`. `shim.check_resume` says whether a checkpoint was trained without the patch.

Not mended: the format fully_sharded_bucket_space of 0.12 to 0.14, which dist_checkpointing cannot write for two weights
in a bucket, whatever the optimizer. Torch's Adam without offloading, Transformer Engine and Apex, which can only be
loaded once it has stepped (AssertionError). fp32 weights, which the distributed optimizer cannot offload (ValueError).
bf16 weights that are offloaded without the distributed optimizer (issue 4042).

Upstream: pull request 5071 (open) refreshes the copies in `reload_model_params()`, and pull request 5929 (on main)
mends the first KeyError. Nobody mends the rest. Delete when the oldest supported release has all of it.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Mapping
from typing import Any

from shim.patches._arguments import Function, argument, replacing

HYBRID = "megatron.core.optimizer.cpu_offloading.hybrid_optimizer:HybridDeviceOptimizer"
DISTRIBUTED = "megatron.core.optimizer.distrib_optimizer:DistributedOptimizer"
UPDATE_FP32_PARAMS = f"{HYBRID}._update_fp32_params_by_new_state"
DUMMY_STEP = f"{HYBRID}.dummy_step"
SYNC_PARAM_GROUPS = f"{HYBRID}._sync_hdo_param_groups_to_sub_optimizers"
COPY_MODEL_PARAMS = f"{DISTRIBUTED}._copy_model_params_to_main_params"
SET_STATES = f"{DISTRIBUTED}._set_main_param_and_optimizer_states"
STATE_OF_BUCKETS = f"{DISTRIBUTED}.get_parameter_state_dp_reshardable"


def _update_fp32_params_by_new_state(original: Function) -> Function:
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


def _dummy_step(original: Function) -> Function:
    @functools.wraps(original)
    def dummy_step(*args: Any, **kwargs: Any) -> Any:
        hybrid = args[0]
        _refresh(hybrid, hybrid.param_to_inner_param)
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


def _sync_hdo_param_groups_to_sub_optimizers(original: Function) -> Function:
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


def _copy_model_params_to_main_params(original: Function) -> Function:
    @functools.wraps(original)
    def _copy_model_params_to_main_params(*args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        optimizer = args[0]
        hybrid = _hybrid(optimizer)
        if hybrid is None or not hasattr(optimizer, "model_param_group_index_map"):
            return result
        if not _precision_aware(optimizer):
            # Upstream returns before it copies to the main params. Where it sees no such optimizer it copies.
            plain = copy.copy(optimizer)
            plain.optimizer = None
            original(plain, *args[1:], **kwargs)
        fresh = hybrid.param_to_fp32_param if hasattr(hybrid, "update_fp32_param_by_new_param") else {}
        _refresh(hybrid, [param for param in hybrid.param_to_inner_param if param not in fresh])
        return result

    return _copy_model_params_to_main_params


def _set_main_param_and_optimizer_states(original: Function) -> Function:
    param_of = argument(original, "model_param")
    tensors_of, with_tensors = argument(original, "tensors"), replacing(original, "tensors")

    @functools.wraps(original)
    def _set_main_param_and_optimizer_states(*args: Any, **kwargs: Any) -> Any:
        optimizer, tensors = args[0], tensors_of(args, kwargs)
        hybrid = _hybrid(optimizer)
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
            # Upstream has put the step of the parameter groups here, maybe one tensor for all.
            state["step"] = loaded["step"] = state["step"].clone()
        if hybrid is None or not _precision_aware(optimizer):
            held = {name: value for name, value in state.items() if _is_tensor(value)}
            args, kwargs = with_tensors(args, kwargs, {**held, **loaded})
            result = original(*args, **kwargs)
            if hybrid is not None:
                _refresh(hybrid, [param])
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


def _get_parameter_state_dp_reshardable(original: Function) -> Function:
    @functools.wraps(original)
    def get_parameter_state_dp_reshardable(*args: Any, **kwargs: Any) -> Any:
        whole = original(*args, **kwargs)
        for buffer in range(len(args[0].gbuf_ranges)):
            for buckets in whole[buffer].values():
                for tensors in (tensors for bucket in buckets for tensors in bucket):
                    tensors.pop("step", None)  # one number, not one of each element: the parameter groups have it
        return whole

    return get_parameter_state_dp_reshardable


def _hybrid(optimizer: Any) -> Any:
    """The HybridDeviceOptimizer inside, if it is one."""
    inner = optimizer.optimizer
    return inner if hasattr(inner, "param_to_inner_param") else None


def _precision_aware(optimizer: Any) -> bool:
    """Whether the optimizer inside steps on shards of the model's weights, and not on main params in fp32."""
    config = optimizer.config
    return getattr(config, "use_precision_aware_optimizer_no_fp8_or_ds_fp8", config.use_precision_aware_optimizer)


def _is_tensor(value: Any) -> bool:
    return hasattr(value, "copy_")


def _refresh(hybrid: Any, params: Any) -> None:
    """Give the copies of these weights, on which the optimizers inside step, the values of the weights."""
    for param in params:
        inner = hybrid.param_to_inner_param[param]
        if inner is not param:
            inner.data.copy_(param.data)


def bindings(variant: str, options: Mapping[str, Any]) -> Mapping[str, Callable[[Function], Function]]:
    """Target -> factory for a variant. A factory takes upstream's object and returns the replacement."""
    factories: dict[str, Callable[[Function], Function]] = {
        DUMMY_STEP: _dummy_step,
        SYNC_PARAM_GROUPS: _sync_hdo_param_groups_to_sub_optimizers,
        COPY_MODEL_PARAMS: _copy_model_params_to_main_params,
        SET_STATES: _set_main_param_and_optimizer_states,
    }
    if variant != "native":
        factories[UPDATE_FP32_PARAMS] = _update_fp32_params_by_new_state
    if variant == "dp_reshardable":
        factories[STATE_OF_BUCKETS] = _get_parameter_state_dp_reshardable
    return factories
