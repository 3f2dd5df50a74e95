"""The optimizer whose states are on the CPU (`optimizer_cpu_offload`), after weights or a state were loaded.

What is wrong (0.12 to 0.20). HybridDeviceOptimizer steps on copies of the weights, on the CPU or in fp32, and then
copies them over the weights. Nothing refreshes the copies:
1. `reload_model_params()` after weights were loaded leaves the copies as they were: always without the precision-aware
   optimizer, and with it in 0.12. The first step silently restores the random initialisation.
2. A state that is loaded in the format dp_zero_gather_scatter, or from separate files (`load_parameter_state`), does
   also not reach the copies. The first step restores the weights from before the load.
3. A first load fills the empty state by a step with random gradients (`dummy_step`), which moves the weights. Weights
   that were loaded before become the random initialisation.
4. Without the precision-aware optimizer every load raises a KeyError. Main raises another one.
Besides, Adam's `step`:
5. A load of dp_reshardable silently keeps the step that the optimizer had before (0.16 to 0.20). Torch's Adam without
   offloading also does so. There all weights even share one tensor, so that nine weights count nine steps at a time,
   and other formats raise KeyError: 'step'.
6. In 0.15 saving dp_reshardable raises an AssertionError, also for torch's Adam without offloading.
7. With a part of the weights on the GPU, FusedAdam counts its steps in its parameter groups, and every step writes the
   loaded number there again. The count stands still after a resume.
8. Torch's Adam without Transformer Engine and Apex, with and without offloading, cannot be loaded by dist_checkpointing
   before its first step, as every resume does: AssertionError, because `sharded_state_dict` asks for the one step of
   all states, and there are none. A rank that has no trained weight has none later, and cannot save, either.

The patch: the copies follow every load, dummy_step leaves weights alone, every weight keeps the step that came
with the parameter groups, in a separate tensor, and FusedAdam keeps its count. 0.15 can save dp_reshardable, without
the step, which no release reads from there. An optimizer of torch that is to be loaded gets its states before it is
asked for them, as it does with Transformer Engine. Saving one before its first step stays the error that it is.
Everything else is written as on stock.

The calls. On the right is the file that wraps the function, with the defect:

    weights were loaded    reload_model_params
                             ._copy_model_params_to_main_params         copies: refreshes them (1)
    an optimizer is loaded HybridDeviceOptimizer.dummy_step             copies: moves nothing (3)
                           ._update_fp32_params_by_new_state            copies: no KeyError, up to 0.19 (4)
      for each weight      ._set_main_param_and_optimizer_states        loaded_states (2, 5, and 4 on main)
    a step                 ._sync_hdo_param_groups_to_sub_optimizers    steps: leaves FusedAdam's count alone (7)
    a save, 0.15           .get_parameter_state_dp_reshardable          steps: without the step (6)
    a load or a save       .sharded_state_dict                          first_load: asks for no missing step (8)

A file that was written after a damaged resume has a wrong step, and nothing in the optimizer's part of the file shows
it: the step is loaded as it is. Compare `step` of `state["optimizer"]["param_groups"]` with the iteration, and set it
there before `load_state_dict(state)`. `shim.check_resume` says whether a checkpoint was trained without the patch.

Not fixed: the format fully_sharded_bucket_space of 0.12 to 0.14, which dist_checkpointing cannot write for two weights
in a bucket, with any optimizer. bf16 weights that are offloaded without the distributed optimizer (issue 4042).

Upstream: pull request 5071 (open) refreshes the copies in `reload_model_params()`, and pull request 5929 (on main)
fixes the first KeyError. The rest is open.

Delete when: the oldest supported release refreshes the optimizer's copies and keeps the step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from shim.patches._arguments import Function
from shim.patches.megatron_core.cpu_offloaded_optimizer.copies import (
    patch_copy_model_params,
    patch_dummy_step,
    patch_update_fp32_params,
)
from shim.patches.megatron_core.cpu_offloaded_optimizer.first_load import patch_sharded_state_dict
from shim.patches.megatron_core.cpu_offloaded_optimizer.loaded_states import patch_set_states
from shim.patches.megatron_core.cpu_offloaded_optimizer.steps import patch_state_of_buckets, patch_sync_param_groups

HYBRID = "megatron.core.optimizer.cpu_offloading.hybrid_optimizer:HybridDeviceOptimizer."
DISTRIBUTED = "megatron.core.optimizer.distrib_optimizer:DistributedOptimizer."

Bindings = dict[str, Callable[[Function], Function]]

NATIVE: Bindings = {
    HYBRID + "dummy_step": patch_dummy_step,
    HYBRID + "_sync_hdo_param_groups_to_sub_optimizers": patch_sync_param_groups,
    DISTRIBUTED + "_copy_model_params_to_main_params": patch_copy_model_params,
    DISTRIBUTED + "_set_main_param_and_optimizer_states": patch_set_states,
    DISTRIBUTED + "sharded_state_dict": patch_sharded_state_dict,
}
STEP: Bindings = {**NATIVE, HYBRID + "_update_fp32_params_by_new_state": patch_update_fp32_params}
BINDINGS: dict[str, Bindings] = {
    "v0_12": STEP,
    "v0_15": {**STEP, DISTRIBUTED + "get_parameter_state_dp_reshardable": patch_state_of_buckets},
    "v0_16": STEP,
    "v0_20": NATIVE,  # updates its fp32 copies itself
}


def bindings(variant: str, options: Mapping[str, Any]) -> Mapping[str, Callable[[Function], Function]]:
    """Target -> factory for a variant. A factory takes upstream's object and returns the replacement."""
    return BINDINGS[variant]
